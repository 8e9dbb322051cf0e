"""The train loop: READY groups become a step, the step new weights, the weights the generator's next version.

consumes: groups of one step     produces: weights n+1, evaluations
waits for: enough READY groups, or the patience limit (then own groups alone)
unblocked by: intake

The slots of a step are freed only after the generator serves the new version. A group that a dead learner had in hand
goes back to READY unless the learner's checkpoint, which names the groups of its last step, shows that it was trained.
One that the learner failed on several times is released, so that no group can hold the node up.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ftis_node.algorithms import pass_rates
from ftis_node.errors import WorkerDiedError, WorkerTaskError
from ftis_node.learner.messages import TrainGroup
from ftis_node.node.startup.worker_settings import dtype_of
from ftis_node.node.supervision.task_monitor import waiting_for
from ftis_node.node.training.division import note_signals
from ftis_node.node.training.evaluation import evaluate_tasks
from ftis_node.node.training.logprob_mismatch import Change, MismatchWatch, limits_of, warning_of
from ftis_node.node.training.peer_weights import PeerWeights
from ftis_node.node.training.token_budget import is_learned_out
from ftis_node.node.training.tracking import track_step
from ftis_node.node.training.weight_sync import HandOver, hand_over
from ftis_node.replay.failures import MAX_FAILED_STEPS
from ftis_node.replay.lifecycle import (
    ReleaseReason,
    choose_newest,
    choose_same_prompts,
    choose_sapo,
    choose_useful,
)
from ftis_node.swarm.peer_guard import Place
from ftis_node.swarm.reputation.reasons import sentence
from ftis_node.swarm.reputation.score import Behaviour

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftis_node.config.manifest import Share
    from ftis_node.learner.messages import LearnerState, StepReport
    from ftis_node.node.context import Parts
    from ftis_node.node.peers.manager import PeerBook
    from ftis_node.node.training.step_gate import StepGate
    from ftis_node.node.training.weight_sync import GiveWeights
    from ftis_node.records.group import GroupHeader
    from ftis_node.replay.buffer import StoredGroup
    from ftis_node.replay.lifecycle import ChoiceRule
    from ftis_node.telemetry.events import EventTrail

log = logging.getLogger(__name__)

UNDERSTATED = "understated"
UNREADABLE = "malformed"


class TrainLoop:
    """One step after the other, up to `last_step` where given."""

    def __init__(
        self, parts: Parts, gate: StepGate, *, last_step: int | None, give_weights: GiveWeights | None = None
    ) -> None:
        """`give_weights` gets what each step makes, in the place of this node's generation worker."""
        self._parts = parts
        self._gate = gate
        self._give_weights = give_weights or hand_over
        self._last_step = last_step
        self._peer_weights = PeerWeights()
        self._mismatch = MismatchWatch(limits_of(parts.settings.mismatch, dtype=dtype_of(parts.settings)))

    @property
    def step(self) -> int:
        """The last step that was done."""
        return self._parts.state.step

    async def run(self) -> None:
        """Until the last step is done, or until cancelled."""
        with waiting_for("the learner worker"):  # its supervisor has the limits
            state = await self._parts.learner.start()
        await self.resume(state)
        await self._evaluate_if_due()
        while not self._is_done():
            with waiting_for(f"the groups of step {self.step + 1}"):
                if not await self._gate.wait(self.step + 1):
                    break
            await self._train_in_turn(await self._take(self.step + 1))
            await self._evaluate_if_due()
        await self._evaluate_if_due(is_last=True)

    def _is_done(self) -> bool:
        """Whether the budget is used up, counted over all lives of the home."""
        if self._last_step is not None and self.step >= self._last_step:
            return True
        if is_learned_out(self._parts):
            log.info("the budget of tokens to train on is used up at step %d: the node ends", self.step)
            return True
        return False

    async def _take(self, step: int) -> list[StoredGroup]:
        """READY -> TAKEN for the groups of a step; what the run's rule passes over is released."""
        parts = self._parts
        own, foreign = self._gate.shares(step)
        groups, discarded = await parts.disk(parts.buffer.take, step, own=own, foreign=foreign, rule=self._rule(step))
        write_taken(parts.events, groups, step=step)
        for passed_over in discarded:
            parts.events.write("released", group=passed_over.id, reason=ReleaseReason.DISCARDED)
        note_signals(parts, step, groups, discarded)
        return groups

    def _rule(self, step: int) -> ChoiceRule:
        """How this run chooses a step's groups."""
        wanted, domain = self._parts.manifest.step, self._parts.own_domain
        if wanted.group_selection == "sapo":
            return partial(choose_sapo, seed=step, domain=domain)
        neighbour = self._parts.peers.share_cap().neighbour
        if wanted.prompt_sharing == "horizontal":
            return partial(choose_same_prompts, neighbour=neighbour)
        if wanted.group_selection == "useful":
            rates = pass_rates(self._parts.reader.own_rewards())
            return partial(choose_useful, pass_rates=rates, neighbour=neighbour, domain=domain, turn=step)
        return partial(choose_newest, neighbour=neighbour, domain=domain, turn=step)

    async def _train_in_turn(self, groups: Sequence[StoredGroup]) -> None:
        """One step; where the workers take turns, the generator sleeps until it has new weights, or the step's end."""
        if not self._parts.arrangement.takes_turns:
            await self._train(groups)
            return
        with waiting_for("the generator to sleep"):  # its supervisor has the limits
            await self._parts.generation.sleep(discard=bool(groups))  # a step without any makes no new weights
        await self._train(groups)
        with waiting_for("the generator to wake"):
            await self._parts.generation.wake()

    async def _train(self, groups: Sequence[StoredGroup]) -> None:
        """One step, from TAKEN groups to RELEASED ones and a new version in the generator."""
        parts, step = self._parts, self.step + 1
        batch = self._batch(groups)
        if groups and not batch:
            await parts.disk(parts.buffer.release_step, step, ReleaseReason.REFUSED)
            return
        under_way = HandOver(parts, self._give_weights)
        try:
            with waiting_for(f"step {step} in the learner"):  # its supervisor has the limits
                reply = await parts.learner.train(batch, step=step, on_published=under_way.take)
            await self._note(reply.report)
            self._weigh_peers(reply.report, batch)
            with waiting_for(f"weights {step} in the generator"):
                await under_way.finish(reply)
        except (WorkerDiedError, WorkerTaskError) as error:
            if isinstance(error, WorkerTaskError):
                if all(group.own for group in groups):
                    await parts.disk(parts.buffer.note_failed, step)
                    raise
                parts.learner.restart(f"failed step {step}")  # back to its checkpoint: who knows what is half done
            parts.events.write("step_lost", step=step, error=str(error))
            await parts.disk(parts.buffer.note_failed, step)
            with waiting_for(f"weights {step} in the generator"):
                await under_way.give_up()
            with waiting_for("the learner worker"):
                state = await parts.learner.start()
            await self.resume(state)
            return
        finally:
            under_way.cancel()
        changed_nothing = reply.report.refused and reply.report.num_updates == 0
        reason = ReleaseReason.REFUSED if changed_nothing else ReleaseReason.TRAINED
        await parts.disk(parts.buffer.release_step, step, reason)
        if reason is ReleaseReason.TRAINED and not reply.report.skipped:
            left_out = {*reply.report.understated, *reply.report.unreadable}
            for group in groups:
                if group.id.hex() not in left_out:
                    with parts.guard.work_for(group.sender, Place.COUNT):
                        note_teacher(parts.peers, group)
        self._note_understated(reply.report, groups)
        self._note_unreadable(reply.report, groups)
        parts.state.saved_step = reply.saved_step
        max_disk_bytes = parts.settings.buffer.max_disk_bytes
        await parts.disk(parts.buffer.prune, max_disk_bytes=max_disk_bytes, saved_step=reply.saved_step)
        parts.slots.hold(parts.reader.own_held())

    def _batch(self, groups: Sequence[StoredGroup]) -> list[TrainGroup]:
        """The groups as the learner takes them, less those of a peer that cannot be made so."""
        batch = []
        for group in groups:
            with self._parts.guard.work_for(group.sender, Place.BATCH, passes=(Exception,) if group.own else ()):
                batch.append(self._as_trained(group))
        return batch

    def _as_trained(self, group: StoredGroup) -> TrainGroup:
        share = self._parts.manifest.step.prompt_sharing
        return train_group(
            group,
            share=share,
            of_own_weights=is_of_own_weights(self._parts, group),
            weight=1.0 if group.own else self._peer_weights.weight(group.sender),
        )

    def _weigh_peers(self, report: StepReport, batch: Sequence[TrainGroup]) -> None:
        """What the step says of the peers' agreement counts from the next one on; the trail has what counted in it."""
        if self._parts.manifest.method.peer_weights is None or report.repeated:
            return
        weights = {group.sender: round(group.weight, 4) for group in batch if not group.own}
        self._parts.events.write("peer_weights", step=report.step, weights=weights)
        self._peer_weights.note(report.agreement, report.own_agreement)

    def _note_understated(self, report: StepReport, groups: Sequence[StoredGroup]) -> None:
        """The senders of what the learner left out as a lie. A step that is reported again was noted before."""
        parts = self._parts
        if report.repeated:
            return
        for group in groups:
            if group.id.hex() not in report.understated:
                continue
            sender, detail = group.sender, f"{UNDERSTATED}: {sentence(UNDERSTATED)}"
            with parts.guard.work_for(sender, Place.COUNT):
                parts.counters.refused[UNDERSTATED] += 1
                parts.registry.seen(sender).refused[UNDERSTATED] += 1
                parts.peers.note(sender, Behaviour.LIED, reason=UNDERSTATED, detail=detail)
                parts.events.write(UNDERSTATED, group=group.id, sender=sender, step=report.step)

    def _note_unreadable(self, report: StepReport, groups: Sequence[StoredGroup]) -> None:
        """Charge the senders of bodies that the learner could not unpack; log own ones as an error."""
        unreadable = [group for group in groups if group.id.hex() in report.unreadable]
        for group in unreadable if not report.repeated else ():
            log.error("step %d left group %s out: its body cannot be unpacked", report.step, group.id.hex()[:12])
            if not group.own:
                with self._parts.guard.work_for(group.sender, Place.COUNT):
                    self._parts.peers.note(group.sender, Behaviour.FAULT, reason=UNREADABLE)

    async def resume(self, state: LearnerState) -> None:
        """The buffer follows the checkpoint that the learner stands on, at start and after the learner's death."""
        last_groups = None if state.last_groups is None else [bytes.fromhex(name) for name in state.last_groups]
        returned = await self._parts.disk(self._parts.buffer.reconcile, state.step, last_groups)
        if returned:
            log.warning("the learner stands at step %d; %d groups are ready again", state.step, returned)
        await self._release_poisoned()
        self._parts.slots.hold(self._parts.reader.own_held())
        self._parts.state.last_reused_version = self.step + 1  # weights are offered before their step is noted
        if state.last_report is not None and state.step > self.step:
            await self._note(
                state.last_report
            )  # the learner finished this step, but the daemon did not live to hear of it
        self._parts.state.step = self._parts.state.saved_step = state.step
        self._parts.state.policy_version = state.policy_version
        if state.weights is not None:
            with waiting_for(f"weights {state.policy_version} in the generator"):
                await self._give_weights(self._parts, state.weights, state.proof)

    async def _release_poisoned(self) -> None:
        """What the learner failed on again and again is in no further step, or the node would never get past it."""
        poisoned = await self._parts.disk(self._parts.buffer.release_poisoned)
        for group_id in poisoned:
            self._parts.events.write("released", group=group_id, reason=ReleaseReason.POISONED)
            held = self._parts.reader.held(group_id)
            if held is not None and not held.own:
                self._parts.peers.note(held.sender, Behaviour.FAULT, reason=ReleaseReason.POISONED)
        if poisoned:
            log.warning("the learner failed %d times on the same %d groups: left out", MAX_FAILED_STEPS, len(poisoned))

    async def _note(self, report: StepReport) -> None:
        """The step's figures: into the event trail, the status, the trackers and, where something is wrong, the log."""
        state = self._parts.state
        state.step, state.policy_version = report.step, report.policy_version
        self._parts.counters.last_report = report
        generation_tokens_per_s = round(self._parts.generation.tokens_per_s, 1)
        fields = msgspec.to_builtins(report) | {"generation_tokens_per_s": generation_tokens_per_s}
        self._parts.events.write("step", **fields)
        for taught in report.by_sender:
            if taught.sender and not taught.own:
                with self._parts.guard.work_for(taught.sender, Place.COUNT):
                    self._parts.registry.entry(taught.sender).note_taught(taught)
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
        self._parts.counters.mismatch_report = report
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

    async def _evaluate_if_due(self, *, is_last: bool = False) -> None:
        """Greedy pass@1 on held-out problems at step 0, every so many steps, and at the last one; by the own engine."""
        every_steps = self._parts.manifest.eval.every_steps
        due = every_steps and (is_last or self.step % every_steps == 0)
        if due and self._parts.settings.generates:
            with waiting_for("an evaluation"):  # each of its requests has a limit
                await evaluate_tasks(self._parts, step=self.step)


def write_taken(events: EventTrail, groups: Sequence[StoredGroup], *, step: int) -> None:
    """A line a group, with where it came from: the line of its admission may be damaged one day, and the buffer too."""
    for group in groups:
        events.write("taken", group=group.id, step=step, sender=group.sender, number=group.number)


def note_teacher(peers: PeerBook, group: StoredGroup) -> None:
    """Credits the sender of a group of unequal rewards; the advantages of any other are 0."""
    if not group.own and len(set(group.rewards)) > 1:
        peers.note(group.sender, Behaviour.TAUGHT)


def is_of_own_weights(parts: Parts, group: GroupHeader | StoredGroup) -> bool:
    """Whether a group of another node says that this node's weights sampled it, and the operator trusts its sender.

    What anybody else says of our weights is a claim: it must move no figure of ours, and no defence.
    """
    return group.weights_of == parts.identity.peer_id and parts.peers.is_trusted(group.sender)


def train_group(group: StoredGroup, *, share: Share, of_own_weights: bool = False, weight: float = 1.0) -> TrainGroup:
    """Return a stored group as the learner takes it. `of_own_weights` as `is_of_own_weights` says.

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
