"""`chat`, `try` and `eval` of homes and pairs of tiny models: the answers are those of the engine, and of the home."""

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ftis_node.cli.app import run
from ftis_node.config.home import Home
from ftis_node.config.manifest import EpisodeSection, load_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.errors import ModelError
from ftis_node.evaluation.chat import environments_of
from ftis_node.evaluation.model_answers import difference
from ftis_node.generation.chat_model import ChatModel, ChatSettings, chat_environments
from ftis_node.generation.evaluate import Answered, ScoredAnswer
from ftis_node.models import PromptSettings, PromptTokenizer, resolve_model
from ftis_node.records.group import CompletionStatus, FinishReason
from ftis_node.tasks import load_task
from ftis_node.telemetry.terminal_text import printable
from tests.cli.test_export import RUN, trained_home
from tests.conftest import with_sections
from tests.models.tiny_models import make_tokenizer, save_tiny
from tests.trained_models import trained_model

QUESTION = "What is 12 + 30?"


@pytest.fixture(autouse=True)
def no_default_home(tmp_path, monkeypatch):
    monkeypatch.setenv("FTIS_HOME", str(tmp_path / "no home"))


def opened(folder: Path, **settings: Any) -> ChatModel:
    chat = ChatSettings(device="cpu", **{"max_tokens": 24} | settings)
    return ChatModel("model", resolve_model(str(folder)), prompts=PromptSettings(), settings=chat)


def answer_of(model: ChatModel) -> str:
    return model.ask(QUESTION).text


