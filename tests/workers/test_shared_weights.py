"""Weights in the memory of another process: the list of handles, its validation, and the mappings.

Shared memory of the CPU replaces torch's two functions for CUDA IPC (`tests/cpu_sharing.py`), except in the test of two
processes on one GPU.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ftis_node.errors import SharingError
from ftis_node.workers import shared_tensors
from ftis_node.workers.shared_tensors import Exporter, OpenedWeights, export_storage
from ftis_node.workers.tensor_file import checksum
from ftis_node.workers.weight_store import SharedStorage, SharedWeights
from tests import cpu_sharing

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
READER = """
import sys
import msgspec
import torch
from ftis_node.errors import SharingError
from ftis_node.workers.shared_tensors import OpenedWeights
from ftis_node.workers.tensor_file import checksum
from ftis_node.workers.weight_store import SharedWeights
from tests import cpu_sharing

device = torch.device(sys.argv[1])
if device.type == "cpu":
    cpu_sharing.install()
opened = OpenedWeights(device)
for line in sys.stdin:
    try:
        opened.open(msgspec.msgpack.decode(bytes.fromhex(line), type=SharedWeights))
        print(*(f"{name}={checksum(tensor)}" for name, tensor in opened.tensors()), flush=True)
    except SharingError as error:
        print("error:", error, flush=True)
