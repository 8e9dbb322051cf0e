"""`eval`, `ensemble`, `doctor` and `export` render prompts as the home's node does, and have the limits of its run."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftis_node.cli.app import run
from ftis_node.config.home import Home
from ftis_node.config.manifest import load_manifest
from ftis_node.evaluation import model_answers
from ftis_node.evaluation.members import prompts_for_command, swarm_members
from ftis_node.evaluation.model_answers import Asking, Expert, Study
from ftis_node.generation.evaluate import answer_problems
from ftis_node.models import PromptSettings, PromptTokenizer
from ftis_node.tasks import load_task
from tests.cli.test_export import RUN, trained_home
from tests.models.tiny_models import save_tiny

PEER_ID = "12D3KooWKVUU6HyBAxFk1xtH4qEU7NmphAH9gx5PWRmJPNd1wnPM"
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
CHAT = (
    "{% if style == 'plain' %}   plain\n{% endif %}\n{{ strftime_now('%d %b %Y') }} Q: {{ messages[-1]['content'] }} A:"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
ARGUMENTS = {"enable_thinking": False, "style": "plain", "unused": [None, 'a "%}" b', {"x": 1.5}]}
PROMPTS = {"template_arguments": ARGUMENTS}
TOML = '[prompts.template_arguments]\nenable_thinking = false\nstyle = "plain"\nunused = [1]\n'
RENDERED = "   plain\n01 Jan 2026 Q: What is 12 + 30? A:<think></think>"


@pytest.fixture(autouse=True)
def no_default_home(tmp_path, monkeypatch):
    monkeypatch.setenv("FTIS_HOME", str(tmp_path / "no home"))


def give_template(folder: Path) -> Path:
    (folder / "chat_template.jinja").write_text(CHAT)
    return folder


def prompt_of(tokenizer: PromptTokenizer) -> str:
    return tokenizer.decode(tokenizer.encode_prompt(QUESTION), skip_special=False)


@pytest.fixture
def evaluated(monkeypatch):
    """The prompts of the models that were evaluated."""
    prompts: list[str] = []

    def noted(engine, problems, tokenizer, **options):
        prompts.append(prompt_of(tokenizer))
        return answer_problems(engine, problems, tokenizer, **options)

    monkeypatch.setattr(model_answers, "answer_problems", noted)
    return prompts


def test_a_command_reads_environment_node_toml_and_the_last_start(tmp_path, monkeypatch):
    home = Home(tmp_path)
    assert prompts_for_command(home) == PromptSettings()
    home.settings.write_text(json.dumps({"model": "m", "prompts": PROMPTS}))
    home.run_toml.write_text(RUN)
    assert prompts_for_command(home).arguments == ARGUMENTS
    home.node_toml.write_text('[prompts.template_arguments]\nstyle = "short"')
    assert prompts_for_command(home).arguments["style"] == "short"
    monkeypatch.setenv("FTIS_PROMPTS__TEMPLATE_ARGUMENTS", '{"style": "other"}')
    assert prompts_for_command(home).arguments["style"] == "other"


@pytest.mark.parametrize("source", ["role", "roles", "environment"])
def test_role_and_learner_of_a_generator_may_have_different_sources(tmp_path, monkeypatch, source):
    home = Home(tmp_path)
    last = {"model": "m", "role": "generator", "roles": {"follow": PEER_ID}, "prompts": PROMPTS}
    home.settings.write_text(json.dumps(last))
    if source == "environment":
        monkeypatch.setenv("FTIS_ROLE", "generator")
    else:
        home.node_toml.write_text({"role": 'role = "generator"', "roles": f'[roles]\nfollow = "{PEER_ID}"'}[source])
    assert prompts_for_command(home).arguments == ARGUMENTS


@pytest.mark.parametrize("command", ["eval", "ensemble"])
def test_a_command_renders_by_the_home(tmp_path, evaluated, command):
    model = give_template(save_tiny(tmp_path / "tiny"))
    home = Home(tmp_path / "home")
    home.create()
    home.node_toml.write_text(TOML)
    home.run_toml.write_text(RUN)
    task = ["--task", "arithmetic", "--limit", "1", "--engine", "torch", "--max-tokens", "99"]
    arguments = [command, "--model" if command == "eval" else "--models", str(model), *task]
    arguments += ["--mode", "vote"] if command == "ensemble" else []
    assert (run([*arguments, "--home", str(home.root)]), evaluated) == (0, [RENDERED])


def test_doctor_reads_the_arguments_in_node_toml(tmp_path, capsys):
    model = give_template(save_tiny(tmp_path / "tiny"))
    home = Home(tmp_path / "home")
    home.create()
    home.node_toml.write_text(TOML)
    run(["doctor", "--model", str(model), "--only", "model", "--json", "--home", str(home.root)])
    (found,) = (each for each in json.loads(capsys.readouterr().out) if each["id"] == "model.tokenizer")
    assert found["level"] == "ok" and "begins the answer with <think></think>" in found["finding"]


@pytest.mark.parametrize(("lora", "flags"), [(False, []), (True, []), (True, ["--merge"])])
def test_an_exported_model_is_prompted_as_by_its_node(tmp_path, evaluated, lora, flags):
    from transformers import AutoTokenizer

    trained_home(tmp_path, lora=lora)
    give_template(tmp_path / "tiny")
    home, out = Home(tmp_path / "home"), tmp_path / "out"
    settings = json.loads(home.settings.read_text())
    home.settings.write_text(json.dumps(settings | {"prompts": PROMPTS}))
    assert run(["export", "--out", str(out), "--home", str(home.root), *flags]) == 0
    assert run(["eval", "--model", str(out), "--task", "arithmetic", "--limit", "1", "--engine", "torch"]) == 0
    assert evaluated == [RENDERED]
    text = AutoTokenizer.from_pretrained(out).apply_chat_template(QUESTION, tokenize=False)
    assert (text[:9], text[-31:]) == (RENDERED[:9], RENDERED[-31:]), "but for the date"
    text = AutoTokenizer.from_pretrained(out).apply_chat_template(QUESTION, tokenize=False, enable_thinking=True)
    assert text.endswith("A:"), "the arguments are defaults"


def test_a_member_of_a_swarm_is_prompted_by_its_own_home(tmp_path):
    trained_home(tmp_path, lora=False)
    give_template(tmp_path / "tiny")
    home = Home(tmp_path / "home")
    settings = json.loads(home.settings.read_text())
    home.settings.write_text(json.dumps(settings | {"prompts": PROMPTS}))
    (scratch := tmp_path / "scratch").mkdir()
    others = PromptSettings(arguments={"style": "other"})
    [expert] = model_answers.load_experts(swarm_members([home.root], scratch), others, lambda *_: None)
    assert prompt_of(expert.tokenizer) == RENDERED


UNUSED: Any = None
MAX_TOKENS = 96


def write_run(folder: Path, preset: str) -> None:
    """Write a run with turns of 5 tokens, and with 3 turns in an episode; with one more of each in a folder `.last`."""
    more = folder.suffix == ".last"
    run = load_manifest(preset.removesuffix(".last"))
    episode = run.episode and run.episode.model_copy(update={"max_turns": 3 + more})
    sampling = run.sampling.model_copy(update={"max_completion_tokens": 5 + more})
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(run.model_copy(update={"episode": episode, "sampling": sampling}).to_toml())


@pytest.mark.parametrize(
    ("runs", "task", "limits"),
    [
        (["guess-ftis"], "guess", (5, 3)), (["calculator-ftis", "guess-ftis"], "guess", (5, 3)),
        (["guess-ftis", "guess-ftis.last"], "guess", (6, 4)), ([], "guess", (8, 4)),
        (["calculator-ftis"], "guess", (8, 4)), (["arithmetic-ftis"], "arithmetic", (MAX_TOKENS - 10, None)),
    ],
)  # fmt: skip
async def test_episodes_have_the_limits_of_the_run(tmp_path, monkeypatch, runs, task, limits) -> None:
    for preset in runs:
        write_run(tmp_path / preset, preset)
    given: dict[str, Any] = {}

    async def answer(*_: Any, **options: Any) -> list[Any]:
        given.update(options)
        return []

    monkeypatch.setattr(model_answers, "answer_problems", answer)
    sources: list[Any] = [SimpleNamespace(path=tmp_path / folder) for folder in (*runs, "without a run")]
    experts = [Expert(UNUSED, source, UNUSED) for source in sources]
    problems = load_task(task, "test")
    study = Study(experts, problems, UNUSED, Asking(max_tokens=MAX_TOKENS), num_parts=1)
    await study._answers(UNUSED, UNUSED, "m")
    max_turns = given["episode"] and given["episode"].max_turns
    assert (given["completion_limit"](10), max_turns) == limits
    assert given["completion_limit"](MAX_TOKENS - 2) == 2