def json_of(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Run a command with --json, and return its document."""
    capsys.readouterr()
    assert run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_greedy_answers_are_those_of_the_evaluation(capsys):
    """Both commands read one model by different loops: `generate` of transformers, and the engine."""
    model = str(trained_model("s"))
    asked = ["--task", "arithmetic", "--limit", "6", "--show", "6", "--engine", "torch"]
    shown = json_of(capsys, "eval", "--model", model, *asked)["problems"]
    assert len(shown) == 6
    for problem in shown:
        (reply,) = json_of(capsys, "try", problem["problem"], "--model", model)["answers"]
        assert reply["text"] == problem["after"]["text"] and not reply["truncated"]


@pytest.mark.parametrize("stop", [(), ("1", "2")])
def test_an_episode_is_played_as_in_the_evaluation(tmp_path, capsys, stop):
    """A model that does sums says a number and stops, so that each game has several turns."""
    model = shutil.copytree(trained_model("s"), tmp_path / "s")
    (model / "run.toml").write_text(with_sections(load_manifest("guess-ftis"), episode={"stop": stop}).to_toml())
    how = ["--model", str(model)]
    asked = ["--task", "guess", "--limit", "4", "--show", "4", "--engine", "torch"]
    shown = json_of(capsys, "eval", *how, *asked)["problems"]
    assert any(problem["after"]["text"].count("\n> ") == 3 for problem in shown), "four turns"
    settings = ChatSettings(device="cpu", environments=environments_of(Home(model)))
    (reply,) = json_of(capsys, "try", shown[0]["problem"], *how)["answers"]
    assert reply["text"] == shown[0]["after"]["text"] and not reply["truncated"]
    chat = ChatModel("model", resolve_model(str(model)), prompts=PromptSettings(), settings=settings)
    pieces: list[str] = []
    chat.ask(shown[0]["problem"], on_text=pieces.append)
    assert "".join(pieces) == shown[0]["after"]["text"]
    roles = [turn["role"] for turn in chat._history]
    assert roles == ["user", "assistant"] * (reply["text"].count("\n> ") + 1), "observations are turns of the user"


@pytest.mark.parametrize("reason", ["no space", "no template"])
def test_an_episode_that_cannot_go_on_ends_with_its_last_turn(tmp_path, monkeypatch, reason):
    (tmp_path / "run.toml").write_text(load_manifest("guess-ftis").to_toml())
    settings = ChatSettings(device="cpu", environments=environments_of(Home(tmp_path)))
    chat = ChatModel("model", resolve_model(str(trained_model("s"))), prompts=PromptSettings(), settings=settings)
    problem = load_task("guess", "test")[0].prompt
    first, *others = chat.ask(problem[-1]["content"]).text.split("\n> ")
    assert others, "several turns"
    chat.reset()
    if reason == "no space":
        num_tokens = len(chat._tokenizer.render_prompt(problem).token_ids) + len(chat._tokenizer.encode_text(first))
        chat._model.config.max_position_embeddings = num_tokens + 2
    else:
        monkeypatch.setattr(PromptTokenizer, "encode_observation", Mock(side_effect=ModelError("no second message")))
    reply = chat.ask(problem[-1]["content"])
    assert (reply.text, reply.truncated) == (first, False)
    assert [turn["content"] for turn in chat._history] == [problem[-1]["content"], first.strip()]


def test_an_environment_without_a_state_plays_any_question():
    limits = EpisodeSection(max_turns=3)
    calculator = chat_environments("calculator", limits).begin("What is 26 * 51?")
    assert [calculator.observation(text) for text in ("26 * 51", "It is 1326.")] == ["1326", None]
    calculator = chat_environments("calculator", limits).begin("What is 26 * 51?")
    assert [calculator.observation("1 + 1") for _ in range(3)] == ["2", "2", None], "the run has three turns"
    assert chat_environments("guess", limits).begin("What is 26 * 51?") is None
    held_out = load_task("guess", "test")[0]
    known = chat_environments("guess", limits).begin(held_out.prompt[-1]["content"])
    assert known.item == held_out and known.observation(held_out.answer) is None


def test_text_streams_as_it_comes_in_whole_characters(tmp_path):
    pieces: list[str] = []
    reply = opened(save_tiny(tmp_path)).ask(QUESTION, on_text=pieces.append)
    assert len(pieces) > 1 and "".join(pieces) == reply.text
    assert not any(piece.endswith("\N{REPLACEMENT CHARACTER}") for piece in pieces[:-1])
    assert (reply.num_tokens, reply.truncated) == (24, True)


def test_a_model_remembers_its_conversation_until_it_is_reset(tmp_path):
    model = opened(save_tiny(tmp_path))
    first = answer_of(model)
    assert answer_of(model) != first, "the prompt has the first turn"
    model.reset()
    assert answer_of(model) == first
    assert answer_of(opened(tmp_path, system="Answer in tags.")) != first


def test_the_models_own_temperature_and_penalties_are_not_used(tmp_path):
    first = answer_of(opened(save_tiny(tmp_path)))
    path = tmp_path / "generation_config.json"
    penalties = {"repetition_penalty": 5.0, "do_sample": True, "temperature": 9.0}
    path.write_text(json.dumps(json.loads(path.read_text()) | penalties))
    assert answer_of(opened(tmp_path)) == first


def test_a_temperature_samples(tmp_path):
    model = opened(save_tiny(tmp_path), temperature=2.0)
    answers = set()
    for _ in range(4):
        model.reset()
        answers.add(answer_of(model))
    assert len(answers) > 1


def test_a_home_answers_with_its_start_and_its_newest_checkpoint(tmp_path, capsys):
    trained_home(tmp_path, lora=True)
    home = str(tmp_path / "home")
    base, trained = json_of(capsys, "try", QUESTION, "--home", home, "--max-tokens", "24")["answers"]
    assert [(each["role"], each["model"]) for each in (base, trained)] == [
        ("base", "tiny"),
        ("trained", "tiny after step 2"),
    ]
    assert base["text"] == answer_of(opened(tmp_path / "tiny"))
    assert run(["export", "--home", home, "--out", str(tmp_path / "out"), "--merge"]) == 0
    assert trained["text"] == answer_of(opened(tmp_path / "out")) != base["text"]
    capsys.readouterr()
    assert run(["try", QUESTION, "--home", home, "--max-tokens", "24", "--alone"]) == 0
    assert capsys.readouterr().out == f"{trained['text']} [cut: raise --max-tokens]\n", "the answer alone"


def test_the_system_message_of_the_task_is_sent(tmp_path, capsys):
    trained_home(tmp_path, lora=False, run=RUN.replace('"arithmetic"', '"rg:chain_sum"'))
    message = load_task("rg:chain_sum")[0].prompt[0]["content"]
    command = ["try", QUESTION, "--home", str(tmp_path / "home"), "--max-tokens", "24"]
    documents = [json_of(capsys, *command, *options) for options in ([], ["--system", ""])]
    assert [document["answers"][0]["text"] for document in documents] == [
        answer_of(opened(tmp_path / "tiny", system=system)) for system in (message, "")
    ]
    out = tmp_path / "out"
    assert run(["export", "--out", str(out), "--home", str(tmp_path / "home")]) == 0
    (answer,) = json_of(capsys, "try", QUESTION, "--model", str(out), "--max-tokens", "24")["answers"]
    assert answer["text"] == answer_of(opened(out, system=message)), "the export has its run.toml"


def test_each_line_of_a_file_is_a_question(tmp_path, capsys, monkeypatch):
    save_tiny(tmp_path / "tiny")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\n\n/reset\n{QUESTION}\n/exit\nnot read\n"))
    models = ["--model", str(tmp_path / "tiny"), "--compare", str(tmp_path / "tiny")]
    assert run(["chat", *models, "--max-tokens", "24"]) == 0
    answer = answer_of(opened(tmp_path / "tiny"))
    out = capsys.readouterr().out
    assert out.count(f"> {QUESTION}\nbase (tiny):\n") == 2
    assert out.count(printable(answer, keep_newlines=True)) == 4 and "not read" not in out


def test_a_terminal_has_a_prompt_until_its_end(tmp_path, capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    save_tiny(tmp_path / "tiny")
    monkeypatch.setattr(sys, "stdin", Terminal(f"{QUESTION}\n"))
    assert run(["chat", "--model", str(tmp_path / "tiny"), "--max-tokens", "24"]) == 0
    answer = printable(answer_of(opened(tmp_path / "tiny")), keep_newlines=True)
    hint = "/reset starts a new conversation, /exit or Ctrl-D ends"
    assert capsys.readouterr().out == f"{hint}\n> {answer} [cut: raise --max-tokens]\n> \n"


def test_a_conversation_that_is_too_long_is_one_line_and_goes_on(tmp_path, capsys, monkeypatch):
    save_tiny(tmp_path / "tiny")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{'7 ' * 400}\n{QUESTION}"))
    assert run(["chat", "--model", str(tmp_path / "tiny"), "--max-tokens", "24"]) == 0
    captured = capsys.readouterr()
    assert "tiny reads 512 at most: /reset starts a new one" in captured.err
    answer = printable(answer_of(opened(tmp_path / "tiny")), keep_newlines=True)
    assert captured.out.endswith(f"> {QUESTION}\n{answer} [cut: raise --max-tokens]\n")


def test_a_model_without_a_template_is_asked_in_plain_lines(tmp_path, monkeypatch):
    (save_tiny(tmp_path) / "chat_template.jinja").unlink()
    make_tokenizer(chat_template=None).save_pretrained(tmp_path)
    model = opened(tmp_path)
    read: list[str] = []
    generate = model._model.generate
    monkeypatch.setattr(
        model._model,
        "generate",
        lambda ids, **how: read.append(make_tokenizer().decode(ids[0])) or generate(ids, **how),
    )
    answer = answer_of(model)
    answer_of(model)
    assert read == [
        f"User: {QUESTION}\n\nAssistant:",
        f"User: {QUESTION}\n\nAssistant: {answer.strip()}\n\nUser: {QUESTION}\n\nAssistant:",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--home", "{home}"], "no node has run with the home"),
        (["--model", "none/"], "no such folder"),
        (["--model", "m", "--alone", "--compare", "n"], "--alone and --compare exclude each other"),
    ],
)
def test_wrong_use_is_one_line(tmp_path, capsys, words, message):
    assert run(["try", QUESTION, *(word.format(home=tmp_path / "new") for word in words)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_eval_compares_two_models_problem_by_problem(tmp_path, capsys):
    trained, start = str(trained_model("s")), str(save_tiny(tmp_path / "tiny"))
    command = ["eval", "--model", trained, "--compare", start, "--task", "arithmetic", "--limit", "24", "--show", "2"]
    command += ["--engine", "torch", "--max-tokens", "64"]
    document = json_of(capsys, *command)
    assert document["compared"]["pass_at_1"] == 0 < document["pass_at_1"]
    assert document["difference"]["pass_at_1"] == document["pass_at_1"] == document["difference"]["gained"] / 24
    problems = document["problems"]
    task = load_task("arithmetic", split="test")
    assert [(each["problem"], each["right_answer"]) for each in problems] == [
        (task[index].prompt[0]["content"], task[index].answer) for index in range(2)
    ]
    assert [each["after"]["is_right"] for each in problems] == [
        each["after"]["text"].strip() == each["right_answer"] for each in problems
    ]
    assert run(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{start} on arithmetic: pass@1 0.000") and lines[1].startswith(f"{trained} on")
    assert lines[2].startswith("difference +") and lines[3:5] == ["", f"problem  {problems[0]['problem']}"]


def test_eval_of_a_home_compares_its_start_with_its_newest_checkpoint_on_the_problems_of_its_run(tmp_path, capsys):
    limits = "\n[sampling]\nmax_prompt_tokens = {}\nmax_completion_tokens = 3\nmax_total_tokens = {}"
    text = RUN.replace('"arithmetic"', '"arithmetic:add"') + limits
    trained_home(tmp_path, lora=True, run=text.format(50, 64))
    home, how = str(tmp_path / "home"), ["--limit", "4", "--show", "4", "--max-tokens", "64", "--engine", "torch"]
    found = json_of(capsys, "eval", "--home", home, *how)
    assert (found["compared"]["model"], found["model"]) == ("tiny", "tiny after step 2")
    assert run(["export", "--home", home, "--out", str(tmp_path / "out"), "--merge"]) == 0
    models = ["--model", str(tmp_path / "out"), "--compare", str(tmp_path / "tiny")]
    named = json_of(capsys, "eval", *models, "--task", "arithmetic:add", *how)
    named["compared"]["model"], named["model"] = "tiny", "tiny after step 2"
    assert named == found
    assert found["problems"][0]["before"]["text"] != found["problems"][0]["after"]["text"]
    other = ["--compare", str(tmp_path / "out"), "--task", "sums", "--limit", "1", "--engine", "torch"]
    found = json_of(capsys, "eval", "--home", home, *other)
    assert (found["task"], found["compared"]["model"]) == ("sums", str(tmp_path / "out"))
    found = json_of(capsys, "eval", "--home", home, "--limit", "4", "--engine", "torch")
    assert 0 < found["completion_tokens_mean"] <= 3 < named["completion_tokens_mean"]
    assert 0 < found["compared"]["completion_tokens_mean"] <= 3 < named["compared"]["completion_tokens_mean"]
    trained_home(tmp_path / "short", lora=False, run=text.format(1, 2))
    assert run(["eval", "--home", str(tmp_path / "short" / "home"), "--limit", "4", "--engine", "torch"]) == 0
    assert capsys.readouterr().out.count("(4 problems, 4 too long: raise --max-tokens)") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--home", "{home}"],
            "no node has run with the home {home}: give the right one with --home, or --model MODEL",
        ),
        (["--model", "m"], "add --task SPEC"),
        (["--home", "{untrained}"], "there is no checkpoint in {untrained}"),
        (["--home", "{one_split}"], "has no held-out problems: name others with --task SPEC"),
    ],
)
def test_wrong_use_of_eval_is_one_line(tmp_path, capsys, words, message):
    (tmp_path / "p.jsonl").write_text('{"problem": "1+1", "answer": "2"}')
    folders = {"home": tmp_path / "new", "untrained": tmp_path / "u", "one_split": tmp_path / "o"}
    settings = NodeSettings(model=str(save_tiny(tmp_path / "tiny")), data_paths={"math500": str(tmp_path / "p.jsonl")})
    for name, task in (("untrained", "arithmetic"), ("one_split", "math500")):
        home = Home(folders[name])
        home.create()
        home.run_toml.write_text(f'name = "a"\ntask = "{task}"\n')
        home.settings.write_text(settings.model_dump_json())
    capsys.readouterr()
    assert run(["eval", *(word.format(**folders) for word in words)]) == 2
    captured = capsys.readouterr()
    assert message.format(**folders) in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_the_standard_error_is_that_of_paired_answers():
    item = load_task("arithmetic")[0]

    def answered(marks):
        facts = (1, -0.1, FinishReason.STOP)
        return [Answered(item, 3, ScoredAnswer("", *facts, float(m == "+"), CompletionStatus.SCORED)) for m in marks]

    found = difference(answered("+--+"), answered("++--"))
    error = pytest.approx((0.5 / 4) ** 0.5)
    assert found == {"pass_at_1": 0.0, "standard_error": error, "gained": 1, "lost": 1}
