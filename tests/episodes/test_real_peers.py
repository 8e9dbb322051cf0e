"""Episodes between two processes: a real `ftis-node join` gets honest and false ones over p2pd."""

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import pytest_asyncio

from bench.stubs.group_maker import GroupMaker
from ftis_node import __version__
from ftis_node.generation.rollouts import Rollouts
from ftis_node.models import PromptTokenizer, load_tokenizer, resolve_model
from ftis_node.models.chat_template import PromptSettings
from ftis_node.records.group import Group
from ftis_node.tasks import grader_releases
from tests.attacks.member import Member, Scene
from tests.attacks.victim import Victim, running_victim
from tests.conftest import with_sections
from tests.episodes.played import LIES, RUN, TASK, play, played_group

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

NUM_GROUPS = 6  # five refusals ban
GRADER = f"ftis-node {__version__}, {grader_releases(TASK)}".removesuffix(", ")
PERIOD_S, RUNNING_SHARE = 0.1, 0.1
MANIFEST = with_sections(
    RUN.model_copy(update={"name": "attacked-episodes"}),
    wire={"announcement_shards": 1},
    step={"own_groups": 2, "foreign_groups": 2, "foreign_wait_s": 5.0},
    eval={"every_steps": 0},
)


class Setting(NamedTuple):
    scene: Scene
    tokenizer: PromptTokenizer
    rollouts: list[Rollouts]

    def groups(self, member: Member) -> list[Group]:
        """Return the honest groups of a member, one of each problem."""
        return [
            played_group(
                rollouts, member.identity, self.tokenizer, item=TASK[index], number=index + 1, run_id=MANIFEST.run_id
            )
            for index, rollouts in enumerate(self.rollouts)
        ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setting(tmp_path_factory: pytest.TempPathFactory, tiny_models: Mapping[str, Path]) -> AsyncIterator[Setting]:
    model = resolve_model(str(tiny_models["s"]))
    tokenizer = load_tokenizer(model, prompts=PromptSettings())
    rollouts = await play(model, tokenizer, [TASK[index] for index in range(NUM_GROUPS)])
    folder = tmp_path_factory.mktemp("episodes")
    with tempfile.TemporaryDirectory(prefix="ftis") as sockets:
        async with running_victim(folder, tiny_models["s"], manifest=MANIFEST) as victim:
            yield Setting(Scene(victim, GroupMaker(tiny_models["s"], MANIFEST), Path(sockets)), tokenizer, rollouts)


@pytest.mark.parametrize("lie", LIES)
async def test_a_false_episode_is_refused_by_name_and_its_sender_banned(setting: Setting, lie: str) -> None:
    scene, (change, reason) = setting.scene, LIES[lie]
    async with scene.member() as sender:
        await sender.publish_record(grader=GRADER)
        honest = setting.groups(sender)
        await sender.offer(*(change(group, TASK[at], setting.tokenizer) for at, group in enumerate(honest)))
        await scene.victim.until(lambda: scene.victim.is_banned(sender.peer_id))
        row = await scene.victim.row(sender.peer_id)
        assert row["groups_accepted"] == 0
        assert set(row["groups_refused"]) - {"banned"} == {reason}


async def test_an_honest_peer_of_a_ten_times_slower_machine_is_not_charged(setting: Setting) -> None:
    scene = setting.scene
    async with scene.member() as honest, slowed_down(scene.victim):
        await honest.publish_record(grader=GRADER)
        await honest.offer(*setting.groups(honest))
        row = await scene.victim.until_judged(honest.peer_id, NUM_GROUPS)
    assert (row["groups_accepted"], row["groups_refused"]) == (NUM_GROUPS, {})
    assert row["trust_level"] == "good" and row["score"] >= 0


@asynccontextmanager
async def slowed_down(victim: Victim) -> AsyncIterator[None]:
    """Let the node and its workers run for a tenth of the time."""
    task = asyncio.create_task(_slow_down(victim))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _slow_down(victim: Victim) -> None:
    processes = victim.node.processes()
    try:
        while True:
            _send(processes, signal.SIGSTOP)
            await asyncio.sleep(PERIOD_S * (1 - RUNNING_SHARE))
            _send(processes, signal.SIGCONT)
            await asyncio.sleep(PERIOD_S * RUNNING_SHARE)
    finally:
        _send(processes, signal.SIGCONT)


def _send(processes: Sequence[psutil.Process], signal_number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal_number)
