"""`transfer`: the three ways by which new weights can go from one process to another, with the tensors of a real shape.

    file         device -> pageable host memory -> file in /dev/shm -> mapping -> device
    registered   device -> page-locked file in /dev/shm -> device
    ipc          device -> device, by a handle of the storage that the other process opens once

By torch alone: what is measured is the mechanism, not the node's use of it. On the CPU `ipc` goes by shared memory.
"""

from __future__ import annotations

import mmap
import multiprocessing
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from ftis_node.lab.card.device_speed import seconds
from ftis_node.workers.tensor_file import checksum, read_tensors, write_tensors
from gpu.cases import Options
from gpu.machine import SHM, register, unregister
from stubs.random_models import SHAPES

ROUNDS, COPIES = 3, 20
ALIGNMENT = 64
ANSWER_LIMIT_S = 90.0


def tensors_of(shape: str, device: str) -> dict[str, Tensor]:
    """Return random bfloat16 tensors with the shapes of that model: 434 of them at 3B."""
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPES[shape]))
    return {
        name: torch.randn(value.shape, device=device, dtype=torch.bfloat16) for name, value in model.named_parameters()
    }


def file(options: Options, *, shape: str) -> dict[str, Any]:
    """Measure the parts of publishing by a plain file, each as the median of three rounds."""
    device, tensors = options.device, tensors_of(shape, options.device)
    targets = {name: torch.empty_like(value) for name, value in tensors.items()}
    num_bytes = sum(value.nbytes for value in tensors.values())
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        path = Path(folder) / "weights.safetensors"
        for _ in range(ROUNDS):
            host: dict[str, Tensor] = {}
            rounds.append(
                {
                    "d2h_s": seconds(partial(_fetch, host, tensors), device),
                    "write_s": seconds(partial(write_tensors, path, host), device),
                    "load_s": seconds(lambda: _copy_into(targets, read_tensors(path)), device),
                }
            )
    return _same(tensors, targets) | _medians(rounds) | _rates(num_bytes, _medians(rounds)) | {"num": len(tensors)}


def registered(options: Options, *, shape: str) -> dict[str, Any]:
    """Measure a transfer through one file in /dev/shm, which both sides page-lock once (`register_s`)."""
    device, tensors = options.device, tensors_of(shape, options.device)
    targets = {name: torch.empty_like(value) for name, value in tensors.items()}
    places, end = {}, 0
    for name, value in tensors.items():
        places[name] = end
        end += -(-value.nbytes // ALIGNMENT) * ALIGNMENT
    with tempfile.TemporaryFile(dir=SHM) as opened:
        opened.truncate(end)
        with mmap.mmap(opened.fileno(), end) as mapped:
            whole = torch.frombuffer(mapped, dtype=torch.uint8)
            register_s = seconds(partial(register, whole, device), device)
            views = {
                name: whole[places[name] : places[name] + value.nbytes].view(value.dtype).view(value.shape)
                for name, value in tensors.items()
            }
            rounds = [
                {
                    "d2h_s": seconds(partial(_copy_into, views, tensors), device),
                    "load_s": seconds(partial(_copy_into, targets, views), device),
                }
                for _ in range(ROUNDS)
            ]
            unregister(whole, device)
            del whole, views
    found = _medians(rounds)
    num_bytes = sum(value.nbytes for value in tensors.values())
    return _same(tensors, targets) | found | _rates(num_bytes, found) | {"register_s": round(register_s, 4)}


def ipc(options: Options, *, shape: str) -> dict[str, Any]:
    """Let another process open the storages once and copy from them twenty times, and compare the sums of both sides.

    `export_s` and `open_s` are for all tensors, `ipc_s` is one copy of all.
    """
    device, tensors = options.device, tensors_of(shape, options.device)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    reader = context.Process(target=_read_shared, args=(there, device))
    reader.start()
    try:
        handles: dict[str, tuple[Any, ...]] = {}
        export_s = seconds(lambda: handles.update({name: _export(each) for name, each in tensors.items()}), device)
        here.send(handles)
        found = _answer(here, reader)
        sums = found.pop("checksums")
        wrong = [name for name, value in tensors.items() if checksum(value) != sums[name]]
        if wrong:
            raise RuntimeError(f"{len(wrong)} of {len(tensors)} tensors arrived with other values, such as {wrong[0]}")
        here.send("done")  # the storages must exist until the other side has closed them
    finally:
        reader.join(10)
        reader.kill()
    return {"export_s": round(export_s, 4), "num": len(tensors), **found}


def _export(tensor: Tensor) -> tuple[Any, ...]:
    """Return bytes and numbers that identify a tensor's storage in other processes, its offset and its shape."""
    storage = tensor.untyped_storage()
    # On the CPU the storage is moved to shared memory, which is not necessary on a GPU.
    shared = storage._share_cuda_() if tensor.is_cuda else storage._share_filename_cpu_()
    return tuple(shared), tensor.storage_offset(), tuple(tensor.shape)


def _open(handle: tuple[Any, ...], device: str) -> Tensor:
    shared, offset, shape = handle
    storage_type = torch.UntypedStorage
    opened = (
        storage_type._new_shared_cuda(*shared) if device == "cuda" else storage_type._new_shared_filename_cpu(*shared)
    )
    empty = torch.empty(0, dtype=torch.bfloat16, device=device)
    return empty.set_(opened, offset, shape, torch.empty(shape, device="meta").stride())


def _read_shared(pipe: Connection, device: str) -> None:
    """Open, copy and sum in the other process, and wait until the owner is done."""
    if device == "cuda":
        torch.cuda.init()
        torch.ones(1, device=device)
    handles = pipe.recv()
    opened: dict[str, Tensor] = {}
    open_s = seconds(lambda: opened.update({name: _open(handle, device) for name, handle in handles.items()}), device)
    targets = {name: torch.empty_like(value) for name, value in opened.items()}
    copies = [seconds(partial(_copy_into, targets, opened), device) for _ in range(COPIES)]
    num_bytes = sum(value.nbytes for value in targets.values())
    pipe.send(
        {
            "open_s": round(open_s, 4),
            "ipc_s": round(median(copies), 5),
            "ipc_gbps": round(num_bytes / 1e9 / median(copies), 2),
            "checksums": {name: checksum(value) for name, value in targets.items()},
        }
    )
    pipe.recv()


def _answer(pipe: Connection, reader: Any) -> dict[str, Any]:
    ends_at = time.monotonic() + ANSWER_LIMIT_S
    while not pipe.poll(1):
        if not reader.is_alive() or time.monotonic() > ends_at:
            raise RuntimeError(f"the reading process gave no answer (exit code {reader.exitcode})")
    answer: dict[str, Any] = pipe.recv()
    return answer


def _fetch(host: dict[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors to new pageable memory, one after the other."""
    host.update({name: value.cpu() for name, value in tensors.items()})


def _copy_into(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(sources[name], non_blocking=True)


def _same(ones: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, Any]:
    """Raise RuntimeError if a value changed."""
    wrong = [name for name, value in ones.items() if checksum(value) != checksum(others[name])]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(ones)} tensors arrived with other values, such as {wrong[0]}")
    return {}


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(median(each[name] for each in rounds), 6) for name in rounds[0]}


def _rates(num_bytes: int, found: Mapping[str, float]) -> dict[str, float]:
    return {
        "gib": round(num_bytes / 2**30, 3),
        "d2h_gbps": round(num_bytes / 1e9 / found["d2h_s"], 2),
        "h2d_gbps": round(num_bytes / 1e9 / found["load_s"], 2),
    }
