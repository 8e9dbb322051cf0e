"""The accelerators of this machine: name, memory and capability of each, what is free, and which cannot be used.

They are found without torch in this process. The daemon plans memory and never computes, and torch would cost it 1.3 s
of processor time and 200 MB. A build of torch for CPUs, or a machine without a GPU's device file, has no accelerator.
Otherwise a short process asks torch.

The free memory is `nvidia-smi`'s, one process of about 0.1 s. torch would first create a context on each card. That
takes 0.3 s, and its own 0.3 to 0.5 GiB would count as used. Without `nvidia-smi` all memory counts as free.
"""

from __future__ import annotations

import json
import logging
import platform
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ftis_node.errors import MachineError

log = logging.getLogger(__name__)

DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap", "/dev/kfd")
"""Device files of a GPU's driver: NVIDIA on Linux, in WSL2 and on Jetson; AMD."""
AMD_FILE = DRIVER_FILES[-1]
PROBE_TIMEOUT_S, DRIVER_TIMEOUT_S = 120.0, 8.0
PROBE = "import json, torch; from ftis_node.models.accelerators import by_torch; print(json.dumps(by_torch(torch)))"
FREE_MEMORY = ("nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits")
MIN_CAPABILITY = (8, 0)  # vLLM's kernels and bfloat16 products
CARDS = "NVIDIA's RTX 30, 40, 50, A10, L4, A100 and newer cards work"
ON_CPU = f'device = "cpu" in node.toml works; {CARDS}'
Device = Literal["auto", "cpu", "cuda"]


class Accelerator(NamedTuple):
    """A GPU as torch lists it. `free_bytes` excludes what other programs use; None: unknown."""

    name: str
    memory_bytes: int
    capability: tuple[int, int] = MIN_CAPABILITY
    uuid: str = ""
    is_amd: bool = False
    free_bytes: int | None = None


def list_accelerators() -> list[Accelerator]:
    """Return the CUDA devices that torch sees, in its order. Raises MachineError if torch cannot be queried."""
    if (torch := sys.modules.get("torch")) is not None:
        listed = by_torch(torch)
    elif metadata.version("torch").endswith("+cpu") or not any(Path(path).exists() for path in DRIVER_FILES):
        listed = []
    else:
        listed = _ask_torch()
    free = _free_memory() if listed else {}
    found = (Accelerator(name, size, tuple(capability), *rest) for name, size, capability, *rest in listed)
    return [each._replace(free_bytes=free.get(each.uuid)) for each in found]


def has_gpu() -> bool:
    """Return whether torch can use a CUDA device. Raises MachineError if torch cannot be queried."""
    if (torch := sys.modules.get("torch")) is not None:
        return bool(torch.cuda.is_available())
    return bool(list_accelerators())


def pick_device(device: Device) -> Literal["cpu", "cuda"]:
    """Return `device` as torch names it; "auto" is the GPU if there is one. Raises MachineError for a missing GPU."""
    if device == "cpu":
        return "cpu"
    if has_gpu():
        return "cuda"
    if device == "cuda":
        raise MachineError('no CUDA device here: set the device to "cpu", or see `ftis-node doctor`')
    return "cpu"


class Unsupported(NamedTuple):
    """What cannot work here, and what would."""

    finding: str
    advice: str

    def __str__(self) -> str:
        return f"{self.finding}: {self.advice}"


def unusable_gpu(found: Accelerator, *, is_float32: bool = False) -> Unsupported | None:
    """Return why the workers cannot use this GPU; None for one that works.

    `is_float32`: the settings ask for it and for the torch engine, which together run on older GPUs.
    """
    if found.is_amd:
        return Unsupported(f"{found.name} is an AMD GPU, which ftis-node does not support", ON_CPU)
    if found.capability < MIN_CAPABILITY and not is_float32:
        needs, has = (".".join(map(str, each)) for each in (MIN_CAPABILITY, found.capability))
        finding = f"{found.name} has compute capability {has}, and vLLM and bfloat16 need {needs}"
        return Unsupported(finding, f'{ON_CPU}; so does --engine torch with dtype = "float32"')
    return None


def unused_gpu(amd_file: str = AMD_FILE) -> Unsupported | None:
    """Return that the AMD GPU of a machine on which torch sees no GPU stays unused; None if there is none."""
    if not Path(amd_file).exists():
        return None
    return Unsupported("the AMD GPU is not used, because ftis-node supports none", f"models run on the CPU; {CARDS}")


def unusable_system(system: str = sys.platform, release: str = platform.release()) -> Unsupported | None:
    """Return why a node cannot run on this operating system; None if it can."""
    if system == "darwin":
        return Unsupported(
            "ftis-node does not run on macOS, nor on Apple's GPUs", "use Linux x86-64, also in a container"
        )
    if release.endswith("-Microsoft"):  # WSL2's kernel is named microsoft-standard
        return Unsupported("this is WSL1, which has no Linux kernel", "run `wsl --set-version DISTRIBUTION 2` for WSL2")
    return None


def by_torch(torch: Any) -> list[Any]:
    """Return the fields of each accelerator but the last, as plain values."""
    found = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    is_amd = torch.version.hip is not None
    return [[each.name, each.total_memory, [each.major, each.minor], str(each.uuid), is_amd] for each in found]


@cache
def _ask_torch() -> Any:
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=PROBE_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        last_line = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
        raise MachineError(f"torch cannot list the GPUs: {last_line}; see `ftis-node doctor`") from error
    return json.loads(done.stdout.splitlines()[-1])


@cache  # one plan for one start, whatever other programs do meanwhile
def _free_memory() -> dict[str, int]:
    """Return the free bytes of each GPU by its UUID; {} if the driver does not say."""
    try:
        done = subprocess.run(FREE_MEMORY, capture_output=True, text=True, check=True, timeout=DRIVER_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the free memory of the GPU is unknown, all of it is planned for: %s", error)
        return {}
    rows = (line.partition(", ") for line in done.stdout.splitlines())
    return {uuid.removeprefix("GPU-"): int(free) << 20 for uuid, _, free in rows if free.isdecimal()}
