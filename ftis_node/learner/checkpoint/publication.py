"""The newest published weights of one learner, and their proof."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.errors import MachineError
from ftis_node.learner.checkpoint.checkpoint_manager import FREE_SPACE
from ftis_node.learner.checkpoint.publish_weights import Publisher, discard_published, gathering_of, proof_of
from ftis_node.learner.distributed.rank_commands import GatherCommand, ProveCommand
from ftis_node.workers.weights.store import WeightStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftis_node.learner.distributed.ranks import Ranks
    from ftis_node.learner.messages import LearnerBoot
    from ftis_node.learner.model.policy import Policy
    from ftis_node.workers.weights.store import PublishedWeights, WeightProof


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
