"""The learner: a policy, its optimizer and its checkpoints, advanced one step at a time.

If several processes hold the model together, each has a Learner. The daemon talks to rank 0, and the other ranks
execute their part of each command (`take_part`, `ranks.py`).

Steps are numbered and each is done once: a repeated request for the newest one returns the stored report. Weights are
published before the checkpoint is written, so that the generator loads them during the write. Not every step has a
checkpoint (`checkpoint_manager.py`). After a crash, training resumes from the newest checkpoint. The next process
repeats the later steps from the same groups and publishes their versions again. Groups that a lost version sampled stay
valid.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from ftis_node.errors import ConfigError, FtisError, WorkerTaskError
from ftis_node.learner.batch import TrainBatch, batch_of, make_batch
from ftis_node.learner.checkpoint.checkpoint import owner_of
from ftis_node.learner.checkpoint.checkpoint_manager import CheckpointManager
from ftis_node.learner.checkpoint.publication import WeightPublication, proof_of
from ftis_node.learner.distributed.ranks import ALONE, RankCommand, Ranks, RankTask, StepCallback, cut_evenly
from ftis_node.learner.groups import UnpackedGroup, unpack_train_group, unpack_train_groups
from ftis_node.learner.messages import (
    AuditReply,
    AuditRequest,
    CheckpointEvent,
    LearnerBoot,
    LearnerState,
    StepReport,
    TrainGroup,
    TrainReply,
    TrainRequest,
)
from ftis_node.learner.model.activations import recompute_activations
from ftis_node.learner.model.kernels import check_kernels, choose_kernels
from ftis_node.learner.model.policy_loading import load_policy, load_reference
from ftis_node.learner.step.agreement import AgreementMeter
from ftis_node.learner.step.objective import Objective
from ftis_node.learner.step.optimizer import check_optimizer_states, make_masters, make_optimizer
from ftis_node.learner.step.train_step import Forward, OomRetry, Passes, StepOutcome, take_step
from ftis_node.learner.train_report import DRIFT_STEPS, Mismatch, groups_of_start, measure_mismatch, report_of
from ftis_node.workers.shared_tensors import grow_segments
from ftis_node.workers.weight_store import PublishedWeights, WeightProof


class Learner:
    """One policy in training. Not thread-safe."""

    def __init__(
        self,
        boot: LearnerBoot,
        *,
        ranks: Ranks = ALONE,
        on_event: Callable[[CheckpointEvent], None] = lambda event: None,
    ):
        """Load the model and resume from the newest checkpoint of this home; all `ranks` do so at the same time.

        Raises ConfigError, ModelError, MachineError or NetworkError. `on_event` is called as in `CheckpointManager`.
        """
        if boot.num_threads is not None:
            torch.set_num_threads(boot.num_threads)
        self._boot = boot
        self._ranks = ranks
        self._objective = Objective(
            boot.method.name,
            boot.method.given() | {"max_completion_length": boot.sampling.max_completion_tokens},
            boot.method.advantage_scale,
            advantage_shift=boot.method.advantage_shift or 0.0,
            kl_to_start=boot.optimizer.kl_coef,
            kl_weighted=boot.optimizer.kl_weighted,
            max_logprob_gap_nats=boot.max_logprob_gap_nats,
            mask_truncated=boot.sampling.mask_truncated,
            rejection_key=boot.rejection_key,
        )
        check_optimizer_states(boot)
        if boot.measures_agreement and ranks.size > 1:
            raise ConfigError("method.peer_weights needs a learner of one process: remove one of the two settings")
        check_kernels(boot)
        self.policy = choose_kernels(load_policy(boot, ranks), boot)
        self._publication = WeightPublication(
            self.policy, Path(boot.weights_dir), transfer=boot.transfer, form=boot.publish_as, ranks=ranks
        )
        if boot.transfer == "ipc" and boot.memory_share is not None:  # segments that grow cannot hold mapped weights
            grow_segments()
        measure = boot.method.peer_weights
        self._agreement = AgreementMeter(self.policy.causal_lm, measure) if measure else None
        self._start = load_reference(self.policy, boot, ranks) if boot.optimizer.kl_coef else None
        self._drift: Mismatch | None = None  # of the step in progress, if it is due
        self._masters = make_masters(self.policy.trainable(), boot)
        self._optimizer = make_optimizer(self._masters, boot)
        recompute = partial(recompute_activations, self.policy.causal_lm) if boot.may_recompute else lambda: False
        self._oom_retry = OomRetry(boot.micro_batch_tokens, recompute=recompute)
        self.checkpoints = CheckpointManager(
            boot, owner_of(self.policy, boot), self._masters, self._optimizer, ranks=ranks, on_event=on_event
        )
        self._check_groups: deque[TrainGroup] = deque(maxlen=1)  # the newest that waits
        self._checked: tuple[int, Mismatch | None] = -1, None  # the last measurement, with its version
        self.checkpoints.resume()
        self._progress = self.checkpoints.progress
        if ranks.rank == 0:  # the other ranks now wait for its commands
            self._publication.begin(self._progress.policy_version)

    def take_part(self, command: RankCommand) -> None:
        """Execute this rank's part of a command of rank 0."""
        match command:
            case TrainRequest(step=step, groups=groups):
                self._take_step(make_batch(groups), step, between=lambda: None)
            case RankTask(what="check"):
                self._check(self._ranks.between(lambda: None))
            case AuditRequest(group=group):
                self._compare([group], self._ranks.between(lambda: None))
            case RankTask(what="prove"):
                proof_of(self.policy, version=self._progress.policy_version)
            case RankTask(what="publish"):
                self._publication.take_part()
            case RankTask(what="save"):
                self.checkpoints.take_part()

    def close(self) -> None:
        """Stop the other ranks and the thread that writes checkpoints."""
        self.checkpoints.saver.close()
        self._publication.close()
        with self._ranks.lead(RankTask("end")):
            self._ranks.close()

    def state(self) -> LearnerState:
        return LearnerState(
            step=self._progress.step,
            policy_version=self._progress.policy_version,
            parameters=self.policy.num_parameters,
            trainable_parameters=self.policy.num_trainable_parameters,
            proof=self._publication.proof,
            weights=self._publication.weights,
            last_report=self._progress.last_report,
            last_groups=self._progress.last_groups,
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

        `between` is called between micro-batches; if it raises, the step is not done. `on_published` receives new
        weights as soon as a generator can load them, and then their proof. Raises FtisError for another step number,
        MachineError if memory or disk do not suffice: the same step may then be requested again.
        """
        progress = self._progress
        if step == progress.step and progress.last_report is not None:
            self._settle(on_published)
            return self._reply(msgspec.structs.replace(progress.last_report, repeated=True))
        if step != progress.step + 1:
            raise FtisError(f"the learner is at step {progress.step} and cannot do step {step}")
        unpacked, unreadable = unpack_train_groups(groups)
        report = msgspec.structs.replace(self._do_step(unpacked, step, between), unreadable=unreadable)
        progress.step, progress.policy_version, progress.last_report = step, report.policy_version, report
        progress.last_groups = tuple(group.group_id for group in groups)
        if report.num_updates == 0:
            return TrainReply(report=report, saved_step=self.checkpoints.saver.saved_step)
        self._settle(on_published)
        return self._reply(report)

    def _reply(self, report: StepReport) -> TrainReply:
        return TrainReply(
            report=report,
            weights=self._publication.weights,
            proof=self._publication.proof,
            saved_step=self.checkpoints.saver.saved_step,
        )

    def give_memory_back(self, *, force: bool = False) -> None:
        """Release torch's cached blocks if a generator needs them between steps, or if `force`."""
        if force or self._boot.takes_turns:
            torch.cuda.empty_cache()

    def write_weights(self, *, refused: str = "") -> PublishedWeights | None:
        """Write the present weights to a file as `WeightPublication.write` does."""
        return self._publication.write(self._progress.policy_version, refused=refused)

    def offer_check(self, group: TrainGroup) -> None:
        """Queue `group`, in place of one that waits, for the next `check` or the step in progress. Thread-safe.

        Raises as `unpack_train_group`.
        """
        unpack_train_group(group)  # here, because an error in `_check` would end the step
        self._check_groups.append(group)

    def check(self, *, between: StepCallback = lambda: None) -> None:
        """Measure the queued group under the present weights, for the next report, unless other weights sampled it."""
        with self._ranks.lead(RankTask("check")):
            self._check(self._ranks.between(between))

    def audit(self, group: TrainGroup, *, between: StepCallback = lambda: None) -> AuditReply:
        """Compare a peer's log-probs with the learner's, if the present weights are the version that it claims."""
        if unpack_train_group(group).policy_version != self._progress.policy_version:
            return AuditReply()
        with self._ranks.lead(AuditRequest(group=group)):
            found = self._compare([group], self._ranks.between(between))
        return AuditReply() if found is None else AuditReply(kl=found.kl, num_tokens=found.num_tokens)

    def save(self) -> int:
        """Write a checkpoint of the newest step, unless there is one, and return the step."""
        self.checkpoints.save_if_behind()
        return self._progress.step

    def _do_step(self, groups: Sequence[UnpackedGroup], step: int, between: StepCallback) -> StepReport:
        if not groups:
            return StepReport(step=step, policy_version=self._progress.policy_version, skipped="no groups")
        started = time.monotonic()
        batch = batch_of(groups)
        whole, longest = sum(batch.lengths), max(batch.lengths)

        def attempt() -> StepOutcome:
            with self._ranks.lead(TrainRequest(step=step, groups=tuple(group.sent for group in groups))):
                return self._take_step(batch, step, between)

        outcome = self._oom_retry.run(attempt, step=step, whole=whole, longest=longest)
        micro_batch_tokens = self._oom_retry.max_tokens
        if outcome.ran_out:  # in a later update
            self._oom_retry.note_out_of_memory(step=step, whole=whole, longest=longest)
        version = self._progress.policy_version
        checked = self._checked[1] if self._checked[0] == version else None
        report = report_of(outcome, batch, self._objective, step=step, version_before=version, checked=checked)
        if version == 0 and self._start is None:
            self._progress.start_groups = self._progress.start_groups or groups_of_start(groups)
        agreement, own_agreement = self._agreement.take() if self._agreement else ({}, None)
        duration_s = time.monotonic() - started
        return msgspec.structs.replace(
            report,
            learning_rate=self._boot.learning_rate_at(step),
            duration_s=duration_s,
            tokens_per_s=batch.num_tokens / duration_s if duration_s > 0 else 0.0,
            micro_batch_tokens=micro_batch_tokens,
            out_of_memory=self._oom_retry.num_out_of_memory,
            understated=self._understated(outcome, batch, groups),
            agreement=agreement,
            own_agreement=own_agreement,
            kl_from_start=self._drift.kl if self._drift else None,
        )

    def _understated(self, outcome: StepOutcome, batch: TrainBatch, groups: Sequence[UnpackedGroup]) -> tuple[str, ...]:
        """Return groups with completions whose log-probs cannot be honest; none if the first pass was refused."""
        if outcome.first.refused is not None:
            return ()
        rows = self._objective.understated(outcome.first.learner_logprobs, batch)
        numbers = dict.fromkeys(batch.group_ids[rows].tolist())
        return tuple(groups[number].sent.group_id for number in numbers)

    def _take_step(self, batch: TrainBatch, step: int, between: StepCallback) -> StepOutcome:
        own, between = between, self._ranks.between(between)
        for group in self._optimizer.param_groups:
            group["lr"] = self._boot.learning_rate_at(step)
        reference = None if self._start is None else self._logprobs(batch, between, self._start)  # for all updates
        self._drift = self._measure_drift(between) if reference is None and step in DRIFT_STEPS else None
        forward = self.policy.logprobs
        return take_step(
            self._passes(batch, between, self._agreement.watching(forward, batch) if self._agreement else forward),
            self._objective,
            self._optimizer,
            max_grad_norm=self._boot.optimizer.max_grad_norm or math.inf,
            updates=self._boot.optimizer.updates_per_batch,
            reference=reference,
            before_update=partial(self._before_update, own, between),
        )

    def _measure_drift(self, between: StepCallback) -> Mismatch | None:
        message = self._ranks.broadcast(msgspec.msgpack.encode(self._progress.start_groups))  # rank 0 alone has them
        groups = msgspec.msgpack.decode(message, type=tuple[TrainGroup, ...])
        return self._compare(groups, between) if groups else None

    def _before_update(self, own: StepCallback, between: StepCallback) -> None:
        with self._ranks.agreed(WorkerTaskError):  # rank 0 alone writes, and calls `own` any number of times
            self.checkpoints.saver.pause(own)  # it reads the tensors that the update changes
        self._check(between)

    def _check(self, between: StepCallback) -> None:
        """Measure the check group, unless other weights sampled a part of it. Rank 0 alone has one."""
        version = self._progress.policy_version
        taken = [self._check_groups.pop()] if self._check_groups else []
        is_present = bool(taken) and bool(make_batch(taken).sampled_by(version).any())
        message = self._ranks.broadcast(msgspec.msgpack.encode(taken[0]) if is_present else b"")
        if not message:
            return
        batch = make_batch([msgspec.msgpack.decode(message, type=TrainGroup)])
        tokens = batch.sampled_by(version)
        logprobs = self._logprobs(batch, between)
        self._checked = version, measure_mismatch(logprobs[tokens], batch.behaviour_logprobs[tokens])

    def _compare(self, groups: Sequence[TrainGroup], between: StepCallback) -> Mismatch | None:
        """Return how the log-probs in these groups differ from those of the policy."""
        batch = make_batch(groups)
        return measure_mismatch(self._logprobs(batch, between)[batch.mask], batch.behaviour_logprobs[batch.mask])

    def _logprobs(self, batch: TrainBatch, between: StepCallback, forward: Forward | None = None) -> Tensor:
        """Return the log-probs `[N, T]` of `batch` under the policy, or under the model of `forward`."""
        return self._passes(batch, between, forward or self.policy.logprobs).logprobs()

    def _passes(self, batch: TrainBatch, between: StepCallback, forward: Forward) -> Passes:
        cut = partial(self.policy.micro_batches, batch)
        micro_batches = cut_evenly(cut, max_tokens=self._oom_retry.max_tokens, size=self._ranks.size)
        return Passes(forward, batch, micro_batches, self.policy.causal_lm.device, between, self._ranks)

    def _settle(self, on_published: Callable[[PublishedWeights | WeightProof], None]) -> None:
        """Publish the present policy and, if due, write its checkpoint. Skips the parts that are already done."""
        publication, version = self._publication, self._progress.policy_version
        if publication.proof.version != version:
            step_done_at_s = time.monotonic()
            weights = publication.publish(version)
            self.give_memory_back()  # the message may wake the generator, which needs this memory
            on_published(msgspec.structs.replace(weights, step_done_at_s=step_done_at_s))
            publication.prove(version)
            on_published(publication.proof)
        self.checkpoints.save_if_due()
