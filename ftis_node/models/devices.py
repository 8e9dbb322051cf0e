"""The accelerators of this machine, found without torch in this process.

The daemon plans memory and never computes, and torch would cost it 1.3 s of processor time and 200 MB. A build of
torch for CPUs, or a machine without a GPU's device file, has no accelerator. Otherwise a short process asks torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from ftis_node.errors import MachineError

DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap", "/dev/kfd")
"""Device files of a GPU's driver: NVIDIA on Linux, in WSL2 and on Jetson; AMD."""
PROBE_TIMEOUT_S = 120.0
PROBE = (
    "import json, torch; found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]; "
    "print(json.dumps([(each.name, each.total_memory) for each in found]))"
)


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One CUDA device."""

    name: str
    memory_bytes: int


def list_accelerators() -> list[Accelerator]:
    """Return the CUDA devices that torch sees, in its order. Raises MachineError if torch cannot be queried."""
    if (torch := sys.modules.get("torch")) is not None:
        properties = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
        return [Accelerator(found.name, found.total_memory) for found in properties]
    return list(_ask_torch()) if _may_have_gpu() else []


def has_gpu() -> bool:
    """Return whether torch can use a CUDA device. Raises MachineError if torch cannot be queried."""
    if (torch := sys.modules.get("torch")) is not None:
        return bool(torch.cuda.is_available())
    return bool(list_accelerators())


def _may_have_gpu() -> bool:
    if metadata.version("torch").endswith("+cpu"):
        return False
    return sys.platform != "linux" or any(Path(path).exists() for path in DRIVER_FILES)


@cache
def _ask_torch() -> tuple[Accelerator, ...]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=PROBE_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        last_line = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
        raise MachineError(f"torch cannot list the GPUs: {last_line}; see `ftis-node doctor`") from error
    return tuple(Accelerator(str(name), int(size)) for name, size in json.loads(done.stdout.splitlines()[-1]))
