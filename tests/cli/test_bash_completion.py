"""TAB in a real bash with the script of `--show-completion bash` completes names with a colon."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftis_node.cli.completion import join_words

CompleteLine = Callable[[str], str]


ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0  # for one reply of bash on a loaded machine
BASH = shutil.which("bash")
COMMAND = f'#!/bin/sh\nexec "{sys.executable}" -m ftis_node "$@"\n'
END = "<end>"


@pytest.fixture
def complete_line(tmp_path: Path) -> Iterator[CompleteLine]:
    """A function that types the start of a command line and TAB, and returns the line that bash has then."""
    if BASH is None:
        pytest.skip("bash is not installed")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "ftis-node"
    command.write_text(COMMAND)
    command.chmod(0o755)
    (tmp_path / "apt.log").touch()  # its name begins like the part of a task after the colon
    (tmp_path / "inputrc").write_text("set enable-bracketed-paste off\nset bell-style none\n")
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path),
        "INPUTRC": str(tmp_path / "inputrc"), "TERM": "dumb", "COLUMNS": "200",
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }  # fmt: skip
    show = [str(command), "--show-completion", "bash"]
    script = subprocess.run(show, capture_output=True, text=True, check=True, env=environment).stdout
    (tmp_path / "completion.bash").write_text(script)
    leader, follower = pty.openpty()
    bash = subprocess.Popen(
        [BASH, "--norc", "--noprofile", "-i"], stdin=follower, stdout=follower, stderr=follower, env=environment,
        cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    os.close(follower)

    def line_after_tab(line: str) -> str:
        os.write(leader, f"{line}\t\x05{END}\x01echo '\x05'\n".encode())  # TAB, end of line, start of line
        output = _read_until(leader, f"{END}\r\n", LIMIT_S)
        return output.rsplit("\r\n", 2)[-2].removesuffix(END)

    os.write(leader, b"PS1=; source completion.bash; echo ready\n")
    _read_until(leader, "\r\nready\r\n", LIMIT_S)
    try:
        yield line_after_tab
    finally:
        bash.kill()
        bash.wait()
        os.close(leader)


def _read_until(descriptor: int, text: str, limit_s: float) -> str:
    output, deadline = "", time.monotonic() + limit_s
    while text not in output:
        readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, output
        output += os.read(descriptor, 4096).decode(errors="replace")
    return output


def test_names_with_a_colon_are_completed(complete_line: CompleteLine) -> None:
    assert complete_line("ftis-node join --task arithmetic:a") == "ftis-node join --task arithmetic:add "
    assert complete_line("ftis-node join --task=arithmetic:bo") == "ftis-node join --task=arithmetic:borrow "
    assert complete_line("ftis-node join --task sums+arithmetic:bo") == "ftis-node join --task sums+arithmetic:borrow "
    assert complete_line("ftis-node join --task sums:") == "ftis-node join --task sums:long "


def test_words_are_joined_as_they_were_typed() -> None:
    assert join_words(["x", "--task", "a", ":", "b"]) == (["x", "--task", "a:b"], "a:")
    assert join_words(["x", "--task", "a", ":"]) == (["x", "--task", "a:"], "a:")
    assert join_words(["x", "--task", "a", ":", ""]) == (["x", "--task", "a:", ""], "")
    assert join_words(["x", "--task", "a", ":", "--ro"]) == (["x", "--task", "a:", "--ro"], "")
    assert join_words(["x", "--task", "a:b"]) == (["x", "--task", "a:b"], ""), "bash that does not split at a colon"
    assert join_words(["x", "--task", "a", "=", "3+b", "=", "1"]) == (["x", "--task", "a=3+b=1"], "a=3+b=")
