"""Publication of new weights for the generator, in the compute dtype, with their proof.

A version is the whole model (with an adapter merged into it), or the adapter alone if the engine serves adapters.

Version n is the policy after step n. Version 0 is the starting model and is not written: the generator has it.
"""

from __future__ import annotations

import logging
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from ftis_node.errors import MachineError, SharingError
from ftis_node.learner.checkpoint.checkpoint_manager import FREE_SPACE
from ftis_node.learner.distributed.rank_commands import GatherCommand, ProveCommand
from ftis_node.learner.distributed.sharded_tensors import TensorGatherer, is_sharded
from ftis_node.learner.model.policy import adapter_alone, adapter_merger, own_tensors
from ftis_node.workers.durable import remove_leftovers
from ftis_node.workers.shared_tensors import Exporter
from ftis_node.workers.tensor_file import LockedFiles, checksum
from ftis_node.workers.weight_store import PREFIX, PublishedWeights, WeightProof, WeightStore, prove

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftis_node.learner.distributed.ranks import Ranks
    from ftis_node.learner.messages import LearnerBoot
    from ftis_node.learner.model.policy import Policy
    from ftis_node.workers.shared_weights import Way

log = logging.getLogger(__name__)
Form = Literal["model", "adapter"]


class WeightPublication:
    """The publisher of one policy's versions. All ranks take part; rank 0 has `weights` and `proof`.

    `weights` is None while the policy is the starting model.
    """

    def __init__(self, boot: LearnerBoot, policy: Policy, ranks: Ranks) -> None:
        self._policy = policy
        self._ranks = ranks
        self._folder = Path(boot.weights_dir)
        self._form = boot.publish_as
        self._publisher = Publisher(WeightStore(self._folder), way=boot.hand_over, form=boot.publish_as)
        self.weights: PublishedWeights | None = None
        self.proof: WeightProof

    def begin(self, version: int) -> None:
        """Publish the version from which the learner resumes, and remove all versions of a former process."""
        discard_published(self._folder)
        if version:  # the generator has the starting model
            self.publish(version)
        self.prove(version)

    def publish(self, version: int) -> None:
        """Share or write the weights of `version`. Raises OSError if the disk refuses."""
        with self._ranks.lead(GatherCommand("publication")):
            self.weights = self._publisher.publish(self._policy, version=version)

    def prove(self, version: int) -> None:
        """Compute the proof of `version`."""
        with self._ranks.lead(ProveCommand()):
            self.proof = proof_of(self._policy, version=version)

    def write(self, version: int, *, refused: str = "") -> PublishedWeights | None:
        """Write the present weights to a file; return None for the starting model. If `refused` gives a reason why no
        engine can map shared weights, all later versions go through files too. Raises MachineError if the disk refuses.
        """
        if refused:
            self._publisher.give_up_sharing(refused)
        if version == 0:
            return None
        with self._ranks.lead(GatherCommand("publication")), self.disk_errors(version):
            written = self._publisher.write(self._policy, version=version)
        if refused:
            self.weights = written
        return written

    def take_part(self) -> None:
        """Contribute the shards of a rank above 0 when rank 0 publishes."""
        gathering_of(self._policy, form=self._form).rest()

    def take_part_in_proof(self, version: int) -> None:
        """Run the passes of a rank above 0 when rank 0 computes a proof."""
        proof_of(self._policy, version=version)

    def close(self) -> None:
        """Unlock all pages."""
        self._publisher.close()

    @contextmanager
    def disk_errors(self, version: int) -> Iterator[None]:
        """Convert an OSError inside to a MachineError."""
        try:
            yield
        except OSError as error:
            raise MachineError(f"weights {version} cannot be written: {error}; {FREE_SPACE}") from error


class Publisher:
    """The publisher of one learner's versions. It uses the planned transport until that fails; `way` is the current
    one.

    With "ipc" the engine reads the policy's own tensors without a copy, so no update may run before the engine is done.
    If a version cannot be shared, all later versions of this process go through files.
    """

    def __init__(self, store: WeightStore, *, way: Way = "file", form: Form = "model") -> None:
        self.way: Way = way
        self.fell_back = ""
        self._store = store
        self._form: Form = form
        self._exporter = Exporter()
        self._locked = None if way == "file" else LockedFiles()

    def publish(self, policy: Policy, *, version: int) -> PublishedWeights:
        """Share or write the weights of `version`. Raises OSError if the disk refuses."""
        if self.way == "ipc":
            try:
                return self._share(policy, version)
            except SharingError as error:
                self.give_up_sharing(str(error))
        return self.write(policy, version=version)

    def give_up_sharing(self, reason: str) -> None:
        """Switch to files for all later versions; `reason` is the cause."""
        if self.way == "ipc":
            log.warning("weights are sent in files from now on: %s", reason)
            self.way, self.fell_back = "pinned", reason

    def write(self, policy: Policy, *, version: int) -> PublishedWeights:
        """Write the weights of `version` to a file, even if `way` is "ipc". Raises OSError if the disk refuses."""
        with gathering_of(policy, form=self._form) as gathering:
            dtype = policy.compute_dtype
            if self._form == "adapter":
                _, config = adapter_alone(policy)
                return self._store.publish_adapter(
                    version, gathering.tensors, config, dtype=dtype, change=gathering.take
                )
            weights = self._store.publish(
                version, gathering.tensors, dtype=dtype, change=gathering.take, locked=self._locked
            )
        if self._locked is None:
            return weights
        why_not = self._locked.why_not
        return replace(weights, way="file" if why_not else "pinned", fell_back=self.fell_back or why_not)

    def close(self) -> None:
        """Unlock all pages."""
        if self._locked is not None:
            self._locked.close()

    def _share(self, policy: Policy, version: int) -> PublishedWeights:
        tensors = own_tensors(policy)
        if self._form != "model" or policy.adapted is not None or any(map(is_sharded, tensors.values())):
            raise SharingError("a merged adapter and weights on several GPUs cannot be shared in memory")
        if any(tensor.dtype != policy.compute_dtype for tensor in tensors.values()):
            raise SharingError(f"not all tensors of the model are {policy.compute_dtype}")
        checksums = {name: checksum(tensor) for name, tensor in tensors.items()}
        shared = self._exporter.share(tensors)
        return PublishedWeights(
            version=version, path="", num_bytes=shared.num_bytes, checksums=checksums, way="ipc", shared=shared
        )


def gathering_of(policy: Policy, *, form: Form = "model") -> TensorGatherer:
    """Return the gatherer of a publication's tensors, in the compute dtype; each is gathered only when it is taken."""
    if form == "adapter":
        tensors, _ = adapter_alone(policy)
        return TensorGatherer(tensors, dtype=policy.compute_dtype)
    return TensorGatherer(own_tensors(policy), dtype=policy.compute_dtype, change=adapter_merger(policy))


def proof_of(policy: Policy, *, version: int) -> WeightProof:
    """Return the proof of `version`, computed by the learner's own forward pass with the adapter unmerged."""
    return policy.compute(lambda model: prove(model, version=version, vocab_size=policy.tokenizer.vocab_size))


def discard_published(folder: Path) -> None:
    """Remove all versions that a former process published. The learner calls it at its start.

    The newest file may not have reached the disk. Versions above the checkpoint's were published before their
    checkpoints, so a repeated step publishes other weights under the same number.
    """
    remove_leftovers(folder, PREFIX)
    for path in folder.glob(f"{PREFIX}*"):
        shutil.rmtree(path)
