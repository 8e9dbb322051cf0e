"""Nodes with different domains in one swarm: their directory records, their pulls, the groups of their steps."""

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
from ftis_node.node.loop_wiring import NodeComponents, Wiring
from ftis_node.node.peers.announcements import AnnouncementHandler
from ftis_node.node.startup.assemble import running_components
from ftis_node.node.startup.run_plan import RunPlan, plan_run
from ftis_node.telemetry.events import read_events
from tests.node.light_swarm import LightSwarm
from tests.node.support import manifest_text
from tests.waiting import eventually

NEAR, FAR = "arithmetic:add", "arithmetic:sub"
STEPS = 3

pytestmark = pytest.mark.timeout(600)  # includes training the models


def light_manifest(share: float | None) -> RunManifest:
    step = {"own_groups": 4, "foreign_groups": 4, "own_domain_fraction": share}
    return RunManifest(name="light", task=f"{NEAR}+{FAR}", step=step)


def manifest_of(share: float | None) -> RunManifest:
    text = manifest_text(foreign_wait_s=60.0).replace('task = "arithmetic"', f'task = "{NEAR}+{FAR}"')
    manifest = parse_manifest(text, source="test")
    return manifest.model_copy(
        update={
            "step": manifest.step.model_copy(update={"own_domain_fraction": share}),
            "eval": manifest.eval.model_copy(update={"every_steps": 0}),
        }
    )


def domain_of(node: StubNode, peer: StubNode) -> str | None:
    """Return the domain in a peer's directory record; None before the node read the record."""
    record = node.parts.peers.registry.record_of(peer.parts.context.peer_id)
    return None if record is None else record.domain


async def test_a_domain_is_published_and_shown_and_a_foreign_one_counts_as_none(tmp_path):
    swarm = LightSwarm(tmp_path, light_manifest(None))
    async with (
        swarm.node(1) as alice,
        swarm.node(2, domain=NEAR) as honest,
        swarm.node(3, domain="gsm8k+\x1b[2J") as mallory,
    ):
        await eventually(lambda: domain_of(alice, honest) is not None and domain_of(alice, mallory) is not None)
        assert (domain_of(alice, honest), domain_of(alice, mallory), domain_of(honest, alice)) == (NEAR, "", "")
        assert alice.parts.peers.registry.peers[honest.parts.context.peer_id].as_dict()["domain"] == NEAR


@pytest.mark.parametrize(("share", "pulled"), [(None, (0, 8)), (0.75, (6, 8))])
async def test_groups_of_the_wanted_domain_are_pulled_though_others_have_filled_the_stock(
    tmp_path, monkeypatch, share, pulled
):
    """The stock is 8 groups. Groups of the other domain fill it until the wanted domain has groups."""
    monkeypatch.setattr(AnnouncementHandler, "_is_assigned", lambda *_: False)
    swarm = LightSwarm(tmp_path, light_manifest(share))
    async with (
        swarm.node(1, domain=NEAR, pull_policy="needed") as reader,
        swarm.node(2, domain=NEAR) as near,
        swarm.node(3, domain=FAR) as far,
    ):
        await eventually(lambda: domain_of(reader, near) is not None and domain_of(reader, far) is not None)
        await swarm.publish(far, 12, task=FAR)
        tasks = reader.parts.store.reader.ready_foreign_tasks
        await eventually(lambda: tasks() == {FAR: 8})
        await swarm.publish(near, 12, task=NEAR)
        if pulled[0]:
            await eventually(lambda: tasks().get(NEAR) == pulled[0])
        await asyncio.sleep(1.2)  # the pull loop looks once more
        assert (tasks().get(NEAR, 0), tasks()[FAR]) == pulled


async def _steps(
    folder: Path, models: Mapping[str, Path], share: float | None, domains: tuple[str, ...]
) -> list[list[Counter[str]]]:
    """Run real nodes of these domains in rounds; return the tasks of the foreign groups per node and step."""
    (run := folder / "run.toml").write_text(manifest_of(share).to_toml())
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
        members.append(RoundMember(parts.context.peer_id, parts.peers.counters, STEPS, quota, validator))
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


@pytest.mark.parametrize(("share", "of_own"), [(0.75, 3), (0.0, 0)])
async def test_real_nodes_reach_the_share_and_the_only_node_of_a_domain_does_not_starve(
    tmp_path, tiny_models, share, of_own
):
    one, _, lone = await _steps(tmp_path, tiny_models, share, (NEAR, NEAR, FAR))
    assert one == [Counter({NEAR: of_own, FAR: 4 - of_own})] * STEPS
    assert lone == [Counter({NEAR: 4})] * STEPS, "no other node has its domain: other groups fill the step"