"""


class Reader:
    """Another process that maps shared weights and replies with the checksums of their tensors."""

    def __init__(self, device: str) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        self._process = subprocess.Popen(
            [sys.executable, "-c", READER, device], stdin=-1, stdout=-1, text=True, env=environment
        )

    def read(self, shared: SharedWeights) -> str:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(msgspec.msgpack.encode(shared).hex() + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture
def sharing(monkeypatch):
    """The handles that were mapped, in order."""
    cpu_sharing.install(monkeypatch.setattr)
    cpu_sharing.opened.clear()
    return cpu_sharing.opened


def weights(device: str = "cpu") -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    whole = torch.randn(6, 4).bfloat16()
    made = {"a": torch.randn(3, 5).bfloat16(), "part": whole[2:4], "rest": whole[4:], "c": torch.randn(7)}
    on_device = {name: tensor.to(device) for name, tensor in made.items()} if device != "cpu" else made
    for tensor in on_device.values():
        if device == "cpu":
            tensor.share_memory_()
    return on_device


def sums(tensors: dict[str, torch.Tensor]) -> str:
    return " ".join(f"{name}={checksum(tensor)}" for name, tensor in tensors.items())


@pytest.mark.timeout(120)
def test_another_process_reads_each_version_through_one_mapping(sharing):
    tensors, exporter, reader = weights(), Exporter(), Reader("cpu")
    try:
        first = exporter.share(tensors)
        assert len(first.storages) == 3, "the storage of two tensors is listed twice"
        assert [each.name for each in first.tensors] == list(tensors)
        assert reader.read(first) == sums(tensors)
        for tensor in tensors.values():
            tensor.copy_(tensor * 2 + 1)
        second = exporter.share(tensors)
        assert second is first, "tensors that did not move are exported again"
        assert reader.read(second) == sums(tensors)
        tensors["a"] = torch.ones(2).share_memory_()
        third = exporter.share(tensors)
        assert third.export_id != first.export_id
        assert reader.read(third) == sums(tensors)
    finally:
        reader.close()


@pytest.mark.timeout(120)
def test_two_processes_share_weights_on_one_gpu():
    """Three versions use handles that are opened once. Then another export has new handles."""
    tensors, exporter, reader = weights("cuda"), Exporter(), Reader("cuda:0")
    try:
        exports = set()
        for _ in range(3):
            for tensor in tensors.values():
                tensor.copy_(tensor * 2 + 1)
            shared = exporter.share(tensors)
            exports.add(shared.export_id)
            assert reader.read(shared) == sums(tensors)
        assert len(exports) == 1
        tensors["a"] = torch.ones(3 << 20, device="cuda")
        assert reader.read(exporter.share(tensors)) == sums(tensors)
        assert shared_tensors.grow_segments()
        grown = {"a": torch.ones(64 << 20, device="cuda")}
        with pytest.raises(SharingError):
            Exporter().share(grown)
        assert reader.read(exporter.share(tensors)) == sums(tensors), "older tensors are no longer shared"
    finally:
        reader.close()


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.ones(3, dtype=torch.int64), "a .torch.int64. is not a contiguous tensor of 16-bit or 32-bit floats"),
        (torch.ones(3, 4).T, "not a contiguous tensor"),
        (torch.ones(0), "not a contiguous tensor"),
    ],
)
def test_a_tensor_that_cannot_be_shared_is_named(sharing, tensor, problem):
    with pytest.raises(SharingError, match=problem):
        Exporter().share({"a": tensor})


VALID = (0, b"\x02c" + bytes(64), 12, 0, b"counter", 0, b"event", True)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ((*VALID[:1], b"\x02e" + bytes(20), *VALID[2:]), "expandable segments"),
        ((*VALID[:4], "counter", *VALID[5:]), "unknown form"),
    ],
)
def test_handles_of_another_form_are_refused(monkeypatch, fields, problem):
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: fields)
    with pytest.raises(SharingError, match=problem):
        export_storage(torch.ones(3).untyped_storage())
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: VALID)
    assert export_storage(torch.ones(3).untyped_storage()).num_bytes == 12


def test_without_cuda_sharing_raises_an_error():
    with pytest.raises(SharingError, match="CUDA IPC cannot export a handle: CUDA is not available"):
        export_storage(torch.ones(3).untyped_storage())
    with pytest.raises(SharingError, match="CUDA IPC cannot open a handle: CUDA is not available"):
        shared_tensors.open_storage(SharedStorage(*VALID[1:]), 0)


def changed(shared: SharedWeights, **fields: Any) -> SharedWeights:
    return msgspec.structs.replace(shared, **fields)


def first_tensor(shared: SharedWeights, **fields: Any) -> SharedWeights:
    return changed(shared, tensors=(changed(shared.tensors[0], **fields), *shared.tensors[1:]))


INCONSISTENT: dict[str, tuple[Callable[[SharedWeights], SharedWeights], str]] = {
    "no storage": (lambda shared: first_tensor(shared, storage=9), "a: there is no storage 9"),
    "beyond": (lambda shared: first_tensor(shared, offset=1), "a reach beyond their storage"),
    "too many": (lambda shared: first_tensor(shared, shape=(3, 6)), "a reach beyond their storage"),
    "twice": (lambda shared: first_tensor(shared, name="c"), "names a tensor twice"),
}


@pytest.mark.parametrize("case", INCONSISTENT)
def test_an_inconsistent_list_is_refused_before_it_is_mapped(sharing, case):
    change, problem = INCONSISTENT[case]
    shared = Exporter().share(weights())
    with pytest.raises(SharingError, match=problem):
        OpenedWeights(CPU).open(change(shared))
    assert sharing == []


def test_weights_of_another_gpu_or_an_ended_process_are_refused(sharing):
    tensors, opened = weights(), OpenedWeights(CPU)
    shared = Exporter().share(tensors)
    opened.open(shared)
    with pytest.raises(SharingError, match="on another GPU"):
        opened.open(changed(shared, export_id="x", device_uuid="GPU-elsewhere"))
    gone = [changed(each, handle=b"\x02c/proc/1/fd/none".ljust(66, b"\0")) for each in shared.storages[1:]]
    half = changed(shared, export_id="y", storages=(shared.storages[0], *gone))
    with pytest.raises(SharingError, match="cannot open a handle: CUDA error: invalid argument$"):
        opened.open(half)
    with pytest.raises(AssertionError):
        next(opened.tensors())
    opened.open(shared)
    assert dict(opened.tensors())["a"].equal(tensors["a"])


def test_grow_segments_respects_an_allocator_setting_of_the_user(monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append)
    for name in shared_tensors.ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    assert shared_tensors.grow_segments()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:256")
    assert not shared_tensors.grow_segments()
    assert calls == ["expandable_segments:True"]
