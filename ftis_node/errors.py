"""Every exception of the project, as one tree.

Each class is one sentence and one exit code. `str(error)` is the line that a user reads: what is wrong, and what to do.

    FtisError                     1  a fault of ours
    +-- UsageError                2  wrong use or configuration
    |   +-- ConfigError           2  a setting is unknown, out of bounds or contradicts another
    |   |   +-- DamagedError      2  a file of the home is not what was written there
    |   |   `-- FileError         2  a file is a folder, link or device, too large, or not of its format
    |   +-- HomeInUseError        2  another node owns this home
    |   +-- TaskError             2  unknown task, or a data file that cannot be read
    |   `-- ModelError            2  a model folder is missing or incomplete
    +-- MachineError              3  this machine cannot do it: memory, engine, disk
    |   +-- OutOfMemoryError      3  there is not enough memory for it at the moment
    |   `-- EngineError           3  the generation engine cannot be loaded here
    |       `-- UnknownArchitectureError  3  it has no implementation of the model
    +-- NetworkError              4  something beyond this machine cannot be reached
    |   `-- ModelFetchError       4  the hub did not give us the model
    +-- RecordError               1  bytes that are no valid record; `.reason` is the refusal's name
    |   `-- SchemaRecordError     1  they are of another version of the wire, which `.schema` tells
    +-- WorkerError               1  a worker process failed
    |   +-- WorkerDiedError       1  it ended, or stopped answering, while we needed it
    |   +-- WorkerTaskError       1  it is alive and says that one request failed
    |   `-- SharingError          1  it cannot read weights in another process' memory
    `-- NonFiniteError            1  a loss, gradient or update is NaN or infinite; the step was refused

Stale, refused and failed rollouts are not exceptions: they are counters (`records.Refusal`, `replay.ReleaseReason`).
"""

from __future__ import annotations

from typing import ClassVar, Final


class FtisError(Exception):
    """Root of the tree; alone it means a fault of ours."""

    exit_code: ClassVar[int] = 1


class UsageError(FtisError):
    """Wrong use or configuration."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is unknown, out of bounds or contradicts another."""


class DamagedError(ConfigError):
    """A file of the home is not what was written there."""


class FileError(ConfigError):
    """A file is a folder, a link, a device, too large, or not of its format."""


class HomeInUseError(UsageError):
    """Another node owns this home."""


class TaskError(UsageError):
    """Unknown task, or a data file that cannot be read."""


class ModelError(UsageError):
    """A model folder is missing or incomplete."""


class MachineError(FtisError):
    """This machine cannot do it: memory, engine, disk."""

    exit_code = 3


class OutOfMemoryError(MachineError):
    """There is not enough memory for it at the moment."""


class EngineError(MachineError):
    """The generation engine cannot be loaded here."""


class UnknownArchitectureError(EngineError):
    """The generation engine has no implementation of the model."""


class NetworkError(FtisError):
    """Something beyond this machine cannot be reached."""

    exit_code = 4


class ModelFetchError(NetworkError):
    """The hub did not give us the model."""


class RecordError(FtisError):
    """Bytes that are no valid record.

    `reason` is the name under which the refusal is counted.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class SchemaRecordError(RecordError):
    """Bytes of another version of the wire; `schema` is its number."""

    def __init__(self, reason: str, detail: str, *, schema: int) -> None:
        super().__init__(reason, detail)
        self.schema = schema


class WorkerError(FtisError):
    """A worker process failed."""


class WorkerDiedError(WorkerError):
    """A worker ended, or stopped answering, while we needed it."""


class WorkerTaskError(WorkerError):
    """A worker is alive and says that one request failed."""


class SharingError(WorkerError):
    """It cannot read weights in another process' memory."""


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


def says_out_of_memory(text: str) -> bool:
    """Whether the text of an error, of whatever class, says that memory ran out."""
    lowered = text.lower()
    return any(words in lowered for words in OUT_OF_MEMORY_TEXTS)
