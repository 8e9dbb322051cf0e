"""Checkpoints of the learner: written atomically, and readable without executing code.

    checkpoints/step-00000012/
        weights.safetensors     the trained tensors: the whole model in float32, or the adapter alone
        optimizer.safetensors   Adam's moments by parameter name
        state.json              the rest: the step, the position in the buffer, and the owner
        checksums.json          checksums of each of these

safetensors validates only its header and its length: a flipped bit in a tensor would load without an error. So
`checksums.json` has the CRC-32 of each file. It detects disk errors, not forgery. CRC-32 takes 0.6 s of a core for a
gigabyte, BLAKE2b 2 s; a model of 3B parameters has 36 GB of weights and moments.

A disk error, or a removed file, can damage a complete folder. The learner renames it to `damaged-step-...` and uses the
next older one. If none can be read, it refuses to start rather than begin again at the starting model. A step draws no
random numbers, so a checkpoint has no random state.
"""

from __future__ import annotations

import platform
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from msgspec.structs import asdict
from torch import Tensor
from torch.nn import Parameter

from ftis_node import __version__
from ftis_node.errors import ConfigError, FileError, ModelError
from ftis_node.files import read_file
from ftis_node.learner.distributed.ranks import Ranks
from ftis_node.learner.distributed.sharded_tensors import copy_from_rank_0, from_rank_0, is_sharded, whole
from ftis_node.learner.messages import CheckpointSkipped, LearnerBoot, StepReport, TrainGroup
from ftis_node.learner.model.lora import ADAPTED_LAYERS
from ftis_node.learner.model.policy import Policy
from ftis_node.learner.step.optimizer import moments_of, restore_moments
from ftis_node.models import model_fingerprint
from ftis_node.models.fingerprint import other_model
from ftis_node.workers.durable import (
    CHECKPOINT_PREFIX,
    DAMAGED_PREFIX,
    STATE_FILE,
    complete_folder,
    is_complete,
    keep_newest,
    remove_leftovers,
)
from ftis_node.workers.tensor_file import read_tensors, write_tensors

WEIGHTS_FILE, OPTIMIZER_FILE = "weights.safetensors", "optimizer.safetensors"
CHECKSUMS_FILE = "checksums.json"
CHUNK_BYTES = 16 << 20
FORMAT = 1

Decoded = TypeVar("Decoded")


class CheckpointOwner(msgspec.Struct, frozen=True):
    """The run and model of a checkpoint. `model` is for display; `trains`: "full", or the adapter."""

    run_id: str
    model: str
    model_fingerprint: str
    trains: str


class TrainingProgress(msgspec.Struct):
    """A learner's progress: the last step done, the last one that changed the weights, and the report of the first.

    `last_groups` is the position in the buffer: the ids of the groups that `step` took. The starting model sampled
    `start_groups`, on which the drift from it is measured.
    """

    step: int = 0
    policy_version: int = 0
    last_report: StepReport | None = None
    last_groups: tuple[str, ...] = ()
    start_groups: tuple[TrainGroup, ...] = ()


class CheckpointState(TrainingProgress, kw_only=True):
    """`state.json`: the progress, and whose it is."""

    format: int
    owner: CheckpointOwner
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint: the state, and tensors by parameter name (`moments` as `<name>.<moment>`)."""

    state: CheckpointState
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]


def checksum_of(path: Path) -> str:
    """Return the file's checksum in hex. Raises OSError."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"


def write_checksums(folder: Path, names: Iterable[str]) -> None:
    """Write the checksums of these files of `folder` beside them. Raises OSError."""
    sums = {name: checksum_of(folder / name) for name in names}
    (folder / CHECKSUMS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(sums)))


def _decoded(path: Path, kind: type[Decoded]) -> Decoded:
    """Return the JSON in a file as `kind`. Raises ModelError if it cannot be read."""
    try:
        return msgspec.json.decode(read_file(path), type=kind)
    except (OSError, FileError, msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(f"{path.name} cannot be read: {error}") from error


def check_file(folder: Path, name: str, sums: Mapping[str, str]) -> None:
    """Raise ModelError if the file is missing or its checksum differs."""
    try:
        found = checksum_of(folder / name)
    except OSError as error:
        raise ModelError(f"{name} cannot be read: {error}") from error
    if found != sums.get(name):
        raise ModelError(f"{name} changed on disk: its checksum differs from the one in {CHECKSUMS_FILE}")


def owner_of(policy: Policy, boot: LearnerBoot) -> CheckpointOwner:
    """Return the owner that a checkpoint must have for this learner to resume from it."""
    lora = boot.lora
    return CheckpointOwner(
        run_id=boot.run_id,
        model=policy.source.name,
        model_fingerprint=model_fingerprint(policy.source),
        trains="full" if lora is None else f"LoRA of rank {lora.rank}, alpha {lora.alpha}, on {ADAPTED_LAYERS}",
    )


def state_of(owner: CheckpointOwner, progress: TrainingProgress) -> CheckpointState:
    versions = {"ftis-node": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    return CheckpointState(format=FORMAT, owner=owner, versions=versions, **asdict(progress))


def write_checkpoint(
    folder: Path, state: CheckpointState, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], *, keep: int
) -> Path:
    """Write the gathered tensors one by one, without a copy in memory. Raises OSError if the disk refuses."""
    target = folder / f"{CHECKPOINT_PREFIX}{state.step:08d}"
    with complete_folder(target) as temporary:
        write_tensors(temporary / WEIGHTS_FILE, weights)
        write_tensors(temporary / OPTIMIZER_FILE, moments)
        (temporary / STATE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))
        write_checksums(temporary, (WEIGHTS_FILE, OPTIMIZER_FILE, STATE_FILE))
    keep_newest(folder, CHECKPOINT_PREFIX, keep)
    return target


