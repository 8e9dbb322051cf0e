"""Every invalid use gives one line that says what to do, and the documented exit code."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ftis_node.cli.app import run
from ftis_node.cli.commands.join import _keep_secret
from ftis_node.config.home import Home
from ftis_node.errors import ConfigError
from tests.conftest import raises_line

RUN_ID = "0123456789abcdef" * 2
PEER = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWKVUU6HyBAxFk1xtH4qEU7NmphAH9gx5PWRmJPNd1wnPM"


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """Run a command that ends with this exit code; return its one error line."""
    capsys.readouterr()
    assert run(list(arguments)) == code
    stderr = capsys.readouterr().err
    assert "Traceback" not in stderr
    lines = [line for line in stderr.splitlines() if line.startswith("ftis-node: ")]
    assert len(lines) == 1, lines
    return lines[0]


def join(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str, code: int = 2) -> str:
    start = ("join", "--home", str(tmp_path / "home"), "--listen", "/ip4/127.0.0.1/tcp/0")
    return error_of(capsys, *start, *arguments, code=code)


def test_a_folder_without_a_tokenizer_is_an_error(capsys, tmp_path, model):
    folder = tmp_path / "half"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        os.link(model / name, folder / name)
    assert "tokenizer" in join(capsys, tmp_path, "--model", str(folder), "--task", "arithmetic")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["join"], "--model"), (["join", "--model", "x", "--steps", "0"], "steps"),
        (["join", "--model", "x", "--tensor-parallel", "2", "--engine", "torch"], "--tensor-parallel needs vLLM"),
        (["jion"], "jion"), (["join", "--model", "x", "--what"], "--what"),
        (["tiny", "--size", "xl", "--out", "x"], "xl"), (["status", "--home", "/nonexistent/home"], "--home"),
        (["replay", "list", "--home", "/nonexistent/home"], "replay buffer"),
        (["export", "--out", "x", "--home", "/nonexistent/home"], "--home"),
        (["eval", "--model", "/nonexistent/model", "--task", "arithmetic"], "/nonexistent/model"),
        (["replay", "list", "--state", "redy"], "'redy' is not one of 'ready', 'taken', 'released'"),
        (["replay", "list", "--limit", "99999999999999999999"], "less than or equal to 1000000"),
        (["swarm", "--run", RUN_ID], "--run is for --peers ADDRESS: omit it"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_an_error(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert message in error_of(capsys, *arguments)


def test_an_unexpected_exception_is_a_one_line_error(capsys, monkeypatch):
    from ftis_node.cli.commands import status

    def fail(*_):
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr(status, "read_status", fail)
    line = error_of(capsys, "status", code=1)
    assert "ZeroDivisionError: two lines" in line and "--debug" in line
    assert run(["--debug", "status"]) == 1 and "Traceback" in capsys.readouterr().err
    assert run(["--debug", "resume", "--home", "/nowhere"]) == 2


def test_a_path_that_cannot_be_written_is_an_error(capsys, tmp_path, monkeypatch):
    (file := tmp_path / "file").touch()
    assert f"cannot use {file} (File exists): give another path" in error_of(capsys, "demo", "--out", str(file))

    options = ["--home", str(file / "home"), "--model", "x", "--detach"]
    assert f"cannot use {file}/home as home" in error_of(capsys, "join", *options)
    with raises_line(ConfigError, f"{file}/home", "--home"):
        _keep_secret(SimpleNamespace(secret=b"s"), Home(file / "home"))

    def locked(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "/locked/home")

    monkeypatch.setattr("ftis_node.cli.commands.status.read_status", locked)
    assert "cannot use /locked/home (Permission denied)" in error_of(capsys, "status")


def test_a_tiny_model_replaces_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("ftis_node.lab.tiny.make_tiny", lambda *_, **__: pytest.fail("it replaces what is there"))
    (tmp_path / "file").touch()
    for out in (tmp_path, tmp_path / "file"):
        assert "choose another with --out" in error_of(capsys, "tiny", "--size", "s", "--out", str(out))


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--pair", "sice"], "size, expertise, peft"), (["--methods", "ppo"], "ftis"),
        (["--methods", "ftis:capp=2"], "cap"), (["--delay", "later"], "lognormal"),
        (["--delay", "fixed:two@peer"], "DELAY@peer"), (["--share", "diagonal"], "horizontal"),
        (["--lora-rank", "5000"], "4096"),
        (["--nodes", "1"], "alone"), (["--nodes", "two"], "2,4,8"), (["--attack", "murder"], "positives"),
        (["--methods", "ftis:kl_estimator=k9"], "kl_estimator"), (["--task", "math500:nowhere.jsonl"], "nowhere"),
        (["--pair", "hdee", "--pair", "size"], "a separate experiment"),
        (["--pair", "hdee", "--attack", "rewards"], "omit --attack"),
        (["--pair", "hdee", "--prompts", "9"], "multiple of 6"), (["--pair", "hdee", "--nodes", "3"], "omit --nodes"),
        (["--pair", "hdee", "--task", "sums"], "one domain: join at least two"),
        (["--pair", "hdee", "--task", "arithmetic:3+sums"], "a weight follows =, as in arithmetic=3"),
        (["--pair", "hdee", "--task", "arithmetic+sums"], "--pair hdee:DIR"),
        (["--pair", "hdee", "--ood-task", "arithmetic:carry"], "an expert trains on it"),
        (["--pair", "hdee:./nowhere"], "no such folder"), (["--pair", "hdee:./a,./b"], "2 models for 3 domains"),
    ],
)  # fmt: skip
def test_an_experiment_with_invalid_options_is_an_error(capsys, tmp_path, arguments, hint):
    assert hint in error_of(capsys, "compare", "--out", str(tmp_path / "out"), *arguments)
    assert not (tmp_path / "out").exists()


def test_an_experiment_with_a_missing_model_is_an_error(capsys, tmp_path):
    options = ["--out", str(tmp_path / "out"), "--pair", f"{tmp_path}/nowhere,{tmp_path}/nowhere"]
    assert "nowhere" in error_of(capsys, "compare", *options, "--task", "arithmetic")
    assert not (tmp_path / "out" / "runs").exists(), "a trial began"


def test_a_run_id_that_no_peer_has_is_an_error(capsys, tmp_path, model, monkeypatch):
    monkeypatch.setattr("ftis_node.node.startup.run_plan.TIMEOUT_S", 2.0)
    line = join(capsys, tmp_path, "--model", str(model), "--run", RUN_ID, "--peers", PEER, code=4)
    assert "no manifest of run 0123" in line
    assert not (tmp_path / "home" / "run.toml").exists()


@pytest.mark.parametrize("content", ['{"schema": 1, "node": {"pe', "[1]"])
def test_a_damaged_last_status_is_an_error(capsys, tmp_path, content):
    (tmp_path / "status.json").write_text(content)
    for command in ("status", "peers"):
        assert "status.json is damaged: remove it" in error_of(capsys, command, "--home", str(tmp_path))


@pytest.mark.parametrize("marker", ["", '{"schema": "4"}'])
def test_a_damaged_home_marker_is_an_error(capsys, tmp_path, marker):
    (tmp_path / "home.json").write_text(marker)
    assert "home.json is damaged" in error_of(capsys, "status", "--home", str(tmp_path))


def test_every_command_has_the_short_option_h(capsys):
    for command in ([], ["join"], ["replay"], ["replay", "list"]):
        assert run([*command, "-h"]) == 0
        short = capsys.readouterr().out
        assert run([*command, "--help"]) == 0
        assert capsys.readouterr().out == short and short.startswith("Usage: ftis-node")


def test_a_group_of_commands_without_a_command_prints_its_usage(capsys):
    for command in ([], ["replay"], ["identity"]):
        assert run(command) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("Usage: ftis-node") and "see --help" not in shown


RUN, NODE, DATA = "run.toml", "home/node.toml", "train.jsonl"
MIXED = 'name = "x"\ntask = "arithmetic:add+arithmetic:sub"\n'
HORIZONTAL = 'prompt_sharing = "horizontal"\n'
ROW = '{"question": "1+1?", "answer": "two\\n#### 2"}\n'


@pytest.mark.parametrize(
    ("file", "text", "arguments", "message"),
    [
        (RUN, 'name = "x"\ntask = "arithmetic"\n[step]\nown_group = 3\n', [], "own_group"),
        (RUN, 'name = "x"\ntask = "nosuch:../../etc/passwd"\n', [], "nosuch"),
        (RUN, MIXED + "[step]\n" + HORIZONTAL, ["--task", "arithmetic:add"], "omit --task arithmetic:add"),
        (RUN, MIXED + "[step]\nforeign_wait_s = -1\n", [], "step.foreign_wait_s"),
        (RUN, MIXED, ["--task", "arithmetic:add+"], "is not a task"),
        (RUN, MIXED, ["--generate-tokens", "5", "--role", "learner"], "a learner does not generate"),
        (RUN, MIXED, ["--learn-tokens", "5", "--role", "generator", "--follow", "x"], "a generator takes no steps"),
        (RUN, MIXED, ["--steps", "5", "--role", "generator", "--follow", "x"], "remove --steps"),
        (RUN, MIXED, ["--steps", "5", "--role", "exchange"], "an exchange node neither generates nor trains"),
        (RUN, MIXED, ["--learn-tokens", "0"], "learn-tokens"),
        (RUN, MIXED, ["--peers", "127.0.0.1:4001"], "127.0.0.1:4001"),
        (RUN, MIXED, ["--peers", "/ip4/127.0.0.1/tcp/4001"], "/ip4/127.0.0.1/tcp/4001"),
        (NODE, "[budget]\nlearn_steps = 0\n", [], "budget.learn_steps"), (NODE, 'task = "+"\n', [], "is not a task"),
        (NODE, "", ["--run", RUN_ID], "--peers"), (DATA, ROW + '{"question": "no answer"}\n', [], "train.jsonl: row 2"),
    ],
)  # fmt: skip
def test_an_invalid_file_or_option_of_join_is_an_error(capsys, tmp_path, model, file, text, arguments, message):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    of_file = {RUN: ["--run", str(path)], NODE: [], DATA: ["--task", f"gsm8k:{path}"]}[file]
    assert message in join(capsys, tmp_path, "--model", str(model), *of_file, *arguments)


@pytest.mark.parametrize("given", ["option", "node.toml", "variable"])
@pytest.mark.parametrize("model", ["models/tiny", "models/mine/x.gguf"])
def test_a_relative_path_of_a_model_is_kept_absolute(tmp_path, monkeypatch, model, given):
    """In another folder, the file's path would name a repository of the hub."""
    kept = []
    monkeypatch.chdir(tmp_path)
    start = "ftis_node.node.startup"
    monkeypatch.setattr(f"{start}.run_plan.plan_run", lambda *_, **__: None)
    monkeypatch.setattr(f"{start}.run.run_until_stopped", lambda settings, *_, **__: kept.append(settings.model))
    path = tmp_path / model
    if path.suffix:
        path.parent.mkdir(parents=True)
        path.touch()
    else:
        path.mkdir(parents=True)
    if given == "node.toml":
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "node.toml").write_text(f'model = "{model}"\n')
    elif given == "variable":
        monkeypatch.setenv("FTIS_MODEL", model)
    option = ["--model", model] if given == "option" else []
    assert (run(["join", "--home", "home", *option]), kept) == (0, [str(path)])
