"""`ensemble` over small models: its results against `eval`, its members, and the command."""

import dataclasses
import json
import shutil
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from ftis_node.cli.app import run
from ftis_node.config.home import Home
from ftis_node.errors import ConfigError, MachineError
from ftis_node.evaluation import ensemble
from ftis_node.evaluation.ensemble import MIXTURES, MODES, bytes_together, check_models_fit, evaluate_ensemble
from ftis_node.evaluation.members import Member, as_members, swarm_members
from ftis_node.evaluation.model_answers import answers_of
from ftis_node.generation.evaluate import summarize
from ftis_node.models import resolve_model
from tests.cli.test_export import trained_home
from tests.models.tiny_models import make_tokenizer, save_tiny

SMALL = {"limit": 6, "max_tokens": 48, "engine": "torch"}
FLAGS = ["--limit", "6", "--max-tokens", "48", "--engine", "torch"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return two random models of different sizes with one tokenizer."""
    root = tmp_path_factory.mktemp("models")
    return str(save_tiny(root / "a", seed=1)), str(save_tiny(root / "b", seed=2, hidden_size=96))


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory):
    """Return a model with another tokenizer."""
    folder = save_tiny(tmp_path_factory.mktemp("models") / "other_tokenizer", seed=3)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<answer>"])
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.timeout(400)
async def test_an_ensemble_of_one_has_the_result_of_eval(tiny_models):
    """This holds for every mode and field. Also with two experts, each has the result of `eval`."""
    options: Any = {"limit": 48, "max_tokens": 32, "engine": "torch"}
    model = str(tiny_models["s"])
    alone = await evaluate_ensemble([model], "arithmetic", modes=MODES, **options)
    m = str(tiny_models["m"])
    by_eval, other = [summarize(each, k=1) for each in await answers_of([model, m], "arithmetic", k=1, **options)]
    assert by_eval.n == 48
    assert 0 < by_eval.pass_at_1 < 1, "a model that is always right could hide a difference"
    for entry in (*alone.experts, *alone.modes):
        assert dataclasses.asdict(entry.result) == dataclasses.asdict(by_eval), entry.name
    both = await evaluate_ensemble([model, m], "arithmetic", modes=MODES, **options)
    assert [entry.result for entry in both.experts] == [by_eval, other]


async def test_the_costs_and_choices_of_two_experts(models):
    reported: list[tuple[float | None, str]] = []
    result = await evaluate_ensemble(
        models, "arithmetic", modes=MODES, on_progress=lambda fraction, what: reported.append((fraction, what)), **SMALL
    )
    assert [entry.name for entry in result.experts] == ["a", "b"]
    assert [entry.name for entry in result.modes] == list(MODES)
    a, b = result.experts
    by_mode = {entry.name: entry for entry in result.modes}
    assert by_mode["vote"].generated_tokens == a.generated_tokens + b.generated_tokens
    assert by_mode["vote"].forward_tokens == a.forward_tokens + b.forward_tokens
    prompts = a.forward_tokens - a.generated_tokens
    for mode in MIXTURES:
        assert by_mode[mode].forward_tokens == 2 * (prompts + by_mode[mode].generated_tokens)
    chosen = by_mode["confidence"].chosen
    assert chosen is not None and sum(chosen.values()) == 6
    assert by_mode["confidence"].forward_tokens == by_mode["vote"].forward_tokens
    fractions = [fraction for fraction, _ in reported if fraction is not None]
    assert fractions == sorted(fractions) and fractions[-1] == pytest.approx(1.0)
    parts = {"a", "b", *MIXTURES}
    assert {what.partition(":")[0] for fraction, what in reported if fraction} == parts


async def test_models_with_different_tokenizers_vote_but_do_not_mix(models, other_tokenizer):
    both = [models[0], other_tokenizer]
    result = await evaluate_ensemble(both, "arithmetic", modes=["vote", "confidence"], **SMALL)
    assert result.modes[1].chosen is not None and sum(result.modes[1].chosen.values()) == 6
    for mode in MIXTURES:
        with pytest.raises(ConfigError, match="a and other_tokenizer have different tokenizers.*the mode vote or"):
            await evaluate_ensemble(both, "arithmetic", modes=["vote", mode], **SMALL)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    code = run(["ensemble", "--task", "arithmetic", *arguments])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ftis-node: ")]
    assert len(lines) == 1, lines
    return code, lines[0]


def test_invalid_arguments_are_reported_in_one_line(capsys, models, other_tokenizer, tmp_path):
    both = ["--models", ",".join(models)]
    (tmp_path / "nothing").mkdir()
    adapter = tmp_path / "swarm" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    table = {
        ("--models", f"{models[0]},{other_tokenizer}"): "a and other_tokenizer have different tokenizers",
        (*both, "--mode", "postirior"): "no mode 'postirior': use all, or some of posterior, mean",
        (*both, "--mode", ","): "no mode ''",
        (*both, "--engine", "tensorrt"): "'tensorrt' is not one of 'auto', 'vllm', 'torch'",
        ("--models", str(tmp_path / "missing")): "no such folder",
        (): "an ensemble needs models: name them with --models A,B or --swarm FOLDER",
        ("--swarm", str(tmp_path / "nothing")): "holds no trained model",
        ("--swarm", str(tmp_path / "nowhere")): "no such folder",
        ("--swarm", str(tmp_path / "swarm")): "describes no plain LoRA adapter",
    }
    for arguments, words in table.items():
        code, line = error_of(capsys, *arguments)
        assert code == 2, line
        assert words in line


def test_the_command_prints_json_and_a_table(capsys, models):
    arguments = ["ensemble", "--models", ",".join(models), "--task", "arithmetic", *FLAGS]
    assert run([*arguments, "--mode", "all", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"task", "n", "experts", "modes"}
    assert [entry["name"] for entry in document["experts"]] == ["a", "b"]
    assert document["experts"][0]["model"] == models[0]
    assert [entry["name"] for entry in document["modes"]] == list(MODES)
    figures = {"pass_at_1", "n", "truncated", "unscored", "too_long", "completion_tokens_mean"}
    for entry in (*document["experts"], *document["modes"]):
        assert set(entry) >= figures | {"name", "generated_tokens", "forward_tokens"}
    assert run([*arguments, "--mode", "vote,confidence"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "arithmetic: 6 problems"
    assert lines[1].split() == ["pass@1", "generated", "forward", "domain"]
    assert [line.split()[0] for line in lines[2:6]] == ["a", "b", "vote", "confidence"]
    assert lines[6].startswith("confidence chose a ")


def test_a_mixture_that_does_not_fit_is_refused(models, monkeypatch, capsys):
    sources = [resolve_model(model) for model in models]
    # rows: 128 / 2; numbers in the cache of a token: keys and values x 2 layers x 2 heads x (64 or 96) / 4
    numbers = [sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(model).parameters()) for model in models]
    caches = [64 * 100 * 2 * 2 * 2 * width // 4 for width in (64, 96)]
    assert bytes_together(sources, max_tokens=100, bytes_per_number=4) == 4 * (sum(numbers) + sum(caches))
    check_models_fit(sources, max_tokens=48)
    monkeypatch.setattr(ensemble, "free_host_bytes", lambda: 1000)
    with pytest.raises(MachineError, match=r"2 models together need about .* the mode vote or confidence"):
        check_models_fit(sources, max_tokens=48)
    arguments = ["ensemble", "--models", ",".join(models), "--task", "arithmetic", *FLAGS]
    assert run([*arguments, "--mode", "posterior"]) == 3
    assert run([*arguments, "--mode", "vote,confidence"]) == 0, "these load one model at a time"
    capsys.readouterr()


def test_members_have_distinct_names():
    members = as_members(["org/x", "org/x", Member("x", "y", "arithmetic"), "org/x"])
    assert [member.name for member in members] == ["org/x", "org/x-2", "x", "org/x-3"]
    assert members[2] == Member("x", "y", "arithmetic")


@pytest.mark.timeout(240)
async def test_members_of_a_swarm_are_exports_and_homes_with_a_checkpoint(tmp_path, caplog):
    """The swarm has an exported model, the home of a learner, two of other roles, and one without a checkpoint."""
    trained_home(tmp_path, lora=True)
    swarm = tmp_path / "swarm"
    save_tiny(swarm / "exported", seed=1)
    shutil.move(tmp_path / "home", swarm / "zoe")
    settings = json.loads(Home(swarm / "zoe").settings.read_text())
    for name, role in (("link", "exchange"), ("helper", "generator")):
        other = Home(swarm / name)
        other.create()
        other.run_toml.write_text(Home(swarm / "zoe").run_toml.read_text())
        other.settings.write_text(json.dumps({**settings, "role": role}))
    (swarm / "notes").mkdir()
    new = Home(swarm / "new")
    new.create()
    new.run_toml.write_text(other.run_toml.read_text())
    new.settings.write_text(json.dumps(settings))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    members = swarm_members([swarm], scratch)
    assert [(member.name, member.domain) for member in members] == [("exported", None), ("zoe", "arithmetic")]
    assert f"{new.root} is skipped: it has no checkpoint yet" in caplog.text
    result = await evaluate_ensemble(
        members, "arithmetic", modes=["posterior", "vote"], limit=6, max_tokens=48, engine="torch"
    )
    assert [(entry.name, entry.domain) for entry in result.experts] == [("exported", None), ("zoe", "arithmetic")]
    Home(swarm / "zoe").settings.write_text(json.dumps({**settings, "name": "zoe/the first"}))
    (named,) = swarm_members([swarm / "zoe"], scratch)
    assert named.name == "zoe/the first" and named.model != members[1].model
    only_helper = tmp_path / "helpers"
    only_helper.mkdir()
    shutil.move(swarm / "helper", only_helper / "helper")
    with pytest.raises(ConfigError, match="homes of nodes that learn"):
        swarm_members([only_helper], scratch)
