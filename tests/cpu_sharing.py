"""A version of torch's two functions for CUDA IPC on a CPU: shared memory behind handles of the same form.

`install()` replaces exactly these two and the GPU's name. The code that encodes, checks, caches and falls back is real.
A handle names an open file of the process that made it. As in CUDA, it is valid while that process lives.
"""

import os
from pathlib import Path
from typing import Any

import torch

from ftis_node.workers import shared_tensors

UUID = "GPU-of-the-tests"
REFUSAL_FILE = "REFUSE_SHARING"  # an environment variable that names a file: while it exists, no handle opens
opened: list[str] = []


def share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """Return eight fields like those of `_share_cuda_`. A storage outside shared memory is moved there."""
    descriptor, num_bytes = storage._share_fd_cpu_()
    path = f"/proc/{os.getpid()}/fd/{os.dup(descriptor)}".encode()
    return 0, b"\x02c" + path.ljust(64, b"\0"), num_bytes, 0, b"counter", 0, b"event", False


def open_shared(device: int, handle: bytes, num_bytes: int, offset_bytes: int, *rest: Any) -> torch.UntypedStorage:
    """Open a handle like `_new_shared_cuda`. Raises the same error as that."""
    path = handle[2:].rstrip(b"\0").decode()
    refusing = os.environ.get(REFUSAL_FILE, "")
    if not Path(path).exists() or (refusing and Path(refusing).exists()):
        raise RuntimeError("CUDA error: invalid argument\nCUDA kernel errors might be reported later")
    opened.append(path)
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8).untyped_storage()


def install(patch: Any = setattr) -> None:
    """Replace the functions with `patch`, which is `setattr` or that of a `monkeypatch`."""
    torch.multiprocessing.set_sharing_strategy("file_descriptor")  # type: ignore[no-untyped-call]  # hivemind's moves storages
    patch(torch.UntypedStorage, "_share_cuda_", share)
    patch(torch.UntypedStorage, "_new_shared_cuda", staticmethod(open_shared))
    patch(shared_tensors, "device_uuid", lambda device: UUID)


def site_folder(folder: Path) -> str:
    """Return a PYTHONPATH with which each Python process calls `install()` at its start."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text("from tests import cpu_sharing\ncpu_sharing.install()\n")
    return f"{folder}:{Path(__file__).parents[1]}"
