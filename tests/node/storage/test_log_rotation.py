"""A log is rotated while a process writes it, and stays below its limit."""

import errno
import subprocess
import sys

from ftis_node.node.storage import cleanup as module
from ftis_node.node.storage.cleanup import rotate_log

WRITER = (
    "import sys\nfor line in sys.stdin: print(line.strip() * 100, flush=True); print('.', file=sys.stderr, flush=True)"
)


def test_after_a_rotation_the_process_writes_at_the_start_of_the_file(tmp_path):
    path = tmp_path / "learner.log"
    with (
        path.open("ab") as log,
        subprocess.Popen(
            [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=log, stderr=subprocess.PIPE, text=True
        ) as writer,
    ):
        assert writer.stdin is not None and writer.stderr is not None
        for letter in "abc":
            writer.stdin.write(f"{letter}\n")
            writer.stdin.flush()
            writer.stderr.readline()
            assert rotate_log(path, max_bytes=100)
            assert not rotate_log(path, max_bytes=100)
        writer.stdin.write("d\n")
        writer.stdin.close()
    assert path.read_text() == "d" * 100 + "\n", "the file has a hole at its start"
    assert (tmp_path / "learner.log.1").read_text() == "c" * 100 + "\n", "the older file is not the last rotated one"
    assert len(list(tmp_path.iterdir())) == 2


def test_on_a_full_disk_the_log_is_emptied_without_a_copy(tmp_path, monkeypatch):
    def fail_on_a_full_disk(source, target):
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.shutil, "copyfile", fail_on_a_full_disk)
    path = tmp_path / "learner.log"
    path.write_bytes(bytes(100))
    assert rotate_log(path, max_bytes=100)
    assert path.stat().st_size == 0
    assert list(tmp_path.iterdir()) == [path]
