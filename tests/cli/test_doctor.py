"""`doctor --model`: the memory plan as a person and as a program read it, and its wrong uses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ftis_node.cli.app import run
from tests.models.tiny_models import save_tiny

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


def doctor(capsys: pytest.CaptureFixture[str], home: Path, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = run(["doctor", "--home", str(home), "--only", "model", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def plan_lines(output: str) -> list[dict[str, Any]]:
    return [finding for finding in json.loads(output) if finding["check"] == "memory"]


def test_a_plan_for_a_card_that_is_not_here(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path) -> None:
    code, output, _ = doctor(capsys, tmp_path, "--model", str(model), "--gpu-memory", "24", "--json")
    assert code == 0
    verdict, *rest = plan_lines(output)
    assert verdict["level"] == "ok"
    assert "gsm8k-ftis, all weights: both workers stay on one GPU" in verdict["finding"]
    assert f"of {0.95 * 24:.2f} GiB" in verdict["finding"]
    (cache,) = [finding["num_bytes"] for finding in rest if "key/value cache" in finding["finding"]]
    assert cache == 2 * 2 * 32 * 2 * 256 * 760  # 2 layers, 2 key/value heads of 16, bfloat16
    assert any("share of its GPU" in finding["finding"] for finding in rest)


def test_a_card_that_is_too_small_is_exit_code_3_with_its_changes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path
) -> None:
    code, output, complaint = doctor(capsys, tmp_path, "--model", str(model), "--gpu-memory", "1.5")
    assert code == 3
    assert complaint.splitlines()[-1] == "ftis-node: not ready: memory.plan; see the advice above"
    assert "does not fit" in output
    assert "no change below is enough" in output
    lines = [line.split()[2:] for line in output.splitlines() if line.startswith("warn  memory.change")]
    assert "+" in lines[-1] and not any("+" in line for line in lines[:-1])


def test_flags_and_the_run_reach_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path) -> None:
    (tmp_path / "node.toml").write_text("[generation]\nmax_batch = 4\n")
    arguments = ("--model", str(model), "--gpu-memory", "24", "--gpu-memory", "24", "--json")
    code, output, _ = doctor(capsys, tmp_path, *arguments, "--lora", "--run", "arithmetic-ftis")
    assert code == 0
    verdict, *rest = plan_lines(output)
    assert "arithmetic-ftis, a LoRA adapter: the generator on the first GPU" in verdict["finding"]
    (cache,) = [finding["num_bytes"] for finding in rest if "key/value cache" in finding["finding"]]
    assert cache % (2 * 2 * 32 * 2 * 4) == 0
    assert cache < 2 * 2 * 32 * 2 * 5 * 760


def test_a_model_that_is_not_there_is_a_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, output, _ = doctor(capsys, tmp_path, "--model", str(tmp_path / "nowhere"))
    assert code == 3
    assert "nowhere" in output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--lora"], "--model"),
        (["--gpu-memory", "24"], "--model"),
        (["--model", "x", "--gpu-memory", "0"], "--gpu-memory"),
        (["--model", "x", "--run", "no-such-run"], "no-such-run"),
    ],
)
def test_wrong_use_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    code, output, error = doctor(capsys, tmp_path, *arguments)
    assert (code, output) == (2, "")
    assert len(error.splitlines()) == 1
    assert complaint in error
