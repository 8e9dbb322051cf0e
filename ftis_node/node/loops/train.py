"""The train loop: READY groups become a step, the step new weights, the weights the generator's next version.

    consumes: groups of one step     produces: weights n+1, evaluations
    waits for: enough READY groups, or the patience limit (then own groups alone)
    unblocked by: intake

The slots of a step are freed only after the generator serves the new version. The groups of a step in which the
learner died go back to READY. The exception is a step that the learner's checkpoint proves: it names the groups of its
last step. A group that the learner failed on several times is released, so that no group can hold the node up.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ftis_node.errors import WorkerDiedError, WorkerTaskError
from ftis_node.learner.messages import TrainGroup
from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.node.training.peer_weights import PeerWeights
from ftis_node.node.training.weight_sync import WeightSync
from ftis_node.replay.failures import MAX_FAILED_STEPS
from ftis_node.replay.lifecycle import ReleaseReason
from ftis_node.swarm.peer_guard import Place
from ftis_node.swarm.reputation.reasons import sentence
from ftis_node.swarm.reputation.score import Behaviour

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.config.step import Share
    from ftis_node.learner.messages import LearnerState, StepReport
    from ftis_node.node.context import NodeContext
    from ftis_node.node.peers.manager import PeerManager
    from ftis_node.node.peers.registry import PeerRegistry
    from ftis_node.node.protocols import Generation, Learning
    from ftis_node.node.state import NodeCounters
    from ftis_node.node.supervision.disk_thread import DiskThread
    from ftis_node.node.training.buffer_limits import BufferLimits
    from ftis_node.node.training.evaluation import Evaluator
    from ftis_node.node.training.slots import SlotPool
    from ftis_node.node.training.step_gate import StepGate
    from ftis_node.node.training.step_report import StepReporter
    from ftis_node.node.training.step_selection import StepSelection
    from ftis_node.node.training.step_shares import StepShares
    from ftis_node.node.training.weight_sync import DeliverWeights
    from ftis_node.replay.buffer import ReplayBuffer, StoredGroup
    from ftis_node.replay.reader import ReplayReader
    from ftis_node.swarm.peer_guard import PeerGuard

log = logging.getLogger(__name__)

UNDERSTATED = "understated_logprobs"
UNREADABLE = "malformed"


class TrainLoop:
    """One step after the other, up to `last_step` where given."""

    def __init__(
        self,
        *,
        context: NodeContext,
        gate: StepGate,
        selection: StepSelection,
        learner: Learning,
        generation: Generation,
        deliver: DeliverWeights,
        buffer: ReplayBuffer,
        reader: ReplayReader,
        disk: DiskThread,
        slots: SlotPool,
        limits: BufferLimits,
        peers: PeerManager,
        registry: PeerRegistry,
        counters: NodeCounters,
        guard: PeerGuard,
        step_shares: StepShares,
        reporter: StepReporter,
        evaluator: Evaluator,
        takes_turns: bool,
        last_step: int | None,
    ) -> None:
        """`deliver` takes the weights of each step. `takes_turns`: the workers share one GPU's memory in turns."""
        self._context = context
        self._gate = gate
        self._selection = selection
        self._learner = learner
        self._generation = generation
        self._deliver = deliver
        self._buffer = buffer
        self._reader = reader
        self._disk = disk
        self._slots = slots
        self._limits = limits
        self._peers = peers
        self._registry = registry
        self._counters = counters
        self._guard = guard
        self._step_shares = step_shares
        self._reporter = reporter
        self._evaluator = evaluator
        self._takes_turns = takes_turns
        self._last_step = last_step
        self._peer_weights = PeerWeights()

    @property
    def step(self) -> int:
        """The last step that was done."""
        return self._context.state.step

    async def run(self) -> None:
        """Run until the last step is done, or until canceled."""
        with waiting_for("the learner worker"):  # its supervisor has the limits
            state = await self._learner.start()
        await self.resume(state)
        await self._evaluate_if_due()
        while not self._is_done():
            with waiting_for(f"the groups of step {self.step + 1}"):
                if not await self._gate.wait(self.step + 1):
                    break
            own, foreign = self._gate.shares(self.step + 1)
            groups = await self._selection.take(self.step + 1, own=own, foreign=foreign)
            await self._train_in_turn(groups)
            await self._evaluate_if_due()
        await self._evaluate_if_due(is_last=True)

    def _is_done(self) -> bool:
        """Return whether the budget is used up, counted over all lives of the home."""
        if self._last_step is not None and self.step >= self._last_step:
            return True
        if self._step_shares.is_learned_out:
            log.info("the budget of tokens to train on is used up at step %d: the node ends", self.step)
            return True
        return False

    async def _train_in_turn(self, groups: Sequence[StoredGroup]) -> None:
        """Run one step. If the workers take turns, the generator sleeps until new weights, or the end of the step."""
        if not self._takes_turns:
            await self._train(groups)
            return
        with waiting_for("the generator to sleep"):  # its supervisor has the limits
            await self._generation.sleep(discard=bool(groups))  # a step without any makes no new weights
        await self._train(groups)
        with waiting_for("the generator to wake"):
            await self._generation.wake()

    async def _train(self, groups: Sequence[StoredGroup]) -> None:
        """Train one step: from TAKEN groups to RELEASED ones and a new version in the generator."""
        step = self.step + 1
        batch = self._batch(groups)
        if groups and not batch:
            await self._disk(self._buffer.release_step, step, ReleaseReason.REFUSED)
            return
        under_way = WeightSync(self._deliver)
        try:
            with waiting_for(f"step {step} in the learner"):  # its supervisor has the limits
                reply = await self._learner.train(batch, step=step, on_published=under_way.take)
            await self._reporter.note(reply.report)
            self._weigh_peers(reply.report, batch)
            with waiting_for(f"weights {step} in the generator"):
                await under_way.finish(reply)
        except (WorkerDiedError, WorkerTaskError) as error:
            if isinstance(error, WorkerTaskError):
                if all(group.own for group in groups):
                    await self._disk(self._buffer.note_failed, step)
                    raise
                self._learner.restart(f"failed step {step}")  # back to its checkpoint: who knows what is half done
            self._context.events.write("step_lost", step=step, error=str(error))
            await self._disk(self._buffer.note_failed, step)
            with waiting_for(f"weights {step} in the generator"):
                await under_way.give_up()
            with waiting_for("the learner worker"):
                state = await self._learner.start()
            await self.resume(state)
            return
        finally:
            under_way.cancel()
        changed_nothing = reply.report.refused and reply.report.num_updates == 0
        reason = ReleaseReason.REFUSED if changed_nothing else ReleaseReason.TRAINED
        await self._disk(self._buffer.release_step, step, reason)
        if reason is ReleaseReason.TRAINED and not reply.report.skipped:
            left_out = {*reply.report.understated, *reply.report.unreadable}
            for group in groups:
                if group.id.hex() not in left_out:
                    with self._guard.work_for(group.sender, Place.COUNT):
                        note_contributor(self._peers, group)
        self._note_understated(reply.report, groups)
        self._note_unreadable(reply.report, groups)
        self._context.state.saved_step = reply.saved_step
        await self._limits.prune()
        self._slots.set_held(self._reader.own_held())

    def _batch(self, groups: Sequence[StoredGroup]) -> list[TrainGroup]:
        """Return the groups in the learner's form, without those of a peer that cannot be converted."""
        batch = []
        for group in groups:
            with self._guard.work_for(group.sender, Place.BATCH, passes=(Exception,) if group.own else ()):
                batch.append(self._as_trained(group))
        return batch

    def _as_trained(self, group: StoredGroup) -> TrainGroup:
        share = self._context.manifest.step.prompt_sharing
        return train_group(
            group,
            share=share,
            of_own_weights=self._peers.is_of_own_weights(group),
            weight=1.0 if group.own else self._peer_weights.weight(group.sender),
        )

    def _weigh_peers(self, report: StepReport, batch: Sequence[TrainGroup]) -> None:
        """Apply the peers' agreement in a step from the next step on; record the weights that applied in this one."""
        if self._context.manifest.method.peer_weights is None or report.repeated:
            return
        weights = {group.sender: round(group.weight, 4) for group in batch if not group.own}
        self._context.events.write("peer_weights", step=report.step, weights=weights)
        self._peer_weights.note(report.agreement, report.own_agreement)

    def _note_understated(self, report: StepReport, groups: Sequence[StoredGroup]) -> None:
        """Charge the senders of groups that the learner left out as false claims; a repeated step is charged once."""
        if report.repeated:
            return
        for group in groups:
            if group.id.hex() not in report.understated:
                continue
            sender, detail = group.sender, f"{UNDERSTATED}: {sentence(UNDERSTATED)}"
            with self._guard.work_for(sender, Place.COUNT):
                self._counters.refused[UNDERSTATED] += 1
                self._registry.seen(sender).refused[UNDERSTATED] += 1
                self._peers.note(sender, Behaviour.FALSE_CLAIM, reason=UNDERSTATED, detail=detail)
                self._context.events.write("understated", group=group.id, sender=sender, step=report.step)

    def _note_unreadable(self, report: StepReport, groups: Sequence[StoredGroup]) -> None:
        """Charge the senders of bodies that the learner could not unpack; log own ones as an error."""
        unreadable = [group for group in groups if group.id.hex() in report.unreadable]
        for group in unreadable if not report.repeated else ():
            log.error("step %d left group %s out: its body cannot be unpacked", report.step, group.id.hex()[:12])
            if not group.own:
                with self._guard.work_for(group.sender, Place.COUNT):
                    self._peers.note(group.sender, Behaviour.FAULT, reason=UNREADABLE)

    async def resume(self, state: LearnerState) -> None:
        """Bring the buffer to the learner's checkpoint, at start and after the learner's death."""
        last_groups = None if state.last_groups is None else [bytes.fromhex(name) for name in state.last_groups]
        returned = await self._disk(self._buffer.reconcile, state.step, last_groups)
        if returned:
            log.warning("the learner is at step %d; %d groups are ready again", state.step, returned)
        await self._release_poisoned()
        self._slots.set_held(self._reader.own_held())
        self._context.state.last_reused_version = self.step + 1  # weights are offered before their step is noted
        if state.last_report is not None and state.step > self.step:
            await self._reporter.note(state.last_report)  # the daemon ended before the learner's reply arrived
        self._context.state.step = self._context.state.saved_step = state.step
        self._context.state.policy_version = state.policy_version
        if state.weights is not None:
            with waiting_for(f"weights {state.policy_version} in the generator"):
                await self._deliver(state.weights, state.proof)

    async def _release_poisoned(self) -> None:
        """Release groups on which the learner failed repeatedly, so that they cannot block the node."""
        poisoned = await self._disk(self._buffer.release_poisoned)
        for group_id in poisoned:
            self._context.events.write("released", group=group_id, reason=ReleaseReason.POISONED)
            held = self._reader.held(group_id)
            if held is not None and not held.own:
                self._peers.note(held.sender, Behaviour.FAULT, reason=ReleaseReason.POISONED)
        if poisoned:
            log.warning("the learner failed %d times on the same %d groups: left out", MAX_FAILED_STEPS, len(poisoned))

    async def _evaluate_if_due(self, *, is_last: bool = False) -> None:
        """Evaluate greedy pass@1 on held-out problems at step 0, each interval and the last step, by the own engine."""
        every_steps = self._context.manifest.eval.every_steps
        due = every_steps and (is_last or self.step % every_steps == 0)
        if due and self._context.settings.generates:
            with waiting_for("an evaluation"):  # each of its requests has a limit
                await self._evaluator.evaluate(step=self.step)


def note_contributor(peers: PeerManager, group: StoredGroup) -> None:
    """Credit the sender of a group of unequal rewards; the advantages of any other group are 0."""
    if not group.own and len(set(group.rewards)) > 1:
        peers.note(group.sender, Behaviour.CONTRIBUTED)


def train_group(group: StoredGroup, *, share: Share, of_own_weights: bool = False, weight: float = 1.0) -> TrainGroup:
    """Return a stored group as the learner takes it. `of_own_weights`: see `PeerManager.is_of_own_weights`.

    Vertical: one advantage group per generator's group. Horizontal: one per prompt, over all its generators.
    """
    return TrainGroup(
        group_id=group.id.hex(),
        advantage_key=group.id.hex() if share == "vertical" else str(group.prompt_ref),
        own=group.own,
        body=group.body,
        prompt_ids=group.prompt_ids,
        rewards=group.rewards,
        text_token_ids=group.text_token_ids,
        of_own_weights=of_own_weights,
        sender=group.sender,
        weight=weight,
    )
