"""The learner: a policy, its optimizer and its home on disk, advanced one step at a time.

    groups -> batch -> micro-batches -> step          -> published weights -> checkpoint
              batch.py  packing.py      train_step.py  publish.py           checkpoint.py

If several processes hold the model together, each has a Learner. The daemon talks to that of rank 0, and the others do
their part of each command (`take_part`, `ranks.py`).

Steps are numbered and each is done once: a repeated request for the newest one returns the stored report. Weights are
published before the checkpoint is written, so that the generator loads them during the write. Not every step has a
checkpoint (`saving.py`). A crash returns step and version to the newest checkpoint. The next process repeats the later
steps from the same groups and publishes their versions; the generator returns to them. Groups that a lost version
sampled carry their own log-probs and stay valid. A step that left the weights unchanged needs no checkpoint: after a
crash it is repeated.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from ftis_node.errors import ConfigError, FtisError, MachineError
from ftis_node.learner.checkpoint import checkpoint as checkpoints
from ftis_node.learner.checkpoint.export import adapter_state, export_policy
from ftis_node.learner.checkpoint.publish import Publisher, discard_published, gathering_of, proof_of
from ftis_node.learner.checkpoint.resume import find_checkpoint
from ftis_node.learner.checkpoint.saving import CheckpointSaver
from ftis_node.learner.data.batch import batch_of, make_batch, make_micro_batches
from ftis_node.learner.data.groups import unpack_train_groups
from ftis_node.learner.data.packing import make_packed_micro_batches
from ftis_node.learner.distributed.rank_commands import (
    CheckCommand,
    EndCommand,
    GatherCommand,
    ProveCommand,
    RankCommand,
)
from ftis_node.learner.distributed.ranks import ALONE, Ranks, cut_evenly
from ftis_node.learner.messages import AuditRequest, LearnerState, StepReport, TrainGroup, TrainReply, TrainRequest
from ftis_node.learner.model.kernels import check_kernels, choose_kernels
from ftis_node.learner.model.policy import recompute_activations
from ftis_node.learner.model.policy_loading import open_policy
from ftis_node.learner.model.reference import load_reference
from ftis_node.learner.report import report_of
from ftis_node.learner.step.agreement import AgreementMeter
from ftis_node.learner.step.check_group import CheckGroup
from ftis_node.learner.step.mismatch import Mismatch, measure_mismatch
from ftis_node.learner.step.objective import make_objective
from ftis_node.learner.step.oom_retry import OomRetry, grow_segments_after_weights
from ftis_node.learner.step.optimizer import check_optimizer_states, make_masters, make_optimizer
from ftis_node.learner.step.train_step import compute_logprobs, take_step
from ftis_node.workers.weights.store import WeightStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from ftis_node.learner.data.batch import MicroBatch, TrainBatch
    from ftis_node.learner.data.groups import UnpackedGroup
    from ftis_node.learner.distributed.ranks import StepCallback
    from ftis_node.learner.messages import CheckpointSkipped, LearnerBoot
    from ftis_node.learner.step.train_step import StepOutcome
    from ftis_node.workers.weights.store import PublishedWeights, WeightProof

FREE_SPACE = "free disk space there and start again; the node resumes at the newest checkpoint"


class Learner:
    """One policy in training. Not thread-safe."""

    def __init__(
        self,
        boot: LearnerBoot,
        *,
        ranks: Ranks = ALONE,
        on_skipped: Callable[[CheckpointSkipped], None] = lambda skipped: None,
    ):
        """Load the model and resume from the newest checkpoint of this home; all `ranks` do so at the same time.

        Raises ConfigError, ModelError, MachineError or NetworkError. `on_skipped` is called for damaged checkpoints.
        """
        if boot.num_threads is not None:
            torch.set_num_threads(boot.num_threads)
        self._boot = boot
        self._ranks = ranks
        self._objective = make_objective(
            boot.method,
            boot.method_params,
            boot.advantage_scale,
            kl_to_start=boot.kl_to_start,
            max_logprob_gap_nats=boot.max_logprob_gap_nats,
        )
        check_optimizer_states(boot)
        if boot.measure_agreement and ranks.size > 1:
            raise ConfigError('method.peer_weights = "agreement" needs a learner of one process: leave one of them out')
        check_kernels(boot)
        self.policy = choose_kernels(open_policy(boot, ranks), boot)
        grow_segments_after_weights(boot)
        self._agreement = AgreementMeter(self.policy.causal_lm) if boot.measure_agreement else None
        self._reference = load_reference(self.policy, boot, ranks) if boot.kl_to_start else None
        self._masters = make_masters(self.policy.trainable(), boot)
        self._trainable = self._masters.tensors
        self._optimizer = make_optimizer(self._masters, boot)
        recompute = partial(recompute_activations, self.policy.causal_lm) if boot.may_recompute else lambda: False
        self._oom_retry = OomRetry(boot.micro_batch_tokens, recompute=recompute)
        self._checkpoints_dir = Path(boot.checkpoints_dir)
        store = WeightStore(Path(boot.weights_dir))
        self._publisher = Publisher(store, way=boot.hand_over, form=boot.publish_as)
        self._owner = checkpoints.owner_of(self.policy, boot)
        self._step = self._policy_version = 0
        self.saver = CheckpointSaver(every_steps=boot.checkpoint_every_steps)
        self._last_report: StepReport | None = None
        self._last_groups: tuple[str, ...] = ()
        self._check_group = CheckGroup()
        self._resume(on_skipped)
        self._weights: PublishedWeights | None = None
        self._proof: WeightProof
        if ranks.rank == 0:  # the others follow its orders from here on
            self._publish(anew=True)
            self._prove()

    def take_part(self, command: RankCommand) -> None:
        """Do this rank's part of what rank 0 has all ranks do."""
        match command:
            case TrainRequest(step=step, groups=groups):
                self._take_step(make_batch(groups), step, between=lambda: None)
            case CheckCommand():
                self._check(between=lambda: None)
            case AuditRequest(group=group):
                self._audit(group, between=lambda: None)
            case ProveCommand():
                proof_of(self.policy, version=self._policy_version)
            case GatherCommand(what="publication"):
                gathering_of(self.policy, form=self._boot.publish_as).rest()
            case GatherCommand(what="checkpoint"):
                checkpoints.gather(self._trainable, self._optimizer, keep=False)
            case GatherCommand(what="merged model"):
                gathering_of(self.policy).rest()
            case GatherCommand(what="adapter"):
                adapter_state(self.policy)

    def close(self) -> None:
        """End the other ranks, and the thread that writes checkpoints."""
        self.saver.close()
        self._publisher.close()
        with self._ranks.lead(EndCommand()):
            self._ranks.close()

    def state(self) -> LearnerState:
        """Return the learner's state."""
        return LearnerState(
            step=self._step,
            policy_version=self._policy_version,
            parameters=self.policy.num_parameters,
            trainable_parameters=self.policy.num_trainable_parameters,
            proof=self._proof,
            weights=self._weights,
            last_report=self._last_report,
            last_groups=self._last_groups,
            layout=self.policy.layout,
            kernels=self.policy.kernels,
        )

    def train(
        self,
        groups: Sequence[TrainGroup],
        *,
        step: int,
        between: StepCallback = lambda: None,
        on_published: Callable[[PublishedWeights | WeightProof], None] = lambda published: None,
    ) -> TrainReply:
        """Do step `step`, or return its report if it is the newest one done.

        `between` is called between micro-batches; if it raises, the step was not done. `on_published` is given new
        weights as soon as a generator can take them, and then their proof, before the checkpoint is written. Raises
        FtisError for any other step number. Raises MachineError if memory or disk do not suffice; the same step may
        then be requested again.
        """
        if step == self._step and self._last_report is not None:
            self._settle(on_published)
            report = msgspec.structs.replace(self._last_report, repeated=True)
            return TrainReply(report=report, weights=self._weights, proof=self._proof, saved_step=self.saver.saved_step)
        if step != self._step + 1:
            raise FtisError(f"the learner is at step {self._step} and cannot do step {step}")
        readable, unpacked, unreadable = unpack_train_groups(groups)
        report = self._do_step(readable, unpacked, step, between)
        report = msgspec.structs.replace(report, unreadable=unreadable)
        self._step, self._policy_version, self._last_report = step, report.policy_version, report
        self._last_groups = tuple(group.group_id for group in groups)
        if report.num_updates == 0:
            return TrainReply(report=report, saved_step=self.saver.saved_step)
        self._settle(on_published)
        return TrainReply(report=report, weights=self._weights, proof=self._proof, saved_step=self.saver.saved_step)

    def give_memory_back(self, *, asked: bool = False) -> None:
        """Free blocks that torch keeps, if a generator needs them between steps or has `asked` for them."""
        if asked or self._boot.takes_turns:
            torch.cuda.empty_cache()

    def write_weights(self, *, refused: str = "") -> PublishedWeights | None:
        """Write the present weights to a file; None for the model as it came. `refused`: and all later ones, because no
        engine can map them. Raises MachineError if the disk refuses."""
        if refused:
            self._publisher.give_up_sharing(refused)
        if self._policy_version == 0:
            return None
        with self._ranks.lead(GatherCommand("publication")), self._no_room_for_weights():
            written = self._publisher.write(self.policy, version=self._policy_version)
        if refused:
            self._weights = written
        return written

    def offer_check(self, group: TrainGroup) -> None:
        """Have the mismatch measured on `group` by the next `check`, or by the step in progress. From any thread."""
        self._check_group.offer(group)

    def check(self, *, between: StepCallback = lambda: None) -> None:
        """Measure the group on offer under the present weights, for the next report; drop it where it is of others."""
        with self._ranks.lead(CheckCommand()):
            self._check(self._ranks.between(between))

    def audit(self, group: TrainGroup, *, version: int, between: StepCallback = lambda: None) -> Mismatch | None:
        """Return how far a peer's log-probs are from the learner's; None if its weights are not `version`."""
        if version != self._policy_version:
            return None
        with self._ranks.lead(AuditRequest(group=group)):
            return self._audit(group, self._ranks.between(between))

    def export(self, out: Path, *, merge: bool) -> None:
        """Write the policy to the folder `out`, as `export_policy` does."""
        with self._ranks.lead(GatherCommand("merged model" if merge or not self._boot.lora else "adapter")):
            export_policy(self.policy, out, merge=merge)

    def save_if_behind(self) -> None:
        """Write a checkpoint unless the newest one is of this very step. Raises MachineError if the disk refuses."""
        with self._disk_errors():
            self.saver.wait()
            if self.saver.saved_step != self._step:
                self._begin_checkpoint()
                self.saver.wait()

    def save_if_due(self) -> None:
        """Begin a checkpoint where one is due, and write it to its end where steps do not go on meanwhile.

        Raises MachineError if the disk refuses this one, or refused the one before.
        """
        with self._disk_errors():
            self.saver.raise_failure()
            if self.saver.is_due(self._step):
                self._begin_checkpoint()
                if not self.saver.in_background:
                    self.saver.wait()

    def _begin_checkpoint(self) -> None:
        with self._ranks.lead(GatherCommand("checkpoint")):
            weights, moments = checkpoints.gather(self._trainable, self._optimizer)
        state = checkpoints.state_of(
            owner=self._owner,
            step=self._step,
            policy_version=self._policy_version,
            last_report=self._last_report,
            last_groups=self._last_groups,
        )
        keep = self._boot.keep_checkpoints
        write = partial(checkpoints.write_checkpoint, self._checkpoints_dir, state, weights, moments, keep=keep)
        self.saver.begin(self._step, write)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            step = self.saver.failed_step
            raise MachineError(f"the checkpoint of step {step} cannot be written: {error}; {FREE_SPACE}") from error

    @contextmanager
    def _no_room_for_weights(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MachineError(f"weights {self._policy_version} cannot be written: {error}; {FREE_SPACE}") from error

    def _do_step(
        self, groups: Sequence[TrainGroup], unpacked: Sequence[UnpackedGroup], step: int, between: StepCallback
    ) -> StepReport:
        if not groups:
            return StepReport(step=step, policy_version=self._policy_version, skipped="no groups")
        started = time.monotonic()
        batch = batch_of(unpacked)
        whole, longest = sum(batch.lengths), max(batch.lengths)

        def attempt() -> StepOutcome:
            with self._ranks.lead(TrainRequest(step=step, groups=tuple(groups))):
                return self._take_step(batch, step, between)

        outcome = self._oom_retry.run(attempt, step=step, whole=whole, longest=longest)
        micro_batch_tokens = self._oom_retry.max_tokens
        if outcome.ran_out:
            self._oom_retry.note_out_of_memory(step=step, whole=whole, longest=longest)
        else:
            self._oom_retry.note_good_step(whole=whole)
        return report_of(
            outcome,
            batch,
            self._objective,
            understated=self._understated(outcome, batch, groups),
            step=step,
            version_before=self._policy_version,
            learning_rate=self._boot.learning_rate_at(step),
            checked=self._check_group.found(version=self._policy_version),
            entropy=self.policy.entropies.take() if self.policy.entropies else None,
            agreement=self._agreement.take() if self._agreement else ({}, None),
            duration_s=time.monotonic() - started,
            micro_batch_tokens=micro_batch_tokens,
            out_of_memory=self._oom_retry.num_out_of_memory,
        )

    def _understated(self, outcome: StepOutcome, batch: TrainBatch, groups: Sequence[TrainGroup]) -> tuple[str, ...]:
        """Return groups with completions whose log-probs cannot be honest; none if the first pass was not finished."""
        if outcome.first.refused is not None:
            return ()
        rows = self._objective.understated(outcome.first.learner_logprobs, batch)
        numbers = dict.fromkeys(batch.group_ids[rows].tolist())
        return tuple(groups[number].group_id for number in numbers)

    def _take_step(self, batch: TrainBatch, step: int, between: StepCallback) -> StepOutcome:
        between, micro_batches = self._ranks.between(between), self._micro_batches(batch)
        for group in self._optimizer.param_groups:
            group["lr"] = self._boot.learning_rate_at(step)
        forward = self.policy.logprobs
        outcome = take_step(
            forward if self._agreement is None else self._agreement.watching(forward, batch),
            batch,
            micro_batches,
            self._objective,
            self._optimizer,
            max_grad_norm=self._boot.max_grad_norm or math.inf,
            updates=self._boot.updates_per_batch,
            reference=self._reference_logprobs(batch, micro_batches, between),
            between=between,
            before_update=partial(self._before_update, between),
            ranks=self._ranks,
        )
        if self.policy.entropies is not None:
            self.policy.entropies.share(self._ranks)
        return outcome

    def _before_update(self, between: StepCallback) -> None:
        self.saver.pause(between)  # it writes from the tensors that the update changes
        self._check(between)

    def _check(self, between: StepCallback) -> None:
        group = self._check_group.take(version=self._policy_version)  # other ranks have none
        message = self._ranks.broadcast(b"" if group is None else msgspec.msgpack.encode(group))
        if not message:
            return
        batch = make_batch([msgspec.msgpack.decode(message, type=TrainGroup)])
        logprobs = compute_logprobs(
            self.policy.logprobs, batch, self._micro_batches(batch), between=between, ranks=self._ranks
        )
        self._check_group.note(batch, logprobs, version=self._policy_version)

    def _audit(self, group: TrainGroup, between: StepCallback) -> Mismatch | None:
        batch = make_batch([group])
        logprobs = compute_logprobs(
            self.policy.logprobs, batch, self._micro_batches(batch), between=between, ranks=self._ranks
        )
        return measure_mismatch(logprobs[batch.mask], batch.behaviour_logprobs[batch.mask])

    def _reference_logprobs(
        self, batch: TrainBatch, micro_batches: Sequence[MicroBatch], between: StepCallback
    ) -> Tensor | None:
        """The starting model's `[N, T]`, once for all updates of a step; None in a run without that KL."""
        if self._reference is None:
            return None
        return compute_logprobs(self._reference, batch, micro_batches, between=between, ranks=self._ranks)

    def _micro_batches(self, batch: TrainBatch) -> list[MicroBatch]:
        """Return micro-batches in packed rows if the model computes those, else a row per completion."""
        make = make_packed_micro_batches if self.policy.packs else make_micro_batches
        max_tokens, size = self._oom_retry.max_tokens, self._ranks.size
        return cut_evenly(lambda budget: make(batch, max_tokens=budget), max_tokens=max_tokens, size=size)

    def _settle(self, on_published: Callable[[PublishedWeights | WeightProof], None]) -> None:
        """Publish the present policy and, if due, write its checkpoint. Does only what is not done yet."""
        if self._proof.version != self._policy_version:
            step_done_at_s = time.monotonic()
            with self._no_room_for_weights():
                self._publish()
            self.give_memory_back()  # the generator may wake when it gets the message
            assert self._weights is not None
            on_published(msgspec.structs.replace(self._weights, step_done_at_s=step_done_at_s))
            self._prove()
            on_published(self._proof)
        self.save_if_due()

    def _publish(self, *, anew: bool = False) -> None:
        version = self._policy_version
        if anew:
            discard_published(Path(self._boot.weights_dir))
        if anew and version == 0:  # the generator has the starting model
            return
        with self._ranks.lead(GatherCommand("publication")):
            self._weights = self._publisher.publish(self.policy, version=version)

    def _prove(self) -> None:
        with self._ranks.lead(ProveCommand()):
            self._proof = proof_of(self.policy, version=self._policy_version)

    def _resume(self, on_skipped: Callable[[CheckpointSkipped], None]) -> None:
        shapes = {name: value.shape for name, value in self._trainable.items()}
        found = find_checkpoint(
            self._checkpoints_dir, owner=self._owner, shapes=shapes, ranks=self._ranks, on_skipped=on_skipped
        )
        if found is not None:
            checkpoints.restore_weights(found, self._trainable)
            self._masters.write_back()
            checkpoints.restore_optimizer(found, self._trainable, self._optimizer)
            self._step = found.state.step
            self.saver.goes_on_at(self._step)
            self._policy_version = found.state.policy_version
            self._last_report = found.state.last_report
            self._last_groups = found.state.last_groups
