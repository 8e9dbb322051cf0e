"""One trial of an experiment: a swarm of nodes with one method and one seed, from step 0 to the last.

    models --> members, each with the node's own loops --> loopback swarm --> event logs --> TrialResult
                 generate -> publish -> pull -> intake (validation) -> replay buffer -> train

The members are nodes whose parts run in this process (`in_process.py`), with a gate that makes them take turns by
rounds (`rounds.py`). The results come from their event logs.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings, SwarmSection
from ftis_node.config.roles import Delay
from ftis_node.config.workers import GenerationSection, LearnerSection, LoraSection
from ftis_node.errors import MachineError
from ftis_node.evaluation.ensemble import MIXTURES, MODES, evaluate_ensemble
from ftis_node.evaluation.members import Member
from ftis_node.gossip.loopback import LoopbackSwarm
from ftis_node.lab.experiment.byzantine import ByzantineNode
from ftis_node.lab.experiment.in_process import InProcessGeneration, InProcessLearner, InProcessNodeFactory
from ftis_node.lab.experiment.rounds import Rate, RoundBarrier, RoundGate, RoundMember, RoundQuota, Rounds, Validator
from ftis_node.lab.experiment.trial_result import FinalEvaluationResult, MemberResult, TrialResult, made_by, read_member
from ftis_node.lab.fixed_settings import FixedSettings
from ftis_node.node.context import NodeState
from ftis_node.node.peers.own_record import OwnRecord
from ftis_node.node.startup.run_plan import RunPlan
from ftis_node.node.startup.running_components import running_components
from ftis_node.node.supervision.shutdown import first_of_ours
from ftis_node.node.wiring import NodeComponents, Wiring
from ftis_node.node.worker_interfaces import Generation, Learning
from ftis_node.records.names import Codec

if TYPE_CHECKING:
    from ftis_node.lab.experiment.pairs import TrialMember

log = logging.getLogger(__name__)

NEVER = 100_000  # steps between checkpoints: an interrupted trial starts again
POLL_S = 0.5
MAX_BATCH = 256
MAX_MEMBERS = 1024  # of a trial: seeds of sampling are different for all members of all trials


@dataclass(frozen=True, slots=True)
class FinalEvaluation:
    """Tasks to evaluate, and the modes of the ensemble. `max_tokens` bounds prompt and completion together."""

    tasks: tuple[str, ...]
    modes: tuple[str, ...] = MODES
    limit: int = 256
    max_tokens: int = 96


async def run_final_evaluation(
    final_evaluation: FinalEvaluation, learners: Mapping[str, Learning], folder: Path
) -> list[FinalEvaluationResult]:
    """Write the current models to `folder` and evaluate them as an ensemble. Raises FtisError.

    Models that do not fit into memory together have no mixture. The trial is not lost.
    """
    members = []
    for name, learner in learners.items():
        assert isinstance(learner, InProcessLearner)
        learner.export(folder / name)
        members.append(Member(name, str(folder / name)))
    results, modes = [], final_evaluation.modes
    options: dict[str, Any] = {"limit": final_evaluation.limit, "max_tokens": final_evaluation.max_tokens}
    for task in final_evaluation.tasks:
        try:
            found = await evaluate_ensemble(members, task, modes=modes, engine="torch", **options)
        except MachineError as error:
            modes = tuple(mode for mode in modes if mode not in MIXTURES)
            log.warning("no mixture is evaluated: %s", error)
            found = await evaluate_ensemble(members, task, modes=modes, engine="torch", **options)
        results += [
            FinalEvaluationResult(
                task=found.task,
                mode=entry.name,
                pass_at_1=entry.result.pass_at_1,
                n=entry.result.n,
                generated_tokens=entry.generated_tokens,
                forward_tokens=entry.forward_tokens,
            )
            for entry in found.modes
        ]
    return results


@dataclass(frozen=True, slots=True)
class Trial:
    """Parameters of one trial. `manifest` sets the groups of a step and the method; the specs contain local paths.

    `labels` are the trial's cell in the matrix, `key` is its name among stored results (`runner.py`). With `apart`,
    each member is a separate swarm of one. Prompts and sampling of a member follow from its place in the swarm. If one
    is alone, `first_place` is its place in the swarm with which it is compared. The `final_evaluation` evaluates all
    members together after training. With `is_asynchronous`, a member spreads its steps evenly over `steps` rounds.
    """

    labels: dict[str, Any]
    manifest: RunManifest
    members: tuple[TrialMember, ...]
    task_spec: str
    eval_specs: tuple[str, ...]
    delay: Delay
    seed: int
    steps: int
    device: Literal["auto", "cpu", "cuda"] = "auto"
    lora_adapter: LoraSection = LoraSection()
    codec: Codec = "exact"
    apart: bool = False
    final_evaluation: FinalEvaluation | None = None
    first_place: int = 0
    is_asynchronous: bool = False
    key: str = ""

    def last_step(self, member: TrialMember) -> int:
        return self.steps if member.steps is None else member.steps

    def delay_of(self, member: TrialMember) -> Delay:
        return self.delay if member.delay is None else member.delay

    def rate(self, member: TrialMember) -> Rate:
        return Rate(self.last_step(member), self.steps) if self.is_asynchronous else Rate()

    def rounds(self, members: Sequence[TrialMember]) -> Rounds:
        step = self.manifest.step
        last_steps = [self.steps if self.is_asynchronous else self.last_step(member) for member in members]
        return Rounds(step.num_generated, step.foreign_groups, tuple(last_steps))


class TrialNode(NamedTuple):
    """A member's node, the barrier of its swarm, and its place there."""

    member: TrialMember
    parts: NodeComponents
    lockstep: RoundBarrier
    place: RoundMember

    def due(self, sender: str, step: int) -> int:
        """Return the number of groups that a sender has generated when this node takes a step."""
        return self.lockstep.due(sender, self.place.quota.rate.round_of(step))


