"""Files with locked pages: their bytes, one lock per file, the unlock of removed files, and a refused lock.

CUDA's two calls are replaced, except in the last test, which needs a GPU.
"""

import logging
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ftis_node.workers import tensor_file
from ftis_node.workers.tensor_file import LockedFiles, read_tensors, write_tensors
from ftis_node.workers.weight_store import publish_weights
from tests.published import published_tensors


class FakeCuda:
    """CUDA's locks: `locked` has the size of each locked mapping by its address."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.num_calls = 0
        self.refuses = False

    def register(self, mapping: Tensor) -> None:
        self.num_calls += 1
        if self.refuses:
            raise RuntimeError("CUDA error: operation not supported (801)\nmore lines")
        self.locked[mapping.data_ptr()] = mapping.numel()

    def unregister(self, mapping: Tensor) -> None:
        del self.locked[mapping.data_ptr()]


@pytest.fixture
def cuda(monkeypatch):
    made = FakeCuda()
    monkeypatch.setattr(tensor_file, "register", made.register)
    monkeypatch.setattr(tensor_file, "unregister", made.unregister)
    return made


def tensors(value: float = 1.5) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 2), value), "b": torch.full((5,), value).bfloat16(), "turned": torch.randn(4, 3).T}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_locked_file_has_the_bytes_of_a_plain_one(cuda, tmp_path, dtype):
    given = tensors()
    plain = write_tensors(tmp_path / "plain", given, dtype=dtype)
    assert plain == write_tensors(tmp_path / "locked", given, dtype=dtype, locked=LockedFiles())
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "locked").read_bytes()
    assert list(cuda.locked.values()) == [(tmp_path / "plain").stat().st_size]


def test_locked_pages_are_read_in_place(cuda, tmp_path):
    path = Path(publish_weights(tmp_path, 1, tensors(1.0)).path)
    locked = LockedFiles()
    first = read_tensors(path, locked=locked)
    assert first["a"].eq(1.0).all()
    write_tensors(path, tensors(2.0))
    again = read_tensors(path, locked=locked)
    assert again["a"].eq(2.0).all()
    assert (first["a"].data_ptr(), cuda.num_calls) == (again["a"].data_ptr(), 1)
    assert read_tensors(path)["a"].data_ptr() != again["a"].data_ptr()


def test_files_of_the_store_are_locked_once_and_unlocked_when_removed(cuda, tmp_path):
    locked = LockedFiles()
    for version in range(1, 8):
        path = Path(publish_weights(tmp_path, version, tensors(float(version)), locked=locked).path)
        assert published_tensors(tmp_path, version)["a"].eq(version).all()
    assert (cuda.num_calls, len(cuda.locked)) == (2, 2), "files are not reused"
    path = Path(publish_weights(tmp_path, 8, {"a": torch.ones(100)}, locked=locked).path)
    assert path.stat().st_size in cuda.locked.values()
    assert published_tensors(tmp_path, 8)["a"].eq(1).all()
    for each in tmp_path.glob("*/*.safetensors"):
        each.unlink()
    locked.lock(Path(publish_weights(tmp_path, 9, tensors(), locked=locked).path))
    assert len(cuda.locked) == 1, "a mapping keeps the memory of a removed file"
    locked.close()
    assert cuda.locked == {}


def test_a_refused_lock_is_logged_once_and_not_tried_again(cuda, tmp_path, caplog):
    locked = LockedFiles()
    write_tensors(tmp_path / "early", tensors(), locked=locked)
    cuda.refuses = True
    with caplog.at_level(logging.WARNING):
        for name in ("one", "two"):
            written = write_tensors(tmp_path / name, tensors(2.0), locked=locked)
            assert read_tensors(tmp_path / name, locked=locked)["a"].eq(2.0).all()
            assert len(written) == 3
    assert (cuda.num_calls, cuda.locked) == (2, {})
    assert [record.getMessage() for record in caplog.records] == [
        f"fast weight transfer failed, using a plain file: cannot lock {tmp_path / 'one'}: "
        "CUDA error: operation not supported (801)"
    ]


def test_a_full_disk_raises_an_error_before_the_write(cuda, tmp_path, monkeypatch):
    """Space is reserved first, because a write to a mapping without space kills the process."""

    def full(descriptor, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        write_tensors(tmp_path / "t", tensors(), locked=LockedFiles())
    assert cuda.num_calls == 0


@pytest.mark.timeout(120)
def test_a_gpu_writes_and_reads_locked_pages(tmp_path):
    """Tensors are written from a GPU and read back to it, in /dev/shm if it exists."""
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path
    path, locked = folder / f"ftis-test-{os.getpid()}", LockedFiles()
    given = {"a": torch.randn(1000, 999, device="cuda").bfloat16(), "b": torch.randn(7, device="cuda")}
    try:
        for factor in (1, 2):
            write_tensors(path, {name: tensor * factor for name, tensor in given.items()}, locked=locked)
            assert locked.why_not == ""
            read = read_tensors(path, locked=locked)
            assert all(read[name].is_pinned() for name in given)
            assert all(read[name].cuda().equal(tensor * factor) for name, tensor in given.items())
    finally:
        locked.close()
        path.unlink(missing_ok=True)


COPY = torch.Tensor.copy_


class LateEvent:
    """An event whose copies happen when it is waited for, as late as CUDA may do them."""

    waiting: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(self) -> None:
        self.copies, LateEvent.waiting = LateEvent.waiting, []

    def synchronize(self) -> None:
        for target, source in self.copies:
            COPY(target, source)


def late_copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not non_blocking:
        return COPY(target, source)
    target.fill_(255)
    LateEvent.waiting.append((target, source))
    return target


@pytest.mark.parametrize("on_gpu", ["all", "every-second"])
def test_a_file_of_late_copies_equals_the_tensors(tmp_path, monkeypatch, on_gpu):
    tensors = {f"t{number}": torch.randn(number, 3) for number in (40, 1, 90, 7, 0, 300)}
    places = {each.data_ptr() for number, each in enumerate(tensors.values()) if on_gpu == "all" or number % 2}
    monkeypatch.setattr(tensor_file, "BUFFER_BYTES", 500)
    monkeypatch.setattr(tensor_file, "is_on_gpu", lambda tensor: tensor.data_ptr() in places)
    monkeypatch.setattr(tensor_file, "page_locked", lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "Event", LateEvent)
    monkeypatch.setattr(torch.Tensor, "copy_", late_copy)
    write_tensors(tmp_path / "t", tensors)
    read = read_tensors(tmp_path / "t")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_memory_that_cannot_be_locked_is_used_unlocked(monkeypatch, caplog):
    empty = torch.empty

    def refusing(size, *, dtype, pin_memory=False):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", refusing)
    assert len(tensor_file.page_locked(8)) == 8
    assert "the system locks no 0 MB of memory: CUDA error: out of memory" in caplog.text
