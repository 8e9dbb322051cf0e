"""The train loop: READY groups become a step, the step new weights, the weights the generator's next version.

consumes: groups of one step     produces: weights n+1, evaluations
waits for: enough READY groups, or the patience limit (then own groups alone)
unblocked by: intake

The slots of a step are freed only after the generator serves the new version. A group that a dead learner had in hand
goes back to READY unless the learner's checkpoint shows that the step was done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ftis_node.errors import WorkerDiedError, WorkerError
from ftis_node.generation.evaluate import evaluate
from ftis_node.learner.messages import TrainCompletion, TrainGroup
from ftis_node.node.patience import Outlook, StepNeeds, may_start
from ftis_node.replay.lifecycle import Freshness, ReleaseReason
from ftis_node.telemetry.status import EvalStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.ipc.weights import PublishedWeights, WeightProof
    from ftis_node.learner.messages import LearnerState, StepReport
    from ftis_node.node.intake import IntakeLoop
    from ftis_node.node.parts import Parts
    from ftis_node.replay.buffer import StoredGroup

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.5  # patience and staleness pass without an event


class TrainLoop:
    """One step after the other, up to `last_step` where given."""

    def __init__(self, parts: Parts, intake: IntakeLoop, *, last_step: int | None) -> None:
        self._parts = parts
        self._intake = intake
        self._last_step = last_step
        self._started_at = time.monotonic()
        self._own_ready_since: float | None = None
        step = parts.manifest.step
        self._needs = StepNeeds(own=step.own_groups, foreign=step.foreign_groups, patience_s=step.patience_s)

    @property
    def step(self) -> int:
        """The last step that was done."""
        return self._parts.figures.step

    async def run(self) -> None:
        """Until the last step is done, or until cancelled."""
        await self.resume(await self._parts.learner.start())
        await self._evaluate_if_due()
        while self._last_step is None or self.step < self._last_step:
            await self._wait_for_groups()
            groups = await self._parts.disk(
                self._parts.buffer.take, self.step + 1, own=self._needs.own, foreign=self._needs.foreign
            )
            await self._train(groups)
            await self._evaluate_if_due()

    async def _wait_for_groups(self) -> None:
        """Returns when the step may start; releases on the way what has grown stale."""
        while True:
            self._intake.stored.clear()
            await self._release_unusable()
            if may_start(self._needs, await self._outlook()):
                return
            try:
                await asyncio.wait_for(self._intake.stored.wait(), LOOK_AGAIN_S)
            except TimeoutError:
                continue

    async def _outlook(self) -> Outlook:
        own_ready, foreign_ready = self._parts.reader.ready_counts()
        now = time.monotonic()
        if own_ready < self._needs.own:
            self._own_ready_since = None
        elif self._own_ready_since is None:
            self._own_ready_since = now
        return Outlook(
            own_ready=own_ready,
            foreign_ready=foreign_ready,
            waited_s=now - (self._own_ready_since or now),
            uptime_s=now - self._started_at,
            has_members=bool(await self._parts.gossip.members()),
        )

    async def _release_unusable(self) -> None:
        parts = self._parts
        freshness = Freshness(
            now=time.time(),
            max_age_s=parts.manifest.step.max_age_s,
            policy_version=parts.figures.policy_version,
            max_version_lag=parts.manifest.step.max_version_lag,
        )
        stale = await parts.disk(parts.buffer.release_stale, freshness)
        evicted = await parts.disk(parts.buffer.evict_foreign, keep=parts.settings.buffer.max_ready_groups)
        for groups, reason in ((stale, ReleaseReason.STALE), (evicted, ReleaseReason.EVICTED)):
            for group in groups:
                parts.events.write("released", group=group.id, reason=reason)
        if stale:
            parts.slots.hold(parts.reader.own_held())

    async def _train(self, groups: Sequence[StoredGroup]) -> None:
        """One step, from TAKEN groups to RELEASED ones and a new version in the generator."""
        parts, step = self._parts, self.step + 1
        for group in groups:
            parts.events.write("taken", group=group.id, step=step)
        try:
            reply = await parts.learner.train([_train_group(group) for group in groups], step=step)
        except WorkerDiedError as error:
            parts.events.write("step_lost", step=step, error=str(error))
            await self.resume(await parts.learner.start())
            return
        self._own_ready_since = None
        self._note(reply.report)
        if reply.weights is not None and reply.proof is not None:
            await self._hand_over(reply.weights, reply.proof)
        changed_nothing = reply.report.refused and reply.report.num_updates == 0
        reason = ReleaseReason.REFUSED if changed_nothing else ReleaseReason.TRAINED
        await parts.disk(parts.buffer.release_step, step, reason)
        await parts.disk(parts.buffer.prune, max_disk_bytes=parts.settings.buffer.max_disk_bytes)
        parts.slots.hold(parts.reader.own_held())

    async def resume(self, state: LearnerState) -> None:
        """The buffer follows the checkpoint that the learner stands on, at start and after the learner's death."""
        returned = await self._parts.disk(self._parts.buffer.reconcile, state.step)
        if returned:
            log.warning("the learner stands at step %d; %d groups are ready again", state.step, returned)
        self._parts.slots.hold(self._parts.reader.own_held())
        if state.last_report is not None and state.step > self.step:
            self._note(state.last_report)  # the learner finished this step, but the daemon did not live to hear of it
        self._parts.figures.step = state.step
        self._parts.figures.policy_version = state.policy_version
        if state.weights is not None:
            await self._hand_over(state.weights, state.proof)

    def _note(self, report: StepReport) -> None:
        """The step's figures: into the event trail, the status and, where something is wrong, the log."""
        figures = self._parts.figures
        figures.step, figures.policy_version, figures.last_report = report.step, report.policy_version, report
        self._parts.events.write("step", **msgspec.to_builtins(report))
        if problem := report.refused or report.skipped:
            log.warning("step %d changed nothing: %s", report.step, problem)
        else:
            log.info(
                "step %d: reward %.3f, %d own and %d foreign groups, %.1f s",
                report.step,
                report.reward_mean or 0.0,
                report.own_groups,
                report.foreign_groups,
                report.duration_s,
            )

    async def _hand_over(self, weights: PublishedWeights, proof: WeightProof) -> None:
        """The generator serves the new version and has proved it; where it died over it, it restarts with it."""
        try:
            await self._parts.generation.update_weights(weights, proof)
        except WorkerError as error:
            self._parts.events.write("hand_over_failed", version=weights.version, error=str(error))
            await self._parts.generation.start()
        self._parts.events.write("served", version=weights.version)

    async def _evaluate_if_due(self) -> None:
        """Greedy pass@1 on held-out problems at step 0, every so many steps, and at the last one."""
        parts, settings = self._parts, self._parts.manifest.eval
        if parts.eval_task is None:
            return
        due = settings.every_steps and (self.step % settings.every_steps == 0 or self.step == self._last_step)
        if not due or any(entry.step == self.step for entry in parts.figures.evaluations):
            return
        result = await evaluate(
            parts.generation,
            parts.eval_task,
            parts.tokenizer,
            scorer=parts.scorer,
            limit=settings.limit,
            completion_limit=parts.manifest.sampling.completion_limit,
        )
        entry = EvalStatus(step=self.step, task=parts.eval_task.name, pass_at_1=result.pass_at_1, n=result.n)
        parts.figures.evaluations.append(entry)
        parts.events.write("eval", step=entry.step, task=entry.task, pass_at_1=entry.pass_at_1, n=entry.n)
        log.info("step %d: pass@1 %.3f on %d problems of %s", entry.step, entry.pass_at_1, entry.n, entry.task)


def _train_group(group: StoredGroup) -> TrainGroup:
    """A stored group as the learner takes it: with our rewards, and one advantage group per generator's group."""
    return TrainGroup(
        group_id=group.id.hex(),
        advantage_key=group.id.hex(),
        own=group.own,
        policy_version=group.group.policy_version,
        prompt_ids=np.asarray(group.prompt_ids, dtype="<i4").tobytes(),
        completions=tuple(
            TrainCompletion(
                token_ids=completion.token_ids.tobytes(), logprobs=completion.logprobs.tobytes(), reward=reward
            )
            for completion, reward in zip(group.group.completions, group.rewards, strict=True)
        ),
    )
