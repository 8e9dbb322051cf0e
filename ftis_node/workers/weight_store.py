"""Published weights, from the learner to the generator: a safetensors file per version, and a proof that they are
served.

The learner publishes version n into a complete folder, and the generator loads it from there. Nothing in the folder is
synced to a disk: a checkpoint holds the same weights. A version is the whole model, or only a LoRA adapter in peft's
format. The file of an old version is overwritten, but not an adapter's: engines read it through a mapping.

An engine may report that it loaded new weights and still use the old ones (seen with tied embeddings). So a version has
two checks. An engine returns the checksums of its tensors after loading: any difference means a wrong tensor. The
learner also computes the log-probs of a few fixed tokens. They detect wrong computation with correct tensors, and are
the only check of tensors that an engine holds in another form.

Weights in the learner's GPU memory are described so that another process can map them (CUDA IPC). The description is a
message of plain bytes and integers, without pickle. The CUDA driver accepts only handles that it created itself. A
handle is no copy: the reader sees the learner's present values. The learner's next update waits until the reader is
done. A late reader detects changed weights by their checksums.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from ftis_node.config.home import Home
from ftis_node.errors import ModelError, SharingError
from ftis_node.models.adapter_folder import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from ftis_node.models.model_files import read_header
from ftis_node.workers.durable import complete_folder, keep_newest, remove_leftovers, take_oldest
from ftis_node.workers.wire import Message

if TYPE_CHECKING:
    import torch

Transfer: TypeAlias = Literal["ipc", "pinned", "file"]
"""The transfer method: CUDA IPC, a page-locked file in memory, or a file."""
TRANSFERS: dict[Transfer, str] = {"ipc": "CUDA IPC", "pinned": "page-locked file", "file": "file"}

ELEMENT_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
PREFIX = "weights-"
WEIGHTS_FILE = "model.safetensors"
PROBE_LENGTH = 32
PROBE_MULTIPLIER = 2_654_435_761  # Knuth's multiplier, near 2^32 / golden ratio: spreads indices over a vocabulary
log = logging.getLogger(__name__)
MEMORY_DISK = Path("/dev/shm")  # nosec B108: only a folder of mode 0700 is created in it
VERSIONS_KEPT = 2
VERSIONS_AT_ONCE = VERSIONS_KEPT + 1  # and one is being written
VERSIONS_AS_A_RESERVE = 2  # a fall-back to files keeps fewer: the oldest is overwritten
FREE_SHARE = 0.5  # at most this share of the free bytes: other programs use it, too


@contextmanager
def weights_folder(
    home: Home, *, version_bytes: int, num_versions: int = VERSIONS_AT_ONCE, memory_disk: Path = MEMORY_DISK
) -> Iterator[Path]:
    """Yield an empty folder for published weights of `version_bytes` each: in `memory_disk` if they fit, else in the
    home.

    A container often has only 64 MiB of `/dev/shm` (see `docker run --shm-size`). At the end the published versions are
    removed. The next use of a home removes those that a killed node left in memory.
    """
    root = home.root.stat()  # containers may share memory, and their homes may have one path
    folder = memory_disk / f"ftis-{os.getuid()}-{root.st_dev:x}-{root.st_ino:x}"
    in_memory = _claim(folder, num_bytes=num_versions * version_bytes)
    try:
        yield folder if in_memory else home.weights
    finally:
        for path in [folder] if in_memory else home.weights.glob(f"{PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)


def discard_published(folder: Path) -> None:
    """Remove all published versions, which are those of a process that has ended. Raises OSError."""
    remove_leftovers(folder, PREFIX)
    for path in folder.glob(f"{PREFIX}*"):
        shutil.rmtree(path)


def has_space(num_bytes: int, free_bytes: int) -> bool:
    """Return whether versions of `num_bytes` together fit in memory with `free_bytes` free."""
    return num_bytes <= FREE_SHARE * free_bytes


def free_in_memory() -> int:
    """Return the free bytes of the file system in memory; 0 if there is none."""
    try:
        return shutil.disk_usage(MEMORY_DISK).free
    except OSError:
        return 0


def _claim(folder: Path, *, num_bytes: int) -> bool:
    """Create an empty `folder`, readable by this user only. Returns False without shared memory or enough space."""
    try:
        if os.path.lexists(folder) and folder.lstat().st_uid == os.getuid():
            shutil.rmtree(folder)  # left by a node that was killed: this process holds the home's lock
        free_bytes = shutil.disk_usage(folder.parent).free
        if not has_space(num_bytes, free_bytes):
            log.debug("weights go through the home: %s has %d bytes free, %d are needed", folder, free_bytes, num_bytes)
            return False
        folder.mkdir(mode=0o700)  # raises if another user has created anything at this path
    except OSError as error:
        log.debug("weights go through the home: %s", error)
        return False
    return True


class SharedStorage(msgspec.Struct, frozen=True, array_like=True):
    """A part of an allocation, with the fields of torch's `_share_cuda_`; sizes and offsets in bytes.

    `ref_counter` names the file in which torch counts readers. `event` is the CUDA event that a reader awaits if it
    `must_wait`.
    """

    handle: bytes
    num_bytes: int
    offset_bytes: int
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    must_wait: bool


class SharedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A contiguous tensor: the number of its storage, and its first element there. `dtype` is safetensors' name."""

    name: str
    storage: int
    dtype: Literal["F32", "BF16", "F16"]
    shape: tuple[int, ...]
    offset: int


