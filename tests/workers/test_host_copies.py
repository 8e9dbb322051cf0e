"""Copies to the host keep every byte in order. Stubs replace CUDA: a copy is complete when its event was waited for."""

from __future__ import annotations

import pytest
import torch

from ftis_node.workers import host_copies
from ftis_node.workers.tensor_file import read_tensors, write_tensors

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
    monkeypatch.setattr(host_copies, "BUFFER_BYTES", 500)
    monkeypatch.setattr(host_copies, "is_on_gpu", lambda tensor: tensor.data_ptr() in places)
    monkeypatch.setattr(host_copies, "page_locked", lambda size: torch.empty(size, dtype=torch.uint8))
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
    assert len(host_copies.page_locked(8)) == 8
    assert "the system locks no 0 MB of memory: CUDA error: out of memory" in caplog.text
