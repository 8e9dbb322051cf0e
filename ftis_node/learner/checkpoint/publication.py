"""Publication of a policy's weights for the generator: shared in memory or written, each version with a proof.

Published weights are in the compute dtype. A version is the whole model (with an adapter merged into it), or the
adapter alone if the engine serves adapters. Version n is the policy after step n. Version 0 is the starting model and
is not written: the generator has it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from msgspec.structs import replace
from torch import Tensor

from ftis_node.errors import SharingError
from ftis_node.files import write_error
from ftis_node.learner.checkpoint.checkpoint_manager import FREE_SPACE
from ftis_node.learner.distributed.ranks import ALONE, Ranks, RankTask
from ftis_node.learner.distributed.sharded_tensors import TensorGatherer, is_sharded
from ftis_node.learner.model.lora import adapter_alone, adapter_merger
from ftis_node.learner.model.policy import Policy
from ftis_node.models.loading import own_tensors
from ftis_node.workers.hub_names import hub_parts, hub_tensors
from ftis_node.workers.shared_tensors import Exporter
from ftis_node.workers.tensor_file import LockedFiles, checksums_of
from ftis_node.workers.weight_store import (
    PublishedWeights,
    Transfer,
    WeightProof,
    discard_published,
    prove,
    publish_weights,
)

log = logging.getLogger(__name__)
Form = Literal["model", "adapter"]
BLOCK_BYTES = 8192


class ChecksummedBuffer:
    """Tensors in one buffer, of which all checksums take three operations and one transfer.

        buffer   a a a . | b . . . | c c . .        blocks of `BLOCK_BYTES`; each tensor begins one, zeros fill its last

    One by one, 290 tensors take some 1,500 operations after each step, which the host launches while the engine waits.
    The values of the tensors may change, but they must not move.
    """

    @torch.no_grad()
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Move `tensors`, which are on one device and share no memory, into one buffer."""
        owners: list[int] = []
        self._numbers: dict[tuple[int, int], int] = {}
        moved = list(tensors)
        for number, tensor in enumerate(moved):
            self._numbers[len(owners) * BLOCK_BYTES, tensor.nbytes] = number
            owners += [number] * -(-tensor.nbytes // BLOCK_BYTES)
        device = moved[0].device
        self._owners = torch.tensor(owners, device=device)
        self._buffer = torch.zeros(len(owners) * BLOCK_BYTES, dtype=torch.uint8, device=device)
        for (start, num_bytes), tensor in zip(self._numbers, moved, strict=True):
            part = self._buffer[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)
            tensor.data = part.copy_(tensor)

    def checksums(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Return what `checksums_of(tensors)` returns. Tensors outside of the buffer are summed one by one."""
        begin = self._buffer.data_ptr()
        places = {name: (tensor.data_ptr() - begin, tensor.nbytes) for name, tensor in tensors.items()}
        others = {name: tensor for name, tensor in tensors.items() if places[name] not in self._numbers}
        of_blocks = self._buffer.view(torch.int64).view(len(self._owners), -1).sum(dim=1)
        sums = of_blocks.new_zeros(len(self._numbers)).index_add(0, self._owners, of_blocks).tolist()
        found = {name: sums[self._numbers[place]] % 2**64 for name, place in places.items() if name not in others}
        return found | checksums_of(others)


class WeightPublication:
    """The published versions of one policy. `transfer` is the planned transfer method until that fails.

    With "ipc" the engine reads the policy's own tensors without a copy, so no update may run before the engine is done.
    Its constructor moves them into one buffer then. Rank 0 has `weights`, None for the starting model, and `proof`.
    """

    def __init__(
        self, policy: Policy, folder: Path, *, transfer: Transfer = "file", form: Form = "model", ranks: Ranks = ALONE
    ) -> None:
        self.transfer: Transfer = transfer
        self.fell_back = ""
        self.weights: PublishedWeights | None = None
        self.proof: WeightProof
        self._policy = policy
        self._folder = folder
        self._form: Form = form
        self._ranks = ranks
        self._exporter = Exporter()
        self._locked = None if transfer == "file" else LockedFiles()
        is_alone = policy.adapted is None and not any(map(is_sharded, policy.trainable().values()))
        self._is_shareable = transfer == "ipc" and is_alone  # neither a merged adapter, nor on several GPUs
        self._buffer = _in_one_buffer(policy) if self._is_shareable else None

    def begin(self, version: int) -> None:
        """Publish the version from which the learner resumes, and remove all versions of a former process.

        Those above the checkpoint's version are published again, with other weights.
        """
        discard_published(self._folder)
        if version:  # the generator has the starting model
            self.publish(version)
        self.prove(version)

    def publish(self, version: int) -> PublishedWeights:
        """Share or write the weights of `version`. Raises MachineError if the disk refuses."""
        with self._ranks.lead(RankTask("publish")), self._disk_errors(version):
            try:
                self.weights = self._share(version) if self.transfer == "ipc" else self._write(version)
            except SharingError as error:
                self._give_up_sharing(str(error))
                self.weights = self._write(version)
        return self.weights

    def prove(self, version: int) -> None:
        with self._ranks.lead(RankTask("prove")):
            self.proof = proof_of(self._policy, version=version)

    def write(self, version: int, *, refused: str = "") -> PublishedWeights | None:
        """Write the weights as `WriteWeights` says. Raises MachineError if the disk refuses."""
        if refused:
            self._give_up_sharing(refused)
        if version == 0:
            return None
        with self._ranks.lead(RankTask("publish")), self._disk_errors(version):
            written = self._write(version)
        if refused:
            self.weights = written
        return written

    def take_part(self) -> None:
        """Contribute the shards of a rank above 0 when rank 0 publishes."""
        gathering_of(self._policy, form=self._form).rest()

    def close(self) -> None:
        """Unlock all pages."""
        if self._locked is not None:
            self._locked.close()

    @contextmanager
    def _disk_errors(self, version: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_error(f"weights {version} cannot be written: {error}; {FREE_SPACE}", error) from error

    def _give_up_sharing(self, reason: str) -> None:
        if self.transfer == "ipc":
            log.warning("weights are sent in files from now on: %s", reason)
            self.transfer, self.fell_back = "pinned", reason

    def _write(self, version: int) -> PublishedWeights:
        is_adapter = self._form == "adapter"
        locked = None if is_adapter else self._locked
        with gathering_of(self._policy, form=self._form) as gathering:
            weights = publish_weights(
                self._folder,
                version,
                gathering.tensors,
                adapter_config=_adapter_of(self._policy)[1] if is_adapter else None,
                dtype=self._policy.compute_dtype,
                change=gathering.take,
                locked=locked,
            )
        if locked is None:
            return weights
        return replace(
            weights, transfer="file" if locked.why_not else "pinned", fell_back=self.fell_back or locked.why_not
        )

    def _share(self, version: int) -> PublishedWeights:
        policy, tensors = self._policy, own_tensors(self._policy.causal_lm)
        if not self._is_shareable:
            raise SharingError("a merged adapter and weights on several GPUs cannot be shared in memory")
        if any(tensor.dtype != policy.compute_dtype for tensor in tensors.values()):
            raise SharingError(f"not all tensors of the model are {policy.compute_dtype}")
        named = hub_tensors(policy.causal_lm, tensors)
        checksums = self._buffer.checksums(named) if self._buffer else checksums_of(named)
        shared = self._exporter.share(named)
        return PublishedWeights(
            version=version, path="", num_bytes=shared.num_bytes, checksums=checksums, transfer="ipc", shared=shared
        )


def _in_one_buffer(policy: Policy) -> ChecksummedBuffer | None:
    """Move the trained weights into one buffer; None if the GPU has no space for both at this moment."""
    try:
        return ChecksummedBuffer(policy.trainable().values())
    except torch.OutOfMemoryError:
        log.info("published weights are summed one by one: the GPU has no space to move them into one buffer")
        return None


def gathering_of(policy: Policy, *, form: Form = "model") -> TensorGatherer:
    """Return the gatherer of a publication's tensors, in the compute dtype; each is gathered only when it is taken."""
    if form == "adapter":
        tensors, _ = _adapter_of(policy)
        return TensorGatherer(tensors, dtype=policy.compute_dtype)
    return TensorGatherer(
        own_tensors(policy.causal_lm),
        dtype=policy.compute_dtype,
        change=adapter_merger(policy.causal_lm),
        split=partial(hub_parts, policy.causal_lm),
    )


def _adapter_of(policy: Policy) -> tuple[dict[str, Tensor], dict[str, Any]]:
    assert policy.adapted is not None, "a policy that is trained in full has no adapter"
    return adapter_alone(policy.adapted, base_name=policy.source.base.name)


def proof_of(policy: Policy, *, version: int) -> WeightProof:
    """Return the proof of `version`, computed by the learner's own forward pass with the adapter unmerged."""
    return policy.compute(lambda model: prove(model, version=version, vocab_size=policy.tokenizer.vocab_size))
