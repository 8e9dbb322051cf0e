"""No sequence number is used twice, whatever happens to the clock and to the files of a home."""

import tempfile
from contextlib import closing, suppress
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftis_node.config.home import Home
from ftis_node.config.home_files import MAX_EPOCH, marked_epoch
from ftis_node.errors import ConfigError
from ftis_node.node.startup.home_opening import opened_home, replace_files
from ftis_node.node.storage.node_store import begin_epoch
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.swarm.sequence import MAX_COUNTER, epoch_base, epoch_of
from tests.node.light_swarm import LightSwarm, manifest_of
from tests.replay.test_buffer import ME, accepted

NOW = 1_800_000_000
EVENTS = st.one_of(
    st.tuples(st.just("start"), st.integers(0, 3)),
    st.tuples(st.sampled_from(("crash in begin_epoch", "copy", "restore", "delete", "lose the marker")), st.just(0)),
    st.tuples(st.just("move the clock"), st.integers(-100_000, 3)),
)


class NodeHome:
    """A home whose node starts, makes groups and ends. `numbers` are those of its groups, in order."""

    def __init__(self, root: Path) -> None:
        self.home, self.numbers, self.now = Home(root), list[int](), NOW
        self._copy: bytes | None = None
        self.home.create()

    def do(self, event: str, amount: int) -> None:
        with patch("time.time", lambda: float(self.now)):
            match event:
                case "start":
                    self.start(num_groups=amount)
                case "crash in begin_epoch":
                    with patch("ftis_node.node.storage.node_store.mark", side_effect=OSError), suppress(OSError):
                        self.start(num_groups=0)
                case "move the clock":
                    self.now += amount
                case "copy" if self.home.replay.exists():
                    self._copy = self.home.replay.read_bytes()
                case "restore" if self._copy is not None and self.home.marker.exists():
                    self.home.replay.write_bytes(self._copy)
                case "delete" if self.home.marker.exists():
                    self.home.replay.unlink(missing_ok=True)
                case "lose the marker" if self.home.replay.exists() and self._copy != self.home.replay.read_bytes():
                    self.home.marker.unlink(missing_ok=True)
                    self.start(num_groups=0)  # before another file is lost

    def start(self, *, num_groups: int) -> None:
        replace_files(self.home)
        with closing(ReplayBuffer(self.home.replay)) as buffer:
            begin_epoch(self.home, buffer)
            for _ in range(num_groups):
                group = accepted(ME, buffer.last_number() + 1)
                assert buffer.admit(group, own=True), "the node refuses its own group"
                self.numbers.append(group.group.number)


@settings(max_examples=25, deadline=None)
@given(st.lists(EVENTS, max_size=10))
def test_no_number_is_used_twice(events):
    with tempfile.TemporaryDirectory() as folder:
        node = NodeHome(Path(folder) / "home")
        for event, amount in events:
            node.do(event, amount)
        node.do("start", 2)
        assert node.numbers == sorted(set(node.numbers)), "each number is above all earlier ones"


@pytest.mark.parametrize("moved_s", [0, -5_000, 5_000])
def test_an_epoch_is_the_time_or_the_next_one(tmp_path, moved_s):
    node = NodeHome(tmp_path / "home")
    node.do("start", 1)
    node.do("move the clock", moved_s)
    node.do("start", 1)
    assert [epoch_of(number) for number in node.numbers] == [NOW, NOW + max(1, moved_s)]
    assert [number & MAX_COUNTER for number in node.numbers] == [1, 1]
    assert marked_epoch(node.home) == NOW + max(1, moved_s)


def test_a_home_from_a_backup_has_a_later_epoch(tmp_path):
    node, again = NodeHome(tmp_path / "home"), NodeHome(tmp_path / "restored")
    node.do("start", 2)
    for name in (node.home.replay.name, node.home.marker.name):
        (again.home.root / name).write_bytes((node.home.root / name).read_bytes())
    node.do("start", 2)
    again.now += 60
    again.do("start", 2)
    assert not set(node.numbers) & set(again.numbers)


def test_other_commands_keep_the_epoch(tmp_path):
    node = NodeHome(tmp_path / "home")
    node.do("start", 1)
    with opened_home(node.home):
        assert marked_epoch(node.home) == NOW


@pytest.mark.parametrize("epoch", ["-1", str(MAX_EPOCH + 1)])
def test_a_marker_with_an_invalid_epoch_is_damaged(tmp_path, epoch):
    home = Home(tmp_path)
    home.marker.write_text(f'{{"schema": 1, "epoch": {epoch}}}')
    with pytest.raises(ConfigError, match="damaged: remove it"):
        marked_epoch(home)


async def test_an_epoch_without_a_free_number_is_followed_by_the_next(tmp_path):
    swarm = LightSwarm(tmp_path, manifest_of())
    async with swarm.node(1) as alice:
        buffer, last = alice.parts.store.buffer, epoch_base(MAX_EPOCH - 2) + MAX_COUNTER
        alice.wiring.publish_loop.last_number = last - 1
        await swarm.publish(alice, 2)
        assert buffer.last_number() == epoch_base(MAX_EPOCH - 1) + 1
        assert marked_epoch(alice.parts.home) == MAX_EPOCH - 1


def test_a_last_number_that_a_damaged_buffer_claims_is_not_continued(tmp_path):
    node = NodeHome(tmp_path / "home")
    node.do("start", 1)
    with closing(ReplayBuffer(node.home.replay)) as buffer:
        buffer.raise_last_number((1 << 63) - 1)
    node.do("start", 1)
    assert epoch_of(node.numbers[-1]) == NOW + 1
