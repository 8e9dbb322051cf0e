"""The train loop: READY groups become a step, the step new weights, the weights the generator's next version.

consumes: groups of one step     produces: weights n+1, evaluations
waits for: enough READY groups, or the patience limit (then own groups alone)
unblocked by: intake

The slots of a step are freed only after the generator serves the new version. A group that a dead learner had in hand
goes back to READY unless the learner's checkpoint, which names the groups of its last step, shows that it was trained.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ftis_node.errors import WorkerDiedError
from ftis_node.generation.evaluate import evaluate
from ftis_node.learner.messages import TrainCompletion, TrainGroup
from ftis_node.node.hand_over import HandOver, hand_over
from ftis_node.node.makers import dtype_of
from ftis_node.node.mismatch import Change, MismatchWatch, limits_of, warning_of
from ftis_node.node.tracking import track_evaluation, track_step
from ftis_node.replay.lifecycle import ReleaseReason, choose_newest, choose_same_prompts, choose_sapo
from ftis_node.telemetry.status import EvalStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.config.manifest import Share
    from ftis_node.learner.messages import LearnerState, StepReport
    from ftis_node.node.gate import StepGate
    from ftis_node.node.parts import Parts
    from ftis_node.replay.buffer import StoredGroup
    from ftis_node.replay.lifecycle import ChoiceRule
    from ftis_node.tasks.base import Task

log = logging.getLogger(__name__)


class TrainLoop:
    """One step after the other, up to `last_step` where given."""

    def __init__(self, parts: Parts, gate: StepGate, *, last_step: int | None) -> None:
        self._parts = parts
        self._gate = gate
        self._last_step = last_step
        self._mismatch = MismatchWatch(limits_of(parts.settings.mismatch, dtype=dtype_of(parts.settings)))

    @property
    def step(self) -> int:
        """The last step that was done."""
        return self._parts.figures.step

    async def run(self) -> None:
        """Until the last step is done, or until cancelled."""
        await self.resume(await self._parts.learner.start())
        await self._evaluate_if_due()
        while self._last_step is None or self.step < self._last_step:
            await self._gate.wait(self.step + 1)
            await self._train_in_turn(await self._take(self.step + 1))
            await self._evaluate_if_due()

    async def _take(self, step: int) -> list[StoredGroup]:
        """READY -> TAKEN for the groups of a step; what the run's rule passes over is released."""
        parts, wanted = self._parts, self._parts.manifest.step
        groups, discarded = await parts.disk(
            parts.buffer.take, step, own=wanted.own_groups, foreign=wanted.foreign_groups, rule=self._rule(step)
        )
        for group in groups:
            parts.events.write("taken", group=group.id, step=step)
        for passed_over in discarded:
            parts.events.write("released", group=passed_over.id, reason=ReleaseReason.DISCARDED)
        return groups

    def _rule(self, step: int) -> ChoiceRule:
        """How this run chooses a step's groups."""
        wanted = self._parts.manifest.step
        if wanted.choice == "sapo":
            return partial(choose_sapo, seed=step)
        return choose_same_prompts if wanted.share == "horizontal" else choose_newest

    async def _train_in_turn(self, groups: Sequence[StoredGroup]) -> None:
        """One step; where the workers take turns, the generator sleeps until it has new weights, or the step's end."""
        if not self._parts.arrangement.takes_turns:
            await self._train(groups)
            return
        await self._parts.generation.sleep()
        await self._train(groups)
        await self._parts.generation.wake()

    async def _train(self, groups: Sequence[StoredGroup]) -> None:
        """One step, from TAKEN groups to RELEASED ones and a new version in the generator."""
        parts, step = self._parts, self.step + 1
        under_way = HandOver(parts)
        try:
            share = parts.manifest.step.share
            step_groups = [train_group(group, share=share) for group in groups]
            reply = await parts.learner.train(step_groups, step=step, on_published=under_way.take)
            await self._note(reply.report)
            await under_way.finish(reply)
        except WorkerDiedError as error:
            parts.events.write("step_lost", step=step, error=str(error))
            await under_way.give_up()
            await self.resume(await parts.learner.start())
            return
        finally:
            under_way.cancel()
        changed_nothing = reply.report.refused and reply.report.num_updates == 0
        reason = ReleaseReason.REFUSED if changed_nothing else ReleaseReason.TRAINED
        await parts.disk(parts.buffer.release_step, step, reason)
        max_disk_bytes = parts.settings.buffer.max_disk_bytes
        await parts.disk(parts.buffer.prune, max_disk_bytes=max_disk_bytes, saved_step=reply.saved_step)
        parts.slots.hold(parts.reader.own_held())

    async def resume(self, state: LearnerState) -> None:
        """The buffer follows the checkpoint that the learner stands on, at start and after the learner's death."""
        last_groups = None if state.last_groups is None else [bytes.fromhex(name) for name in state.last_groups]
        returned = await self._parts.disk(self._parts.buffer.reconcile, state.step, last_groups)
        if returned:
            log.warning("the learner stands at step %d; %d groups are ready again", state.step, returned)
        self._parts.slots.hold(self._parts.reader.own_held())
        if state.last_report is not None and state.step > self.step:
            await self._note(
                state.last_report
            )  # the learner finished this step, but the daemon did not live to hear of it
        self._parts.figures.step = state.step
        self._parts.figures.policy_version = state.policy_version
        if state.weights is not None:
            await hand_over(self._parts, state.weights, state.proof)

    async def _note(self, report: StepReport) -> None:
        """The step's figures: into the event trail, the status, the trackers and, where something is wrong, the log."""
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
        self._note_mismatch(report)
        await track_step(self._parts, report)

    def _note_mismatch(self, report: StepReport) -> None:
        """The newest measurement, and a line where it rose above the node's limits or fell below them again."""
        if report.mismatch_kl is None:
            return
        self._parts.figures.mismatch_report = report
        change = self._mismatch.note(report)
        if change is None:
            return
        self._parts.events.write(
            "mismatch",
            step=report.step,
            change=change.value,
            kl=report.mismatch_kl,
            share=report.mismatch_share,
            num_tokens=report.mismatch_tokens,
            version=report.mismatch_version,
        )
        if change is Change.ROSE:
            log.warning("%s", warning_of(report, self._mismatch.limits))
        else:
            log.info("engine and learner agree again: KL %.2g", report.mismatch_kl)

    async def _evaluate_if_due(self) -> None:
        """Greedy pass@1 on held-out problems at step 0, every so many steps, and at the last one."""
        every_steps = self._parts.manifest.eval.every_steps
        due = every_steps and (self.step % every_steps == 0 or self.step == self._last_step)
        known = {entry.task for entry in self._parts.figures.evaluations if entry.step == self.step}
        for task in self._parts.eval_tasks if due else ():
            if task.name not in known:
                await self._evaluate(task)

    async def _evaluate(self, task: Task) -> None:
        parts = self._parts
        result = await evaluate(
            parts.evaluated,
            task,
            parts.tokenizer,
            scorer=parts.scorer,
            limit=parts.manifest.eval.limit,
            completion_limit=parts.manifest.sampling.completion_limit,
        )
        entry = EvalStatus(step=self.step, task=task.name, pass_at_1=result.pass_at_1, n=result.n)
        parts.figures.evaluations.append(entry)
        parts.events.write("eval", step=entry.step, task=entry.task, pass_at_1=entry.pass_at_1, n=entry.n)
        track_evaluation(parts, entry)
        log.info("step %d: pass@1 %.3f on %d problems of %s", entry.step, entry.pass_at_1, entry.n, entry.task)


def train_group(group: StoredGroup, *, share: Share) -> TrainGroup:
    """A stored group as the learner takes it, with our rewards.

    Vertical: one advantage group per generator's group. Horizontal: one per prompt, over all its generators.
    """
    return TrainGroup(
        group_id=group.id.hex(),
        advantage_key=group.id.hex() if share == "vertical" else str(group.group.prompt_ref),
        own=group.own,
        policy_version=group.group.policy_version,
        policy_version_newest=group.group.policy_version_newest,
        prompt_ids=np.asarray(group.prompt_ids, dtype="<i4").tobytes(),
        completions=tuple(
            TrainCompletion(
                token_ids=completion.token_ids.tobytes(),
                logprobs=completion.logprobs.tobytes(),
                reward=reward,
                behaviour_mean_logprob=completion.mean_logprob,
            )
            for completion, reward in zip(group.group.completions, group.rewards, strict=True)
        ),
    )
