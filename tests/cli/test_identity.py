"""`ftis-node identity show` prints a node's peer id. A copied key works in a new home."""

import json
import shutil
import time
from contextlib import closing

import pytest

from ftis_node.cli.app import run
from ftis_node.config.home import Home
from ftis_node.node.storage.node_store import begin_epoch
from ftis_node.records.identity import Identity
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.swarm.sequence import epoch_of

FIRST = Identity.from_seed(bytes(32))


@pytest.fixture
def home(tmp_path):
    home = Home(tmp_path / "home")
    home.create()
    FIRST.save(home.identity)
    return home


def test_show_prints_peer_id_and_file_before_the_first_start(home, capsys):
    assert run(["identity", "show", "--home", str(home.root)]) == 0
    assert FIRST.peer_id in capsys.readouterr().out
    assert run(["identity", "show", "--json", "--home", str(home.root)]) == 0
    assert json.loads(capsys.readouterr().out) == {"peer_id": FIRST.peer_id, "key_file": str(home.identity)}


@pytest.mark.parametrize(("text", "advice"), [(None, "copy the identity.key"), ("cut o", "put a copy of it back")])
def test_a_missing_or_damaged_key_is_an_error_with_advice(home, capsys, text, advice):
    home.identity.unlink()
    if text is not None:
        home.identity.write_text(text)
        home.identity.chmod(0o600)
    assert run(["identity", "show", "--home", str(home.root)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert advice in line
    assert home.identity.exists() == (text is not None), "`show` creates no key"


def test_a_key_copied_to_a_new_home_numbers_above_the_old_one(home, tmp_path):
    new = Home(tmp_path / "new")
    new.create()
    shutil.copy(home.identity, new.identity)
    assert Identity.load(new.identity) == FIRST
    with closing(ReplayBuffer(new.replay)) as buffer:
        begin_epoch(new, buffer)
        assert epoch_of(buffer.last_number()) == pytest.approx(time.time(), abs=60)
