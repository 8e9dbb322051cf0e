"""`export` writes a model that transformers and PEFT load, with the log-probs of the learner."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ftis_node.cli.app import run
from ftis_node.config.home import Home
from ftis_node.config.manifest import parse_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.config.workers import LoraSection, Quantize
from ftis_node.learner.core import Learner
from ftis_node.memory.placement import WorkerPlacement
from ftis_node.models import resolve_model
from ftis_node.node.startup.factories import learner_boot
from ftis_node.telemetry.status import EvalStatus, LearnerStatus, Status
from ftis_node.workers.weight_store import WeightProof, probe_logprobs
from tests.deploy.files import check_command
from tests.learner.learner_rig import random_groups
from tests.models.tiny_models import save_tiny

RUN = 'name = "a"\ntask = "arithmetic"\n[optimizer]\nlearning_rate = 1e-2\nlora_learning_rate = 1e-2'


def trained_home(root: Path, *, lora: bool, run: str = RUN, quantize: Quantize = "none") -> WeightProof:
    """Create the home of a node that trained two steps; return the learner's log-probs of fixed tokens."""
    home = Home(root / "home")
    home.create()
    model = save_tiny(root / "tiny", seed=5)
    adapter = LoraSection(rank=4, alpha=8)
    settings = NodeSettings(model=str(model), lora=lora, lora_adapter=adapter, quantize=quantize, device="cpu")
    manifest = parse_manifest(run, source="run.toml")
    home.run_toml.write_text(manifest.to_toml())
    home.settings.write_text(settings.model_dump_json())
    source = resolve_model(settings.model)
    how = {"weights": home.weights, "adapters": quantize != "none"}
    learner = Learner(learner_boot(settings, manifest, source, home, WorkerPlacement(), **how))
    for step in (1, 2):
        learner.train(random_groups(seed=step), step=step)
    learner.checkpoints.save_if_behind()  # as at an orderly end
    evaluations = [EvalStatus(step, "arithmetic", accuracy, 8) for step, accuracy in ((0, 0.25), (2, 0.5), (4, 0.75))]
    home.status.write_bytes(Status(learner=LearnerStatus(own_groups=6, foreign_groups=2), eval=evaluations).to_json())
    return learner.state().proof


def test_the_adapter_of_a_4_bit_base_is_merged_into_the_whole_base(tmp_path):
    trained_home(tmp_path, lora=True, quantize="4bit")
    out = tmp_path / "out"
    assert run(["export", "--out", str(out), "--home", str(tmp_path / "home"), "--merge"]) == 0
    base, merged = (load_file(folder / "model.safetensors") for folder in (tmp_path / "tiny", out))
    added = [merged[name] - value for name, value in base.items() if name.endswith("_proj.weight")]
    assert all(0 < torch.linalg.matrix_rank(each, atol=1e-5) <= 4 for each in added), "the adapter, and no rounding"
    assert torch.equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    assert "--lora --quantize 4bit --seed" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("lora", "flags", "has_adapter"), [(False, [], False), (True, [], True), (True, ["--merge"], False)]
)
def test_the_exported_model_has_the_learners_logprobs_and_a_card(tmp_path, capsys, lora, flags, has_adapter):
    from huggingface_hub import ModelCard
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    proof = trained_home(tmp_path, lora=lora)
    out = tmp_path / "out"
    assert run(["export", "--out", str(out), "--home", str(tmp_path / "home"), *flags]) == 0
    shown = capsys.readouterr().out
    assert (
        "the model after step 2" in shown and f"  push   ftis-node export --home {tmp_path / 'home'} --push-to" in shown
    )
    commands = {line.split()[0]: shlex.split(line)[1:] for line in shown.splitlines() if line.startswith("  ")}
    assert commands["serve"][:2] == ["vllm", "serve"]
    assert commands["serve"][2:] == (
        [str(tmp_path / "tiny"), *"--enable-lora --max-lora-rank 8 --lora-modules".split(), f"trained={out}"]
        if has_adapter
        else [str(out)]
    )
    check_command(commands["ask"][1:])
    check_command(commands["push"][1:])
    assert commands["push"][:4] == ["ftis-node", "export", "--home", str(tmp_path / "home")]
    assert run([*commands["ask"][1:], "--max-tokens", "4"]) == 0
    assert len(capsys.readouterr().out) > 1
    assert (out / "adapter_config.json").exists() == has_adapter
    assert (out / "model.safetensors").exists() != has_adapter
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {0o644}, "other users can read it"
    card = ModelCard.load(out / "README.md")
    assert card.data.library_name == ("peft" if has_adapter else "transformers")
    assert card.data.base_model is None, "the hub has no model of that name"
    assert "| base model | tiny (a local folder) |" in card.text
    assert "# tiny, 2 steps of arithmetic" in card.text
    assert "| run | a (" in card.text and "), method ftis |" in card.text
    assert "| pass@1, greedy | 0.500 on arithmetic |" in card.text
    assert "| groups trained on | 6 own, 2 of peers |" in card.text
    assert parse_manifest((out / "run.toml").read_text(), source="run.toml") == parse_manifest(RUN, source="here")
    loader: Any = AutoPeftModelForCausalLM if has_adapter else AutoModelForCausalLM
    exported = loader.from_pretrained(out, dtype=torch.float32).eval()
    assert proof.rms_difference(probe_logprobs(exported, proof.probe_ids)) < 1e-5
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", dtype=torch.float32).eval()
    assert proof.rms_difference(probe_logprobs(start, proof.probe_ids)) > 0.01, "it was trained"
    assert len(AutoTokenizer.from_pretrained(out)) > 0
    assert run(["export", "--out", str(out), "--home", str(tmp_path / "home")]) == 2, "the folder is in use"


def test_settings_of_another_release_are_one_line(tmp_path, capsys):
    home = Home(tmp_path / "home")
    home.create()
    home.run_toml.write_text(RUN)
    home.settings.write_text('{"model": "m", "quux": 1}')
    assert run(["export", "--out", str(tmp_path / "out"), "--home", str(home.root)]) == 2
    message = f"{home.settings}: unknown key 'quux'; `ftis-node join --home {home.root}` writes it again"
    assert message in capsys.readouterr().err
