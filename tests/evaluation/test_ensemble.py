"""`ensemble` over small models: its results against `eval`, and the command."""

import dataclasses
import json
import shutil
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from ftis_node.cli.app import run
from ftis_node.errors import ConfigError, MachineError, ModelError
from ftis_node.evaluation import ensemble
from ftis_node.evaluation.ensemble import bytes_together, check_models_fit, evaluate_ensemble
from ftis_node.evaluation.ensemble_chat import EnsembleChat
from ftis_node.evaluation.evaluate import answers_of
from ftis_node.evaluation.members import as_members
from ftis_node.evaluation.saved_ensemble import (
    MAX_BYTES,
    MAX_MODELS,
    MIXTURES,
    MODES,
    open_ensemble,
    save_ensemble,
)
from ftis_node.generation.chat_model import ChatSettings
from ftis_node.generation.evaluate import summarize
from ftis_node.models import PromptSettings, resolve_model
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
    assert chosen is not None
    assert sum(chosen.values()) == 6
    assert by_mode["confidence"].forward_tokens == by_mode["vote"].forward_tokens
    fractions = [fraction for fraction, _ in reported if fraction is not None]
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(1.0)
    parts = {"a", "b", *MIXTURES}
    assert {what.partition(":")[0] for fraction, what in reported if fraction} == parts


async def test_models_with_different_tokenizers_vote_but_do_not_mix(models, other_tokenizer):
    both = [models[0], other_tokenizer]
    result = await evaluate_ensemble(both, "arithmetic", modes=["vote", "confidence"], **SMALL)
    assert result.modes[1].chosen is not None
    assert sum(result.modes[1].chosen.values()) == 6
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
        (*both, "--engine", "tensorrt"): "no engine 'tensorrt'",
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
    monkeypatch.setattr(ensemble, "free_bytes", lambda device: 1000)
    with pytest.raises(MachineError, match=r"2 models together need about .* the mode vote or confidence"):
        check_models_fit(sources, max_tokens=48)
    arguments = ["ensemble", "--models", ",".join(models), "--task", "arithmetic", *FLAGS]
    assert run([*arguments, "--mode", "posterior"]) == 3
    assert run([*arguments, "--mode", "vote,confidence"]) == 0, "these load one model at a time"
    capsys.readouterr()


@pytest.mark.parametrize("mode", ["mean", "vote", "confidence"])
def test_a_saved_ensemble_answers_as_it_was_measured(mode, tiny_models, tmp_path, capsys):
    """`ensemble` saves it, and `eval` and `try` read the file and the folders beside it."""
    file = tmp_path / "both.json"
    for size in ("s", "m"):
        shutil.copytree(tiny_models[size], tmp_path / size)
    command = ["ensemble", "--models", f"{tmp_path}/s,{tmp_path}/m", "--mode", mode, "--save", str(file)]
    task = ["--task", "arithmetic", "--limit", "24", "--max-tokens", "48", "--engine", "torch", "--json"]
    assert run([*command, *task]) == 0
    measured = json.loads(capsys.readouterr().out)["modes"][0]
    assert [model["model"] for model in json.loads(file.read_text())["models"]] == ["./s", "./m"]
    assert run(["eval", "--ensemble", str(file), "--compare", f"{tmp_path}/s", "--show", "4", *task]) == 0
    document = json.loads(capsys.readouterr().out)
    assert 0 < document["pass_at_1"] == measured["pass_at_1"]
    assert document["completion_tokens_mean"] == measured["completion_tokens_mean"]
    assert document["compared"]["model"] == f"{tmp_path}/s"
    for problem in document["problems"]:
        assert run(["try", problem["problem"], "--ensemble", str(file), "--device", "cpu", "--json"]) == 0
        (answer,) = json.loads(capsys.readouterr().out)["answers"]
        assert (answer["role"], answer["model"]) == ("ensemble", f"{mode} of s, m")
        assert answer["text"] == problem["after"]["text"]
        assert (answer["chosen"] in ("s", "m")) == (mode != "mean")


