"""`ftis-node compare`: its files and table, its continuation, and the end of its processes and files."""

import argparse
import csv
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from ftis_node.cli.app import run
from ftis_node.cli.commands import compare
from ftis_node.config.manifest import load_manifest
from ftis_node.errors import UsageError
from ftis_node.lab.experiment.runner import MEMORY_DISK, SCRATCH_PREFIX, _weight, scratch_folder
from tests.conftest import raises_line, with_sections
from tests.waiting import wait_until

REPOSITORY = Path(__file__).parents[3]


def _load(name: str) -> ModuleType:
    """Import a file of bench/results/ by the name that the other files there use."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "bench" / "results" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


RESULTS, MAKE_RESULTS, PAIRED = _load("tables"), _load("run"), _load("paired")
ALL_TABLES = RESULTS.TABLES | RESULTS.LLM_TABLES
pytestmark = pytest.mark.timeout(300)
STOP_LIMIT_S = 20
MOST_QUICK = 125_000  # completions that the nodes of a quick table train on: about 5 minutes


def arguments(models: dict[str, Path], out: Path, *more: str) -> list[str]:
    pair = f"{models['s']},{models['m']}"
    run_file = out / "run.toml"
    run_file.write_text(with_sections(load_manifest("arithmetic-compare"), eval={"limit": 16}).to_toml())
    options = ["--run", str(run_file), "--task", "arithmetic:add", "--prompts", "4", "--out", str(out)]
    return ["compare", "--pair", pair, *options, *more]


def test_compare_writes_its_files_and_keeps_finished_trials(tiny_models, tmp_path, capsys):
    options = "--methods ftis --steps 2 --eval-every 2 --seed 7 --seeds 1".split()
    first = arguments(tiny_models, tmp_path, *options)
    assert run(first) == 0
    printed = capsys.readouterr()
    assert "every update takes 32 completions" in printed.err
    assert "| s,m | ftis | m |" in printed.out
    rows = list(csv.DictReader((tmp_path / "curves.csv").read_text().splitlines()))
    found = {(row["pair"], row["method"], row["model"], row["seed"]) for row in rows}
    assert found == {("s,m", "ftis", model, "7") for model in ("s", "m")}
    steps = list(csv.DictReader((tmp_path / "steps.csv").read_text().splitlines()))
    assert len(steps) == 2 * len({(row["method"], row["model"]) for row in rows})
    assert any(row["foreign_mean_kl"] for row in steps)
    document = json.loads((tmp_path / "results.json").read_bytes())
    assert document["settings"]["steps"] == 2
    assert document["machine"]["torch"]
    assert len(document["trials"]) == 1
    for name in ("curves.png", "tokens.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    assert run([*first[:-1], "1", "--methods", "ftis,nois"]) == 0
    assert {path: path.stat().st_mtime_ns for path in times} == times  # only nois was run
    assert len(list((tmp_path / "runs").iterdir())) == len(times) + 1
    assert "| s,m | nois | s |" in capsys.readouterr().out


def test_a_run_file_takes_its_task_from_the_option_and_needs_evaluations(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('name = "x"\n[eval]\nevery_steps = 0\n')
    given = (str(file), "arithmetic", ("size",))
    base = compare._base(*given, prompts=0, eval_every=2)
    assert (base.task, base.eval.every_steps) == ("arithmetic", 2)
    with raises_line(UsageError, "run x has no evaluations", "--eval-every N"):
        compare._base(*given, prompts=0, eval_every=0)


@pytest.mark.parametrize("name", ALL_TABLES)
def test_the_commands_of_the_results_page_are_valid(name, tmp_path, monkeypatch):
    """The commands are parsed to a grid of trials, which is not run."""
    counts, work = [], []

    def note(trials, *_, **__):
        counts.append(len(trials))
        work.append(sum(_weight(trial) * trial.steps for trial in trials))
        raise UsageError("enough")

    monkeypatch.chdir(REPOSITORY)  # the paths of its run files are relative to it
    monkeypatch.setattr(compare, "_run", note)
    for quick in (True, False):
        assert run(ALL_TABLES[name].arguments(str(tmp_path), quick=quick)) == UsageError.exit_code
    assert 0 < counts[0] <= counts[1]
    assert work[0] <= MOST_QUICK or name in RESULTS.LLM_TABLES


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_compare_ends_with_its_processes_and_files(tiny_models, tmp_path, number):
    command = arguments(tiny_models, tmp_path, "--methods", "nois,tis", "--steps", "2000")
    process = subprocess.Popen([sys.executable, "-m", "ftis_node", *command], stderr=subprocess.DEVNULL)
    try:
        scratch = MEMORY_DISK / f"{SCRATCH_PREFIX}{process.pid}"
        wait_until(lambda: any(scratch.glob("trial-*/*/replay.sqlite")), within_s=120)
        children = psutil.Process(process.pid).children()
        process.send_signal(number)
        assert process.wait(STOP_LIMIT_S) == (130 if number is signal.SIGTERM else -signal.SIGKILL)
    finally:
        process.kill()
    assert children and not psutil.wait_procs(children, timeout=STOP_LIMIT_S)[1]
    with nullcontext() if number is signal.SIGTERM else scratch_folder():
        assert not scratch.exists(), "the next experiment removes the folder of a killed one"


def test_tables_are_made_in_parallel_and_their_processor_time_is_counted(tiny_models, tmp_path, monkeypatch, capsys):
    options = "--pair size --task arithmetic:add --prompts 4 --steps 1"
    tables = {
        "a": RESULTS.Table("one?", f"{options} --methods alone", model_seeds=1, seeds=2),
        "b": RESULTS.Table("two?", f"{options} --methods alone", model_seeds=2, quick="--methods alone,nois"),
    }
    (tmp_path / "models").mkdir()
    for size in ("s", "m"):
        shutil.copytree(tiny_models[size], tmp_path / "models" / f"{size}-0")
    monkeypatch.setattr(MAKE_RESULTS, "TABLES", tables)
    monkeypatch.setattr(sys, "argv", ["run.py", "--quick", "--jobs", "2", "--out", str(tmp_path)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its handlers
    assert MAKE_RESULTS.main() == 0
    printed = capsys.readouterr().out
    assert "| nois |" in printed
    figures = json.loads(printed.splitlines()[-1])
    assert figures["quick"] is True
    assert set(figures["seconds"]) == {"a", "b"}
    assert 0 < figures["processor_s"]["a"] < figures["processor_s"]["b"]
    runs = {name: len(list((tmp_path / name / "runs").iterdir())) for name in tables}
    assert runs == {"a": 2, "b": 3}  # the first seed of the first models


def test_trials_of_language_models_are_published_by_an_interrupted_run_too(tmp_path, monkeypatch):
    monkeypatch.setattr(MAKE_RESULTS, "PUBLISHED", tmp_path / "published")
    options = argparse.Namespace(llm=True, publish=True, out=tmp_path / "out")
    with pytest.raises(KeyboardInterrupt), MAKE_RESULTS._kept_trials(["llm-size"], options):
        (options.out / "llm-size" / "runs" / "a.json").write_text("{}")
        (options.out / "llm-size" / "runs" / "b.making").write_text("{")
        raise KeyboardInterrupt
    later = argparse.Namespace(llm=True, publish=False, out=tmp_path / "later")
    with MAKE_RESULTS._kept_trials(["llm-size"], later):
        assert [file.name for file in (later.out / "llm-size" / "runs").iterdir()] == ["a.json"]


def test_copies_of_a_starting_model_count_as_one_value(tmp_path, monkeypatch, capsys):
    ends = {("a", "s"): 0.1, ("a", "s~2"): 0.3, ("b", "s"): 0.4, ("b", "s~2"): 0.8}
    lines = ["pair,task,model,method,model_seed,seed,step,pass_at_1,tokens_generated"]
    for seed in (0, 1):
        for (method, model), end in ends.items():
            lines += [f"size,t,{model},{method},{seed},0,{step},{end if step else 0.0},{step}" for step in (0, 5)]
    (tmp_path / "curves.csv").write_text("\n".join(lines))
    monkeypatch.setattr(sys, "argv", ["paired.py", str(tmp_path / "curves.csv"), "--base", "a", "--method", "b"])
    PAIRED.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["differences"]
    assert set(found) == {f"size t/s/{name}" for name in ("end", "mean", "end at equal own tokens")}
    assert found["size t/s/end"]["mean"] == pytest.approx((0.3 + 0.5) / 2)