class SharedWeights(Message, frozen=True):
    """A model's tensors in the memory of the GPU `device_uuid`. `export_id` changes whenever the storages do."""

    export_id: str
    device_uuid: str
    storages: tuple[SharedStorage, ...]
    tensors: tuple[SharedTensor, ...]

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return type and shape of each tensor, as in a safetensors header."""
        return {each.name: {"dtype": each.dtype, "shape": list(each.shape)} for each in self.tensors}

    @property
    def num_bytes(self) -> int:
        return sum(prod(each.shape) * ELEMENT_BYTES[each.dtype] for each in self.tensors)


def check_handles(shared: SharedWeights) -> None:
    """Raise SharingError if a tensor has no storage, exceeds it, or is named twice."""
    if len({each.name for each in shared.tensors}) < len(shared.tensors):
        raise SharingError("the list of shared weights names a tensor twice")
    for each in shared.tensors:
        if each.storage >= len(shared.storages):
            raise SharingError(f"shared weights {each.name}: there is no storage {each.storage}")
        end = (each.offset + prod(each.shape)) * ELEMENT_BYTES[each.dtype]
        if end > shared.storages[each.storage].num_bytes:
            raise SharingError(f"shared weights {each.name} reach beyond their storage")


class PublishedWeights(Message, frozen=True):
    """A published version: `path` is the safetensors file (an adapter's has its own name), `num_bytes` its size.

    `transfer` "ipc" means the learner's own tensors, described in `shared`, without a file, and "pinned" a file with
    locked pages. `fell_back` is the reason why that is not the planned method.

    `step_done_at_s` is the end of the step that made the version, by the monotonic clock that all processes of a
    machine share. It is None if the version was published again later. `checksums` are those of its tensors by name, as
    `tensor_file.checksum` computes them; empty if unknown.
    """

    version: int
    path: str
    num_bytes: int
    step_done_at_s: float | None = None
    checksums: dict[str, int] = {}
    transfer: Transfer = "file"
    shared: SharedWeights | None = None
    fell_back: str = ""

    def how(self) -> str:
        """Return the transfer method, in words for the status."""
        return f"{TRANSFERS[self.transfer]} ({self.fell_back})" if self.fell_back else TRANSFERS[self.transfer]


class WeightProof(Message, frozen=True):
    """A proof of a version: fixed tokens and their log-probs. `logprobs[i]` is that of `probe_ids[i + 1]` given all
    before it.

    The temperature is 1 and the type float32. There is one log-prob fewer than there are ids.
    """

    version: int
    probe_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def rms_difference(self, logprobs: Sequence[float]) -> float:
        """Return the root mean square of the differences between these log-probs and the proof's, in nats.

        It is infinite if the two cannot be compared. A bound on the largest difference would be of no use: two correct
        passes in bfloat16 differ by up to 0.66 (`generation.weight_loader.PROOF_TOLERANCES`).
        """
        if len(logprobs) != len(self.logprobs):
            return math.inf
        squares = [(ours - theirs) ** 2 for ours, theirs in zip(self.logprobs, logprobs, strict=True)]
        return math.sqrt(sum(squares) / len(squares)) if all(map(math.isfinite, squares)) else math.inf


def publish_weights(
    folder: Path,
    version: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    adapter_config: Mapping[str, Any] | None = None,
    **how: Any,
) -> PublishedWeights:
    """Write a version into `folder`, in which the newest `VERSIONS_KEPT` remain. Name tied weights once.

    `how` and errors are as in `write_tensors`. With peft's `adapter_config` the tensors are an adapter's, and the files
    have peft's names. A folder has one writer and any number of readers.
    """
    from ftis_node.workers.tensor_file import write_tensors

    target = folder / f"{PREFIX}{version:08d}"
    file_name = WEIGHTS_FILE if adapter_config is None else ADAPTER_FILE
    with complete_folder(target, sync=False) as temporary:
        if adapter_config is not None:
            (temporary / ADAPTER_CONFIG_FILE).write_text(json.dumps(adapter_config, indent=1, sort_keys=True))
        elif (spent := take_oldest(folder, PREFIX, beyond=VERSIONS_KEPT - 1)) is not None:
            old = spent / WEIGHTS_FILE
            if old.exists() and old.stat().st_nlink == 1:  # it has no other hard link
                os.replace(old, temporary / WEIGHTS_FILE)
            shutil.rmtree(spent)
        checksums = write_tensors(temporary / file_name, tensors, **how)
    keep_newest(folder, PREFIX, VERSIONS_KEPT)
    path = target / file_name
    return PublishedWeights(version=version, path=str(path), num_bytes=path.stat().st_size, checksums=checksums)


def probe_token_ids(vocab_size: int) -> tuple[int, ...]:
    """Return fixed ids below `vocab_size` (the tokenizer's length), equal on every node, spread over the vocabulary."""
    return tuple((index + 1) * PROBE_MULTIPLIER % 2**32 % vocab_size for index in range(PROBE_LENGTH))


def probe_logprobs(model: Any, probe_ids: Sequence[int]) -> tuple[float, ...]:
    """Return log-probs of `probe_ids[1:]` under a transformers model: one forward pass, softmax in float32."""
    import torch

    ids = torch.tensor([list(probe_ids)], device=model.device)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, ids[0, 1:, None])
    return tuple(logprobs.squeeze(-1).tolist())


def prove(model: Any, *, version: int, vocab_size: int) -> WeightProof:
    """Return the proof of a version; `vocab_size` is the tokenizer's length."""
    probe_ids = probe_token_ids(vocab_size)
    return WeightProof(version=version, probe_ids=probe_ids, logprobs=probe_logprobs(model, probe_ids))


def find_difference(published: Mapping[str, int], held: Mapping[str, int]) -> str | None:
    """Return how the checksums of a version and of an engine's tensors differ, as words that follow "the worker".

    Tensors that only one side has are ignored.
    """
    known = published.keys() & held.keys()
    wrong = sorted(name for name in known if published[name] != held[name])
    if not wrong:
        return None
    return f"holds other values than were published in {len(wrong)} of {len(known)} tensors, such as {wrong[0]}"


def file_checksums(path: Path) -> dict[str, int]:
    """Return the checksums of a file's tensors by name. Raises ModelError if the file is missing or damaged."""
    from ftis_node.workers.tensor_file import checksums_of, read_tensors

    header = read_header(path)
    spans = [entry["data_offsets"] for entry in header.tensors.values()]
    if sum(end - start for start, end in spans) > header.num_bytes:  # each byte would be read several times
        raise ModelError(f"weight file {path} is damaged: its tensors overlap")
    return checksums_of(read_tensors(path))
