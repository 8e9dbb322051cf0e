"""One trial of an experiment: a swarm of nodes with one method and one seed, from step 0 to the last.

    models --> members, each with the node's own loops --> loopback swarm --> event trails --> TrialResult
                 generate -> publish -> pull -> intake (the door) -> replay buffer -> train

There is no training loop here: the members are nodes, with parts that live in this process (`in_process.py`) and a gate
that keeps them in step (`lockstep.py`). What happened is read from their event trails, as `demo` does.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ftis_node.config.home import Home
from ftis_node.config.node import GenerationSection, LearnerSection, LoraSection, NodeSettings, SwarmSection
from ftis_node.gossip.loopback import LoopbackSwarm
from ftis_node.lab.byzantine import ByzantineNode
from ftis_node.lab.in_process import InProcessGeneration, InProcessMakers
from ftis_node.lab.lockstep import Lockstep
from ftis_node.lab.trial_result import TrialResult, read_member
from ftis_node.node.build import built_parts
from ftis_node.node.intake import IntakeLoop
from ftis_node.node.node import rollout_loops
from ftis_node.node.plan import RunPlan
from ftis_node.node.pull import PullLoop
from ftis_node.node.train import TrainLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from ftis_node.config.manifest import RunManifest
    from ftis_node.lab.byzantine import Lie
    from ftis_node.lab.delay import Delay
    from ftis_node.lab.trial_result import MemberResult
    from ftis_node.node.figures import Figures
    from ftis_node.node.parts import Parts
    from ftis_node.records.codec import CodecName

NEVER = 100_000  # steps between checkpoints: a trial that is cut short is done again
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Member:
    """One node of the swarm. `name` stands in the results; a node with a `lie` does harm."""

    name: str
    model: str
    lora: bool = False
    lie: Lie | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """What to run: `manifest` says what a step takes and how it learns; the specs have this machine's paths in them.

    `labels` are the trial's place in its experiment, `key` its name among stored results.
    """

    key: str
    labels: dict[str, Any]
    manifest: RunManifest
    members: tuple[Member, ...]
    task_spec: str
    eval_specs: tuple[str, ...]
    delay: Delay
    seed: int
    steps: int
    device: Literal["auto", "cpu", "cuda"] = "auto"
    lora_adapter: LoraSection = LoraSection()
    max_batch: int = 256
    codec: CodecName = "exact"


@dataclass(frozen=True, slots=True)
class HonestSender:
    """A member as the rounds count it."""

    parts: Parts

    @property
    def peer_id(self) -> str:
        """Its peer id."""
        return self.parts.identity.peer_id

    @property
    def groups_sent(self) -> int:
        """Its groups so far that were announced."""
        return self.parts.figures.groups_sent


def run_trial(
    trial: Trial, on_progress: Callable[[int], None] = lambda step: None, *, scratch: Path | None = None
) -> TrialResult:
    """Runs a trial in this process; `on_progress` hears of the last step that a node has done.

    The nodes' homes lie in a folder inside `scratch` and are removed at the end. Raises FtisError.
    """
    started_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trial-", dir=scratch) as folder:
        members = asyncio.run(_run(trial, Path(folder), on_progress))
    return TrialResult(
        key=trial.key,
        labels=trial.labels,
        manifest=trial.manifest.model_dump(mode="json", exclude_none=True),
        steps=trial.steps,
        seed=trial.seed,
        members=members,
        seconds=round(time.monotonic() - started_at, 2),
    )


async def _run(trial: Trial, folder: Path, on_progress: Callable[[int], None]) -> list[MemberResult]:
    """The swarm: all members start, take their steps together, and are read when the last has ended."""
    swarm = LoopbackSwarm()
    lockstep = Lockstep(groups_per_step=trial.manifest.step.own_groups)
    async with AsyncExitStack() as stack:
        nodes = []
        for index, member in enumerate(trial.members):
            home = _make_home(folder / f"{index}-{member.name}", trial.seed, index)
            plan = RunPlan(trial.manifest, trial.task_spec, trial.eval_specs)
            makers = InProcessMakers(swarm, delay=trial.delay, seed=trial.seed * len(trial.members) + index)
            nodes.append(await stack.enter_async_context(built_parts(_settings(trial, member), plan, home, makers)))
        await _live_together(trial, nodes, lockstep, on_progress)
        return [
            read_member(member.name, parts, groups_per_step=trial.manifest.step.own_groups)
            for member, parts in zip(trial.members, nodes, strict=True)
            if member.lie is None
        ]


async def _live_together(
    trial: Trial, nodes: list[Parts], lockstep: Lockstep, on_progress: Callable[[int], None]
) -> None:
    """Until the last member has ended; the first that fails ends all and is raised as itself."""
    for member, parts in zip(trial.members, nodes, strict=True):
        if member.lie is None:
            lockstep.enter(HonestSender(parts), parts.figures)
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_watch([parts.figures for parts in nodes], on_progress))
            lives = [
                tasks.create_task(_live(trial, member, parts, lockstep, index), name=member.name)
                for index, (member, parts) in enumerate(zip(trial.members, nodes, strict=True))
            ]
            await asyncio.wait(lives)
            watching.cancel()
    except BaseExceptionGroup as group:
        raise first_error(group) from group


async def _live(trial: Trial, member: Member, parts: Parts, lockstep: Lockstep, index: int) -> None:
    if member.lie is not None:
        assert isinstance(parts.generation, InProcessGeneration)
        liar = ByzantineNode(parts, parts.generation, lie=member.lie, seed=trial.seed + index)
        lockstep.enter(liar)
        await liar.run(lockstep, steps=trial.steps)
        return
    intake = IntakeLoop(parts)
    loops = rollout_loops(parts, intake, PullLoop(parts, intake))
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(loop, name=name) for name, loop in loops.items()]
        await TrainLoop(parts, lockstep, last_step=trial.steps).run()
        for task in running:
            task.cancel()


async def _watch(figures: list[Figures], on_progress: Callable[[int], None]) -> None:
    while True:
        on_progress(max(each.step for each in figures))
        await asyncio.sleep(POLL_S)


def first_error(error: BaseException) -> BaseException:
    """What stands at the bottom of nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _make_home(root: Path, seed: int, index: int) -> Home:
    """A home whose identity, and with it the order of prompts, follows from the seed."""
    home = Home(root)
    home.create()
    home.identity.touch(mode=0o600)
    home.identity.write_text(hashlib.sha256(f"{seed}/{index}".encode()).hexdigest() + "\n")
    return home


def _settings(trial: Trial, member: Member) -> NodeSettings:
    step = trial.manifest.step
    return NodeSettings(
        model=member.model,
        name=member.name,
        engine="torch",
        lora=member.lora,
        device=trial.device,
        seed=trial.seed,
        generation=GenerationSection(groups_in_flight=max(1, step.own_groups), max_batch=trial.max_batch, threads=1),
        learner=LearnerSection(threads=1, checkpoint_every_steps=NEVER),
        lora_adapter=trial.lora_adapter,
        swarm=SwarmSection(codec=trial.codec),
    )