@torch.no_grad()
def gather(
    trainable: Mapping[str, Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    keep: bool = True,
    on_gathered: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return full weights and the optimizer's moments, by the names of the files. All ranks take part.

    Tensors that are not sharded over ranks are not copied: they are valid until the next update. A rank that does not
    write need not `keep` them. `on_gathered` is called after each sharded tensor.
    """
    weights: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    parts = {name: parameter.detach() for name, parameter in trainable.items()}
    for into, found in ((weights, parts), (moments, moments_of(optimizer, trainable))):
        for key, part in found.items():
            value = whole(part)
            if is_sharded(part):
                on_gathered()
            if keep:
                into[key] = value.cpu() if is_sharded(part) else value
    return weights, moments


def read_checkpoint(path: Path, *, owner: CheckpointOwner) -> Checkpoint:
    """Return the checkpoint in `path`. Raises ModelError if it is damaged, ConfigError if it has another owner."""
    sums = _decoded(path / CHECKSUMS_FILE, dict[str, str])
    check_file(path, STATE_FILE, sums)
    state = _decoded(path / STATE_FILE, CheckpointState)
    _check_owner(path, state.owner, owner)
    for name in (WEIGHTS_FILE, OPTIMIZER_FILE):
        check_file(path, name, sums)
    return Checkpoint(state, read_tensors(path / WEIGHTS_FILE), read_tensors(path / OPTIMIZER_FILE))


def newest_usable(folder: Path, *, owner: CheckpointOwner) -> tuple[Checkpoint | None, list[CheckpointSkipped]]:
    """Return the newest readable checkpoint (None in a home without any), and the newer ones that cannot be read.

    Raises ModelError if none of the existing ones can be read, and ConfigError if they have another owner.
    """
    complete = [path for path in folder.glob(f"{CHECKPOINT_PREFIX}*") if is_complete(path)]
    damaged: list[CheckpointSkipped] = []
    for path in sorted(complete, reverse=True):
        try:
            return read_checkpoint(path, owner=owner), damaged
        except ModelError as error:
            damaged.append(CheckpointSkipped(name=path.name, reason=str(error)))
    if damaged:
        newest = damaged[0]
        raise ModelError(
            f"none of the {len(damaged)} checkpoints in {folder} can be read ({newest.name}: {newest.reason}): "
            "move them away to begin again"
        )
    return None, []


def tidy(folder: Path, damaged: Sequence[CheckpointSkipped]) -> None:
    """Rename `damaged` ones and remove partial writes of a crash. Only the home's one writer calls it, at its start."""
    remove_leftovers(folder, CHECKPOINT_PREFIX)
    for skipped in damaged:
        aside = folder / f"{DAMAGED_PREFIX}{skipped.name}"
        shutil.rmtree(aside, ignore_errors=True)
        (folder / skipped.name).rename(aside)


def check_moments(checkpoint: Checkpoint, trainable: Mapping[str, Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError if the checkpoint's moments have another form than the optimizer's."""
    ours, theirs = moments_of(optimizer, trainable), checkpoint.moments
    if ours.keys() != theirs.keys() or any(theirs[key].dtype != value.dtype for key, value in ours.items()):
        raise ConfigError(
            "the checkpoint's optimizer states have another form: set learner.optimizer_states to '8bit' if they were, "
            "else to 'float32', as before"
        )


def restore(
    checkpoint: Checkpoint | None, trainable: Mapping[str, Parameter], optimizer: torch.optim.Optimizer, ranks: Ranks
) -> CheckpointState | None:
    """Restore weights and moments. All ranks take part; only rank 0 has the checkpoint.

    Returns the state on every rank; None, and nothing is restored, if rank 0 has no checkpoint.
    """
    message = b"" if checkpoint is None else msgspec.msgpack.encode(checkpoint.state)
    if not (message := ranks.broadcast(message)):
        return None
    weights, moments = ({}, {}) if checkpoint is None else (checkpoint.weights, checkpoint.moments)
    copy_from_rank_0(trainable, weights, ranks)
    own = moments_of(optimizer, trainable)
    restore_moments(
        optimizer, trainable, ((key, from_rank_0(moments, key, value, ranks)) for key, value in own.items())
    )
    return msgspec.msgpack.decode(message, type=CheckpointState)


def _check_owner(path: Path, theirs: CheckpointOwner, ours: CheckpointOwner) -> None:
    if theirs.run_id != ours.run_id:
        raise ConfigError(f"this home belongs to run {theirs.run_id}, not {ours.run_id}: choose another --home")
    if theirs.model_fingerprint != ours.model_fingerprint:  # the name proves nothing: users rename and copy folders
        raise ConfigError(other_model("this home", theirs.model, ours.model))
    if theirs.trains != ours.trains:
        raise ConfigError(f"{path} was trained as {theirs.trains}, not {ours.trains}: choose another --home")
