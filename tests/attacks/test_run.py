"""A run manifest from a stranger: what it names must be installed here, and nothing is fetched or run for it."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def is_progress(line: str) -> bool:
    """A line that a start writes when it takes its time."""
    return " INFO " in line or line.startswith("start: ")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("task", ["nosuch", "nosuch:../../etc/passwd"])
def test_a_manifest_with_a_plugin_that_is_not_installed_is_one_clear_line(
    tmp_path: Path, tiny_models: Mapping[str, Path], task: str
) -> None:
    run = tmp_path / "run.toml"
    run.write_text(f'name = "trap"\ntask = "{task}"\n')
    done = subprocess.run(
        [sys.executable, "-m", "ftis_node", "join", "--run", str(run), "--model", str(tiny_models["s"]),
         "--engine", "torch", "--home", str(tmp_path / "home")],
        capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "nosuch" in done.stderr
    assert "Traceback" not in done.stderr
    assert [line.startswith("ftis-node: ") for line in done.stderr.splitlines() if not is_progress(line)] == [True]
