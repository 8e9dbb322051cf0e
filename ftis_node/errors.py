"""Every exception of the project, as one tree. `exit_code` is that of a command which the exception ends.

`str(error)` is the line for the user: what is wrong and what to do. Stale, refused and failed rollouts are not
exceptions but counters (`records.Refusal`, `replay.ReleaseReason`).
"""

from __future__ import annotations

from typing import ClassVar, Final


class FtisError(Exception):
    """Root of the tree; by itself an internal fault."""

    exit_code: ClassVar[int] = 1


class UsageError(FtisError):
    """Wrong use or configuration."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is unknown, out of bounds or contradicts another."""


class DamagedError(ConfigError):
    """A file of the home is damaged."""


class FileError(ConfigError):
    """A file is a folder, a link, a device, too large, or not of its format."""


class TaskError(UsageError):
    """Unknown task, or a data file that cannot be read."""


class ModelError(UsageError):
    """A model folder is missing or incomplete."""


class UntrainableModelError(ModelError):
    """A model is complete, and of a kind that cannot be trained."""


class MachineError(FtisError):
    """This machine lacks memory, an engine, disk space or a working package."""

    exit_code = 3


class DiskFullError(MachineError):
    """A disk has no space left."""


class OutOfMemoryError(MachineError):
    """Memory is exhausted at the moment."""


class EngineError(MachineError):
    """The generation engine cannot be loaded here."""


class UnknownArchitectureError(EngineError):
    """The generation engine does not implement the model."""


class NetworkError(FtisError):
    """Something beyond this machine cannot be reached."""

    exit_code = 4


class RecordError(FtisError):
    """Bytes that are not a valid record. `reason` is the name under which the refusal is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class SchemaRecordError(RecordError):
    """Bytes of another version of the wire format; `schema` is its number."""

    def __init__(self, reason: str, detail: str, *, schema: int) -> None:
        super().__init__(reason, detail)
        self.schema = schema


class WorkerError(FtisError):
    """A worker process failed."""


class WorkerDiedError(WorkerError):
    """A worker ended or stopped answering."""


class WorkerCrashedError(WorkerDiedError):
    """A worker ended by itself: not silent, and not by SIGKILL or SIGTERM, as the system ends it without memory."""


class WorkerTaskError(WorkerError):
    """A running worker reports that one request failed."""


class SharingError(WorkerError):
    """A worker cannot read weights in another process' memory."""


class NonFiniteError(FtisError):
    """A loss, gradient or update is NaN or infinite; the step was refused."""


# What torch, CUDA's libraries, oneDNN, the system and vLLM say where memory runs out, in lower case.
OUT_OF_MEMORY_TEXTS: Final = (
    "out of memory",  # torch.OutOfMemoryError, and torch.AcceleratorError for what the driver refuses
    "status_alloc_failed",  # cuBLAS, cuDNN, cuSOLVER, cuSPARSE
    "defaultcpuallocator: can't allocate memory",
    "could not create a memory object",
    "bad_alloc",
    "cannot allocate memory",
    "free memory on device",  # vLLM: "... is less than desired GPU memory utilization"
    "no available memory for the cache blocks",  # vLLM: the weights left nothing of its share
    "larger than the available kv cache memory",
    "error in memory profiling",  # vLLM: another process gave memory back while it measured
)
# No package index has ftis-node: a message that names it to pip would install the package of anyone who takes the name.
INSTALL_VLLM: Final = "run `make setup-vllm` in the clone of ftis-node"


def says_out_of_memory(text: str) -> bool:
    """Return whether the text of an error, of any class, reports exhausted memory."""
    lowered = text.lower()
    return any(words in lowered for words in OUT_OF_MEMORY_TEXTS)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def how_to_install(extra: str) -> str:
    """Return the instruction that installs an extra of pyproject.toml."""
    return f"""run `pip install -e ".[{extra}]"` in the clone of ftis-node"""
