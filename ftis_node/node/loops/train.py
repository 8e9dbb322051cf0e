"""The train loop: trains a step on READY groups.

The slots of a step become free only after the generator serves the new version, or has refused it. If the learner dies
in a step, the step's groups return to READY. The exception is a completed step, whose groups the learner's checkpoint
names. A group on which the learner fails several times is released, so that no group can block the node.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from ftis_node.errors import ModelError, WorkerDiedError, WorkerError, WorkerTaskError
from ftis_node.generation.weight_loader import ProofToCome
from ftis_node.learner.client import OnPublished
from ftis_node.learner.messages import LearnerState, TrainGroup, TrainReply
from ftis_node.node.context import NodeContext
from ftis_node.node.peers.node_part import NodePart
from ftis_node.node.training.evaluator import Evaluator
from ftis_node.node.training.generation_limits import SlotPool
from ftis_node.node.training.step_gate import StepGate
from ftis_node.node.training.step_groups import take_groups
from ftis_node.node.training.step_peers import StepPeers
from ftis_node.node.training.step_reporter import StepReporter
from ftis_node.node.worker_interfaces import Generation, Learning
from ftis_node.replay.buffer import MAX_FAILED_STEPS
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.replay.stored_rows import StoredGroup
from ftis_node.workers.weight_store import PublishedWeights, WeightProof

log = logging.getLogger(__name__)
Proof: TypeAlias = "ProofToCome | WeightProof | None"
DeliverWeights: TypeAlias = "Callable[[PublishedWeights, Proof], Coroutine[None, None, None]]"
"""Receiver of new weights: `update_engine`, or `OfferLoop.take` of a learner node."""

TRAINING, WEIGHT_SYNC = "training", "the weight sync"
MAX_LOST_STEPS = 2 * MAX_FAILED_STEPS  # of own groups in a row, before the first step that succeeds


@dataclass(eq=False, repr=False)
class TrainLoop(NodePart):
    """Loop that trains one step at a time, up to `last_step` if it is not None.

    `deliver` gets the weights of each step. `takes_turns`: the workers use one GPU's memory alternately.
    """

    learner: Learning
    generation: Generation
    slots: SlotPool
    step_peers: StepPeers
    reporter: StepReporter
    evaluator: Evaluator
    gate: StepGate
    deliver: DeliverWeights
    takes_turns: bool
    last_step: int | None

    def __post_init__(self) -> None:
        self._num_pauses = 0  # after which the learner's state is known

    @property
    def step(self) -> int:
        return self.context.state.step

    async def run(self) -> None:
        """Run until the last step is done, or until canceled."""
        async with self.context.pause.working():
            self._num_pauses = self.context.pause.num_pauses
            state = await self.learner.start()
            await self.resume(state)
            if state.weights is None:
                try:
                    await self.generation.check_start(state.proof)
                except WorkerError as error:  # its supervisor restarts it
                    log.warning("the generator's model is not checked: %s", error)
        await self._evaluate_if_due()
        while not self._is_done():
            if not await self.gate.wait(self.step + 1):
                break
            async with self.context.pause.working():
                if await self._resume_after_pause():
                    continue  # with the gate of the learner's step, which may be an earlier one
                own, foreign = self.gate.shares(self.step + 1)
                groups = await take_groups(self, self.step + 1, own=own, foreign=foreign, disk=self.store.disk)
                await self._train_in_turn(groups)
            await self._evaluate_if_due()
        await self._evaluate_if_due(is_last=True)

    def _is_done(self) -> bool:
        """Return whether the last step is done or the token budget is used up, counted over all starts of the home."""
        if self.last_step is not None and self.step >= self.last_step:
            return True
        limit = self.context.settings.budget.learn_tokens
        if limit is not None and self.store.reader.trained_tokens() >= limit:
            log.info("the budget of tokens to train on is used up at step %d: the node ends", self.step)
            return True
        return False

    async def _train_in_turn(self, groups: Sequence[StoredGroup]) -> None:
        """Train one step. If the workers take turns, the generator sleeps until new weights or the end of the step."""
        if not self.takes_turns:
            await self._train(groups)
            return
        await self.generation.sleep(discard=bool(groups))
        await self._train(groups)
        await self.generation.wake()

    async def _train(self, groups: Sequence[StoredGroup]) -> None:
        """Train one step on TAKEN groups, deliver the new version to the generator, and release the groups."""
        step = self.step + 1
        batch = self.step_peers.batch(groups)
        if groups and not batch:
            await self.store.disk(self.store.buffer.release_step, step, ReleaseReason.REFUSED)
            return
        under_way = WeightSync(self.deliver)
        try:
            reply = await self._train_with_space(batch, step=step, on_published=under_way.take)
            await self.reporter.note(reply.report)
            self.step_peers.weigh(reply.report, batch)
            reason = ReleaseReason.REFUSED if reply.report.refused else ReleaseReason.TRAINED
            self.step_peers.settle(reply.report, groups, is_trained=reason is ReleaseReason.TRAINED)
            await under_way.finish(reply)
        except (WorkerDiedError, WorkerTaskError) as error:
            is_own_fault = all(group.own for group in groups)  # else a peer could end the node
            if isinstance(error, WorkerTaskError):
                if is_own_fault:
                    await self.store.disk(self.store.buffer.note_failed, step)
                    raise
                self.learner.restart(f"failed step {step}")  # back to its checkpoint: the step may be half applied
            self.context.events.write("step_lost", step=step, error=str(error))
            self.context.failures.failed(TRAINING, error)
            streak = self.context.failures.streak(TRAINING)
            if is_own_fault and not streak.has_succeeded and streak.num_in_row >= MAX_LOST_STEPS:
                times = streak.num_in_row
                raise type(error)(f"training failed on every step since the start, {times} times: {error}") from error
            self.step_peers.note_lost(groups, error)
            await self.store.disk(self.store.buffer.note_failed, step)
            await under_way.abandon()
            state = await self.learner.start()
            await self.resume(state)
            return
        finally:
            under_way.cancel()
        self.context.failures.succeeded(TRAINING)
        await self.store.disk(self.store.buffer.release_step, step, reason)
        self.context.state.saved_step = reply.saved_step
        await self.store.prune()
        self.slots.set_held(self.store.reader.own_held())

    async def _train_with_space(
        self, batch: Sequence[TrainGroup], *, step: int, on_published: OnPublished
    ) -> TrainReply:
        """Return the reply to a step. If the disk refuses its weights or checkpoint, request it again until it has
        space: the learner then does only what is missing.
        """
        num_tries = 0

        async def train() -> TrainReply:
            nonlocal num_tries
            num_tries += 1
            return await self.learner.train(batch, step=step, on_published=on_published)

        reply = await self.store.space.retried(train)
        if num_tries == 1:
            return reply
        return replace(reply, report=replace(reply.report, repeated=False))  # it was not reported before

    async def resume(self, state: LearnerState) -> None:
        """Reconcile buffer and state with the learner's checkpoint, at the start and after the learner dies."""
        last_groups = None if state.last_groups is None else [bytes.fromhex(name) for name in state.last_groups]
        num_returned = await self.store.disk(self.store.buffer.reconcile, state.step, last_groups)
        if num_returned:
            log.warning("the learner is at step %d: %d groups are ready again", state.step, num_returned)
        poisoned = await self.store.disk(self.store.buffer.release_poisoned)
        if poisoned:
            num_failed, num_groups = MAX_FAILED_STEPS, len(poisoned)
            log.warning("the learner failed %d times on the same %d groups: they are released", num_failed, num_groups)
        for group_id in poisoned:
            self.step_peers.note_poisoned(group_id, self.store.reader.held(group_id))
        self.slots.set_held(self.store.reader.own_held())
        self.context.state.last_reused_version = self.step + 1  # weights are offered before their step is recorded
        if state.last_report is not None and state.step > self.step:
            await self.reporter.note(state.last_report)  # the daemon ended before the learner's reply arrived
        self.context.state.step = self.context.state.saved_step = state.step
        self.context.state.go_to(state.policy_version)
        self.context.evaluations.go_back(state.step)
        if state.weights is not None:
            await self.deliver(state.weights, state.proof)

    async def _resume_after_pause(self) -> bool:
        """Reconcile with the workers that started after a pause, unless they have the last step and its weights.

        Return whether there was a pause since the last call.
        """
        if self._num_pauses == self.context.pause.num_pauses:
            return False
        self._num_pauses = self.context.pause.num_pauses
        state = await self.learner.start()
        await self.generation.start()
        if state.step < self.step:
            # before `resume`: the next start expects no other groups to be READY again
            cause = f"the learner is at step {state.step} after a pause"
            self.context.events.write("step_lost", step=state.step + 1, error=cause)
        if (state.step, state.policy_version) != (self.step, self.generation.policy_version):
            await self.resume(state)
        return True

    async def _evaluate_if_due(self, *, is_last: bool = False) -> None:
        """Evaluate pass@1 by greedy decoding on held-out problems at step 0, at each interval and at the last step."""
        if not self._is_evaluation_due(is_last=is_last):
            return
        async with self.context.pause.working():
            await self._resume_after_pause()
            if self._is_evaluation_due(is_last=is_last):
                await self.evaluator.evaluate(step=self.step)

    def _is_evaluation_due(self, *, is_last: bool) -> bool:
        every_steps = self.context.manifest.eval.every_steps
        is_due = bool(every_steps) and (is_last or self.step % every_steps == 0)
        return is_due and self.context.settings.generates