def run_trial(
    trial: Trial, on_progress: Callable[[int], None] = lambda step: None, *, scratch: Path | None = None
) -> TrialResult:
    """Run a trial in this process; `on_progress` receives the last step that a node has finished.

    The nodes' homes are in a folder inside `scratch` and are removed at the end. Raises FtisError.
    """
    started_at, processor_at = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory(prefix="trial-", dir=scratch) as folder:
        members, final_evaluation = asyncio.run(_run(trial, Path(folder), on_progress))
    return TrialResult(
        key=trial.key,
        labels=trial.labels,
        manifest=trial.manifest.model_dump(mode="json", exclude_none=True),
        steps=trial.steps,
        seed=trial.seed,
        members=members,
        seconds=round(time.monotonic() - started_at, 2),
        final_evaluation=final_evaluation,
        made_by=made_by(),
        processor_seconds=round(time.process_time() - processor_at, 2),
    )


async def _run(
    trial: Trial, folder: Path, on_progress: Callable[[int], None]
) -> tuple[list[MemberResult], list[FinalEvaluationResult]]:
    async with AsyncExitStack() as stack:
        nodes = []
        together, swarm = RoundBarrier(trial.rounds(trial.members)), LoopbackSwarm()
        for number, member in enumerate(trial.members, start=trial.first_place):
            if trial.apart:
                together, swarm = RoundBarrier(trial.rounds([member])), LoopbackSwarm()
            home = _make_home(folder / f"{number}-{member.name}", trial.seed, number)
            plan = RunPlan(trial.manifest, trial.task_spec, trial.eval_specs, domain_spec=member.domain)
            seed = trial.seed * MAX_MEMBERS + number
            makers = InProcessNodeFactory(swarm, delay=trial.delay_of(member), seed=seed)
            parts = await stack.enter_async_context(running_components(_settings(trial, member), plan, home, makers))
            is_honest = member.lie is None
            place = RoundMember(
                parts.context.peer_id,
                parts.context.counters,
                trial.last_step(member),
                RoundQuota(
                    together.rounds, trial.rate(member), plans=trial.manifest.step.backfill_with_own and is_honest
                ),
                Validator(parts.context.state, parts.peers.registry) if is_honest else None,
            )
            together.enter(place)
            nodes.append(TrialNode(member, parts, together, place))
        _introduce(nodes)
        await _run_together(trial, nodes, on_progress)
        honest = [node for node in nodes if node.member.lie is None]
        names = {node.parts.context.peer_id: node.member.name for node in nodes}
        results = [read_member(node.member.name, node.parts, due=node.due, names=names) for node in honest]
        if trial.final_evaluation is None:
            return results, []
        learners = {node.member.name: node.parts.learner for node in honest}
        return results, await run_final_evaluation(trial.final_evaluation, learners, folder / "trained")


