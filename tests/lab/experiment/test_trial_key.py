"""The keys of trials: they change with all that changes a result, and with nothing else."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from ftis_node.config.manifest import load_manifest
from ftis_node.config.workers import LoraSection
from ftis_node.lab.experiment import trial_key
from ftis_node.lab.experiment.pairs import Pair, TrialMember
from ftis_node.lab.experiment.trial import _settings
from ftis_node.lab.experiment.trial_key import with_keys
from ftis_node.lab.experiment.trial_matrix import Experiment


def write_data(folder: Path, *, answer: int) -> None:
    folder.mkdir(exist_ok=True)
    for split in ("train", "test"):
        rows = [{"question": f"{split} {row}?", "answer": f"#### {answer + row}"} for row in range(8)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tiny_models, tmp_path, monkeypatch):
    """A folder with a model and a data set, which is the current one."""
    shutil.copytree(tiny_models["s"], tmp_path / "s")
    write_data(tmp_path / "data", answer=0)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def experiment_in(root: Path | str) -> Experiment:
    return Experiment(
        base=load_manifest("gsm8k-ftis"),
        pairs=(Pair("s,m", (TrialMember("s", f"{root}/s"), TrialMember("m", f"{root}/s"))),),
        methods=("alone", "ftis"),
        task_spec=f"gsm8k:{root}/data",
        eval_specs=(f"gsm8k:{root}/data",),
        steps=4,
        seeds=range(1),
        lora_adapter=LoraSection(),
        device="cpu",
    )


def keys(experiment: Experiment) -> list[str]:
    return [trial.key for trial in with_keys(experiment.trials())]


def test_a_key_does_not_depend_on_the_spelling_of_paths_and_on_the_environment(folder, monkeypatch):
    expected = keys(experiment_in(folder))
    assert len(set(expected)) == 3
    (folder / "link").symlink_to(folder)
    for root in (".", f"{folder}/data/..", "link"):
        assert keys(experiment_in(root)) == expected
    monkeypatch.setenv("FTIS_DTYPE", "bfloat16")
    monkeypatch.setenv("FTIS_LEARNER__KERNELS", "plain")
    trial = experiment_in(folder).trials()[0]
    assert _settings(trial, trial.members[0]).dtype == "auto", "the environment changes a result"


def test_a_key_depends_on_all_that_determines_the_result(folder, monkeypatch):
    experiment = experiment_in(folder)
    found = set(keys(experiment))

    def fresh(changed: Experiment = experiment) -> bool:
        new = set(keys(changed))
        is_fresh = new.isdisjoint(found)
        found.update(new)
        return is_fresh

    for changes in (
        {"steps": 5},
        {"delays": ("fixed:2",)},
        {"seeds": range(1, 2)},
        {"lora_adapter": LoraSection(rank=4)},
    ):
        assert fresh(replace(experiment, **changes)), changes  # type: ignore[arg-type]
    weights = folder / "s/model.safetensors"
    tensors = load_file(weights)
    name = min(tensors)
    tensors[name].view(-1)[-1] += 1e-3
    save_file(tensors, weights, metadata={"format": "pt"})
    assert fresh(), "other weights"
    template = folder / "s/chat_template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    assert fresh(), "another chat template"
    write_data(folder / "data", answer=1)
    assert fresh(), "other problems"
    monkeypatch.setattr(trial_key, "pick_device", lambda device: "cuda")
    assert fresh(), "another device"
