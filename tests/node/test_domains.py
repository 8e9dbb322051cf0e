"""Nodes with different domains in one swarm: their directory records and the groups of their steps."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from bench.stubs.stub_node import StubNode
from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest, parse_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.gossip.loopback import LoopbackSwarm
from ftis_node.lab.experiment.in_process import InProcessNodeFactory
from ftis_node.lab.experiment.rounds import RoundBarrier, RoundGate, RoundMember, RoundQuota, Rounds, Validator
from ftis_node.lab.experiment.specs import NO_DELAY
from ftis_node.node.startup.run_plan import RunPlan, plan_run
from ftis_node.node.startup.running_components import running_components
from ftis_node.node.wiring import NodeComponents, Wiring
from ftis_node.telemetry.events import read_events
from tests.node.light_swarm import LightSwarm
from tests.node.support import manifest_text
from tests.waiting import eventually

NEAR, FAR = "arithmetic:add", "arithmetic:sub"
STEPS = 3

pytestmark = pytest.mark.timeout(600)  # includes training the models


LIGHT = RunManifest(name="light", task=f"{NEAR}+{FAR}")


def manifest_of() -> RunManifest:
    text = manifest_text(foreign_wait_s=60.0).replace('task = "arithmetic"', f'task = "{NEAR}+{FAR}"')
    manifest = parse_manifest(text, source="test")
    return manifest.model_copy(update={"eval": manifest.eval.model_copy(update={"every_steps": 0})})


def domain_of(node: StubNode, peer: StubNode) -> str | None:
    """Return the domain in a peer's directory record; None before the node read the record."""
    record = node.parts.peers.registry.record_of(peer.parts.context.peer_id)
    return None if record is None else record.domain


async def test_a_domain_is_published_and_shown_and_a_foreign_one_counts_as_none(tmp_path):
    swarm = LightSwarm(tmp_path, LIGHT)
    async with (
        swarm.node(1) as alice,
        swarm.node(2, domain=NEAR) as honest,
        swarm.node(3, domain="gsm8k+\x1b[2J") as mallory,
    ):
        await eventually(lambda: domain_of(alice, honest) is not None and domain_of(alice, mallory) is not None)
        assert (domain_of(alice, honest), domain_of(alice, mallory), domain_of(honest, alice)) == (NEAR, "", "")
        assert alice.parts.peers.registry.peers[honest.parts.context.peer_id].as_dict()["domain"] == NEAR


async def _steps(folder: Path, models: Mapping[str, Path], domains: tuple[str, ...]) -> list[list[Counter[str]]]:
    """Run real nodes of these domains in rounds; return the tasks of the foreign groups per node and step."""
    (run := folder / "run.toml").write_text(manifest_of().to_toml())
    homes = [home_of(folder / str(number), number) for number in range(len(domains))]
    plans = [plan_run(str(run), domain, home=home) for home, domain in zip(homes, domains, strict=True)]
    async with AsyncExitStack() as stack:
        return [_foreign_tasks(parts) for parts in await stepped(stack, models["s"], homes, plans)]


async def stepped(
    stack: AsyncExitStack, model: Path, homes: Sequence[Home], plans: Sequence[RunPlan]
) -> list[NodeComponents]:
    """Return real nodes on these homes after they did their steps together."""
    step, swarm = plans[0].manifest.step, LoopbackSwarm()
    nodes: list[NodeComponents] = []
    members: list[RoundMember] = []
    lockstep = RoundBarrier(Rounds(step.own_groups, step.foreign_groups, (STEPS,) * len(homes)))
    for number, (home, plan) in enumerate(zip(homes, plans, strict=True)):
        settings = NodeSettings(
            model=str(model), engine="torch", seed=number, generation={"threads": 1}, learner={"threads": 1}
        )
        makers = InProcessNodeFactory(swarm, delay=NO_DELAY, seed=number)
        parts = await stack.enter_async_context(running_components(settings, plan, home, makers))
        validator, quota = Validator(parts.context.state, parts.peers.registry), RoundQuota(lockstep.rounds)
        members.append(RoundMember(parts.context.peer_id, parts.context.counters, STEPS, quota, validator))
        lockstep.enter(members[-1])
        nodes.append(parts)
    async with asyncio.TaskGroup() as tasks:
        for parts, member in zip(nodes, members, strict=True):
            tasks.create_task(_run_steps(parts, lockstep, member))
    return nodes


def home_of(root: Path, number: int) -> Home:
    """Make a home with the identity of its number, so that its order of prompts is the same in each run."""
    home = Home(root)
    home.create()
    home.identity.touch(mode=0o600)
    home.identity.write_text(bytes([number] * 32).hex() + "\n")
    return home


async def _run_steps(parts: NodeComponents, lockstep: RoundBarrier, member: RoundMember) -> None:
    wiring = Wiring(parts)
    loops = (wiring.generate_loop, wiring.publish_loop, wiring.pull, wiring.intake)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(loop.run()) for loop in loops]
        gate = RoundGate(
            lockstep,
            member,
            settings=parts.context.manifest.step,
            slots=parts.slots,
            ready_foreign=parts.store.reader.ready_foreign,
        )
        await wiring.train_loop(gate, last_step=STEPS).run()
        for task in running:
            task.cancel()


def _foreign_tasks(parts: NodeComponents) -> list[Counter[str]]:
    """Return how many foreign groups of each task each step took, by the event log."""
    events = parts.home.events
    foreign = {event["group"]: event["prompt"] for event in read_events(events, name="admitted") if not event["own"]}
    own = {event["group"]: event["prompt"] for event in read_events(events, name="admitted") if event["own"]}
    assert {prompt.split("/")[0] for prompt in own.values()} == {parts.context.about.domain}, (
        "it generates for another domain"
    )
    steps = [Counter[str]() for _ in range(STEPS)]
    for event in read_events(events, name="taken"):
        if event["group"] in foreign:
            steps[event["step"] - 1][foreign[event["group"]].split("/")[0]] += 1
    return steps


async def test_each_real_node_generates_for_its_domain_and_trains_on_the_groups_of_others(tmp_path, tiny_models):
    one, _, lone = await _steps(tmp_path, tiny_models, (NEAR, NEAR, FAR))
    assert [step.total() for step in one] == [4] * STEPS
    assert sum(one, Counter())[FAR], "it trained on no group of another domain"
    assert lone == [Counter({NEAR: 4})] * STEPS