class WeightSync:
    """Delivery of one step's weights: call `take` with weights and proof, then `finish` with the reply, or `abandon`.

    The learner publishes the weights, then computes their proof (log-probs of fixed probe tokens), then writes its
    checkpoint. The generator loads the weights meanwhile, so that its first new token does not wait for the checkpoint.

        learner    | step | publish | prove | checkpoint ........ | reply
        generator  |   old weights  | load | probe | new weights
    """

    def __init__(self, deliver: DeliverWeights) -> None:
        self._deliver = deliver
        self._proof: ProofToCome = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    def take(self, news: PublishedWeights | WeightProof) -> None:
        """Take the published weights, or their proof, as the learner reports them.

        A learner that dies while the step waits for disk space repeats it, and reports both again.
        """
        if not isinstance(news, PublishedWeights):
            if not self._proof.done():
                self._proof.set_result(news)
        elif self._task is None:
            self._task = asyncio.create_task(self._deliver(news, self._proof), name="deliver-weights")

    async def finish(self, reply: TrainReply) -> None:
        """Wait until the generator serves the new weights and has verified them."""
        if self._task is not None:
            await self._task
        elif reply.weights is not None:  # a repeated step: the learner reported no progress
            await self._deliver(reply.weights, reply.proof)

    async def abandon(self) -> None:
        """Finish the transfer without a proof after the learner died."""
        if not self._proof.done():
            self._proof.set_result(None)
        if self._task is not None:
            await self._task

    def cancel(self) -> None:
        """Cancel the transfer, because the step ended without it or the node stops."""
        if self._task is not None and not self._task.cancel() and not self._task.cancelled():
            self._task.exception()  # asyncio reports an error that no code has seen


async def update_engine(
    weights: PublishedWeights, proof: Proof, *, context: NodeContext, generation: Generation
) -> None:
    """Wait until the generator serves a version and has verified it. A worker that dies restarts with that version.

    A learner that is started again removes its published files, and the generator then keeps its former version. Raise
    ModelError if the generator refuses several versions and has not served any.
    """
    try:
        await generation.update_weights(weights, proof)
        context.failures.succeeded(WEIGHT_SYNC)
    except (WorkerError, ModelError) as error:
        if context.failures.failed(WEIGHT_SYNC, error):
            context.events.write("weight_sync_failed", version=weights.version, error=str(error))
        streak = context.failures.streak(WEIGHT_SYNC)
        if isinstance(error, ModelError) and streak.is_failing and not streak.has_succeeded:
            raise
        await generation.start()
    if generation.policy_version != weights.version:
        return
    done_at_s = weights.step_done_at_s
    after_step_s = None if done_at_s is None else round(time.monotonic() - done_at_s, 4)
    transfer = generation.weight_transfer
    context.events.write("served", version=weights.version, after_step_s=after_step_s, transfer=transfer)
