"""A run manifest from a stranger: what it names must be installed here, and nothing is fetched or run for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ftis_node.cli.app import run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def is_progress(line: str) -> bool:
    """A line that a start writes when it takes its time."""
    return " INFO " in line or line.startswith("start: ")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("task", ["nosuch", "nosuch:../../etc/passwd"])
def test_a_manifest_with_a_plugin_that_is_not_installed_is_one_clear_line(
    tmp_path: Path, tiny_models: Mapping[str, Path], capsys: pytest.CaptureFixture[str], task: str
) -> None:
    manifest = tmp_path / "run.toml"
    manifest.write_text(f'name = "trap"\ntask = "{task}"\n')
    arguments = ("--model", str(tiny_models["s"]), "--engine", "torch", "--home", str(tmp_path / "home"))
    assert run(["join", "--run", str(manifest), *arguments]) == 2
    said = capsys.readouterr().err
    assert "nosuch" in said
    assert "Traceback" not in said
    assert [line.startswith("ftis-node: ") for line in said.splitlines() if not is_progress(line)] == [True]