def _introduce(nodes: Sequence[TrialNode]) -> None:
    """Give each node the records of all, as a directory would: a false reward counts only with the same releases."""
    for parts in [node.parts for node in nodes]:
        record = OwnRecord(
            parts.context, parts.store, parts.gossip, parts.peers, parts.generation, parts.learner
        ).make()
        for node in nodes:
            node.parts.peers.registry.entry(parts.context.peer_id).record = record


async def _run_together(trial: Trial, nodes: Sequence[TrialNode], on_progress: Callable[[int], None]) -> None:
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_watch([node.parts.context.state for node in nodes], on_progress))
            lives = [
                tasks.create_task(_live(trial, node, index, learner=nodes[0].parts.generation), name=node.member.name)
                for index, node in enumerate(nodes)
            ]
            await asyncio.wait(lives)
            watching.cancel()
    except BaseExceptionGroup as group:
        raise first_of_ours(group) from group


async def _live(trial: Trial, node: TrialNode, index: int, *, learner: Generation) -> None:
    member, parts, lockstep, place = node
    if member.lie is not None:
        assert isinstance(parts.generation, InProcessGeneration)
        assert isinstance(learner, InProcessGeneration)
        byzantine = ByzantineNode(parts, parts.generation, learner, lie=member.lie, seed=trial.seed + index)
        await byzantine.run(lockstep, steps=place.last_step)
        return
    wiring = Wiring(parts)
    wiring.publish_loop.may_gather = False  # no round waits for a message to fill
    loops = (wiring.generate_loop, wiring.publish_loop, wiring.pull, wiring.intake)
    gate = RoundGate(
        lockstep, place, settings=trial.manifest.step, slots=parts.slots, ready_foreign=parts.store.reader.ready_foreign
    )
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(loop.run(), name=type(loop).__name__) for loop in loops]
        await wiring.train_loop(gate, last_step=place.last_step).run()
        for task in running:
            task.cancel()


async def _watch(states: list[NodeState], on_progress: Callable[[int], None]) -> None:
    while True:
        on_progress(max(state.step for state in states))
        await asyncio.sleep(POLL_S)


def _make_home(root: Path, seed: int, index: int) -> Home:
    """Make a home whose identity, and with it the order of prompts, follows from the seed."""
    home = Home(root)
    home.create()
    home.identity.touch(mode=0o600)
    home.identity.write_text(hashlib.sha256(f"{seed}/{index}".encode()).hexdigest() + "\n")
    return home


def _settings(trial: Trial, member: TrialMember) -> NodeSettings:
    return FixedSettings(
        model=member.model,
        name=member.name,
        engine="torch",
        lora=member.lora,
        device=trial.device,
        seed=trial.seed,
        generation=GenerationSection(max_batch=MAX_BATCH, threads=1),
        learner=LearnerSection(threads=1, checkpoint_every_steps=NEVER),
        lora_adapter=trial.lora_adapter,
        swarm=SwarmSection(codec=trial.codec),
    )