def test_the_weights_of_a_file_are_the_prior_of_a_mixture(tiny_models, tmp_path, capsys):
    models = [{"name": size, "model": str(tiny_models[size])} for size in ("s", "m")]
    texts = []
    for weights in ((1e6, 1e-6), (1e-6, 1e6)):
        weighted = [model | {"weight": weight} for model, weight in zip(models, weights, strict=True)]
        (tmp_path / "mean.json").write_text(json.dumps({"schema": 1, "mode": "mean", "models": weighted}))
        task = ["--task", "arithmetic", "--limit", "16", "--max-tokens", "48", "--engine", "torch", "--show", "16"]
        assert run(["eval", "--ensemble", str(tmp_path / "mean.json"), *task, "--json"]) == 0
        texts.append([each["after"]["text"] for each in json.loads(capsys.readouterr().out)["problems"]])
    assert run(["eval", "--model", models[1]["model"], "--compare", models[0]["model"], *task, "--json"]) == 0
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert texts == [[each[who]["text"] for each in problems] for who in ("before", "after")]
    assert texts[0] != texts[1]


def test_a_conversation_with_an_ensemble_has_its_answers(models, tmp_path):
    file = tmp_path / "both.json"
    save_ensemble(file, "confidence", as_members(models))
    with open_ensemble(file) as ensemble:
        settings = ChatSettings(max_tokens=24, device="cpu")
        chat = EnsembleChat(ensemble, systems=lambda model: "", prompts=PromptSettings(), settings=settings)
    first = chat.ask("12+30=")
    assert (first.truncated, first.num_tokens, first.chosen in ("a", "b")) == (True, 24, True)
    assert chat.ask("12+30=").text != first.text, "the prompt has the first turn"
    chat.reset()
    assert chat.ask("12+30=") == first
    with pytest.raises(ModelError, match=r"reads 512 at most: /reset starts"):
        chat.ask("7 " * 400)


@pytest.mark.parametrize("mode", ["confidence", "mean"])
def test_a_conversation_on_the_cpu_needs_no_memory_of_a_gpu(models, tmp_path, monkeypatch, mode):
    """A node may use all of the GPU."""
    monkeypatch.setattr(ensemble, "pick_device", lambda device: "cpu" if device == "cpu" else "cuda")
    monkeypatch.setattr(ensemble, "free_bytes", lambda device: 1 << 30 if device == "cpu" else 0)
    file = tmp_path / "both.json"
    save_ensemble(file, mode, as_members(models))
    with open_ensemble(file) as opened:
        parts: Any = {"systems": lambda model: "", "prompts": PromptSettings()}
        EnsembleChat(opened, **parts, settings=ChatSettings(device="cpu"))
        with pytest.raises(MachineError, match=r"and 0\.0 GiB are free"):
            EnsembleChat(opened, **parts, settings=ChatSettings())


ONE_MODEL: Any = {"name": "a", "model": "./a"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is no saved ensemble"),
        ("[" * 5000, "is no saved ensemble"),
        (" " * (MAX_BYTES + 1), "larger than the limit"),
        ({"schema": 2, "mode": "vote", "models": [ONE_MODEL]}, "schema 2, this version reads 1"),
        ({"schema": 1, "mode": "gate", "models": [ONE_MODEL]}, "no mode 'gate'"),
        ({"schema": 1, "mode": "vote", "models": []}, "length >= 1"),
        ({"schema": 1, "mode": "vote", "models": [ONE_MODEL] * (MAX_MODELS + 1)}, f"length <= {MAX_MODELS}"),
        ({"schema": 1, "mode": "mean", "models": [ONE_MODEL | {"weight": 0}]}, "models[0].weight"),
        ({"schema": 1, "mode": "mean", "models": [ONE_MODEL | {"code": "x"}]}, "unknown field `code`"),
        ({"schema": 1, "mode": "mean", "models": [ONE_MODEL | {"name": "x" * 2000}]}, "length <= 1024"),
        (
            {"schema": 1, "mode": "vote", "models": [ONE_MODEL, ONE_MODEL | {"weight": 2}]},
            "vote has no weights",
        ),
        ({"schema": 1, "mode": "vote", "models": [ONE_MODEL]}, "no such folder"),
        (None, "no such file"),
    ],
)
def test_a_file_of_somebody_else_is_bounded(content, words, tmp_path, capsys):
    file = tmp_path / "theirs.json"
    if content is not None:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    assert run(["try", "12+30=", "--ensemble", str(file)]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and not captured.out
