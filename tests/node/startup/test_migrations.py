"""Upgrade of homes that older versions wrote with `join --steps 2`. `old_homes/` has them, reduced to five groups.

`schema-N.sql` is the buffer, `run-N.toml` the manifest, `state-N.json` the checkpoint's state, `status-N.json` the last
status, `settings-N.json` the settings, `node-4.toml` the operator's file. Two of the groups are ready. Step 1 trained
on one, step 2 on two.
"""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

from ftis_node.cli.app import run
from ftis_node.config.home import Home
from ftis_node.config.home_files import HOME_SCHEMA, mark_schema
from ftis_node.config.manifest import parse_manifest
from ftis_node.config.node import NodeSettings, load_node_settings
from ftis_node.errors import ConfigError, MachineError
from ftis_node.learner.checkpoint.checkpoint import (
    CheckpointOwner,
    TrainingProgress,
    gather,
    newest_usable,
    state_of,
    write_checkpoint,
)
from ftis_node.node.startup import migrations
from ftis_node.node.startup.run_plan import own_manifest
from ftis_node.replay import database
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.reader import ReplayReader

if TYPE_CHECKING:
    from collections.abc import Mapping

OLD_HOMES = Path(__file__).with_name("old_homes")
PEER = "12D3KooWKVUU6HyBAxFk1xtH4qEU7NmphAH9gx5PWRmJPNd1wnPM"
STEP = 2
NUM_GROUPS = 5
RUN_IDS = {
    1: "1b75b17bc164fe09ee9203d3b095a602",
    2: "b7d8cddac1d109aa5d55e9b03dbb0db5",
    4: "7228abb266390eff2a761ebcd9ad91e6",
}
LAST_NUMBERS = {1: 64, 2: 64, 4: 21}


class OldHome(NamedTuple):
    """A home that an older version wrote, and the owner of its checkpoints as the present version reads it."""

    home: Home
    schema: int
    owner: CheckpointOwner

    def checkpoint(self) -> Path:
        return self.home.checkpoints / f"step-{STEP:08d}"


@pytest.fixture(params=[1, 2, 4])
def old(request: pytest.FixtureRequest, tmp_path: Path) -> OldHome:
    return make_old_home(tmp_path / "home", request.param)


def make_old_home(root: Path, schema: int) -> OldHome:
    home = Home(root)
    home.create()
    with sqlite3.connect(home.replay) as buffer:
        buffer.executescript((OLD_HOMES / f"schema-{schema}.sql").read_text())
    buffer.close()
    shutil.copy(OLD_HOMES / f"run-{schema}.toml", home.run_toml)
    shutil.copy(OLD_HOMES / f"status-{schema}.json", home.status)
    shutil.copy(OLD_HOMES / f"settings-{schema}.json", home.settings)
    if schema == 4:
        shutil.copy(OLD_HOMES / "node-4.toml", home.node_toml)
        mark_schema(home, schema)
    state = json.loads((OLD_HOMES / f"state-{schema}.json").read_text())
    owner = CheckpointOwner(**{**state["owner"], "run_id": RUN_IDS[schema]})
    weight, optimizer = _trained()
    before = state_of(owner, TrainingProgress(step=STEP, policy_version=STEP))
    folder = write_checkpoint(home.checkpoints, before, *gather(weight, optimizer), keep=2)
    (folder / "checksums.json").unlink()
    (folder / "state.json").write_text(json.dumps(state))
    return OldHome(home, schema, owner)


def _trained() -> tuple[Mapping[str, torch.nn.Parameter], torch.optim.Optimizer]:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    return {"weight": weight}, optimizer


def is_upgraded(old: OldHome) -> bool:
    """Check that a present node can use all data of the old home, and return whether its schema is the present one."""
    found, damaged = newest_usable(old.home.checkpoints, owner=old.owner, shapes={"weight": torch.Size((2, 3))})
    assert found is not None
    assert not damaged
    assert NodeSettings.model_validate(json.loads(old.home.settings.read_text())).model == "tiny-s0"
    reader, buffer = ReplayReader(old.home.replay), ReplayBuffer(old.home.replay)
    try:
        assert len(list(reader.all_groups())) == NUM_GROUPS
        assert found.state.last_groups == tuple(reader.taken_by(STEP))
        assert len(found.state.last_groups) == 2
        assert buffer.last_number() == LAST_NUMBERS[old.schema]
        assert buffer.reconcile(STEP, [bytes.fromhex(name) for name in found.state.last_groups]) == 0
        taken = buffer.take(STEP + 1, own=NUM_GROUPS, foreign=0).groups
        assert len(taken) == 2, "not the two ready groups"
        assert all(len(stored.rewards) in (4, 8) and stored.prompt_ids for stored in taken)
    finally:
        buffer.close()
        reader.close()
    return json.loads(old.home.marker.read_text()) == {"schema": HOME_SCHEMA}


def test_an_old_home_is_upgraded_and_the_changed_files_are_backed_up(
    old: OldHome, caplog: pytest.LogCaptureFixture
) -> None:
    before = (old.checkpoint() / "state.json").read_bytes()
    with caplog.at_level("INFO"), migrations.opened(old.home):
        assert is_upgraded(old)
    (backup,) = old.home.backups.iterdir()
    assert backup.name.endswith(f"-schema-{old.schema}")
    assert str(backup) in caplog.text
    if old.schema <= max(migrations.BUFFER_SCHEMAS):
        assert database.version_of(backup / "replay.sqlite") == old.schema
    assert (backup / old.checkpoint().relative_to(old.home.root) / "state.json").read_bytes() == before
    with migrations.opened(old.home):
        assert list(old.home.backups.iterdir()) == [backup], "a second upgrade of the same home"


def test_the_keys_of_an_old_home_are_renamed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = make_old_home(tmp_path / "home", 4)
    before = load_node_settings(old.home.node_toml, model="m")
    assert own_manifest(old.home, is_given=False) == parse_manifest(
        (OLD_HOMES / "run-4.toml").read_text(), source="run.toml", upgrade=True
    )
    with caplog.at_level("INFO"), migrations.opened(old.home):
        pass
    assert load_node_settings(old.home.node_toml, model="m") == before
    written = tomllib.loads(old.home.node_toml.read_text())
    assert written["access"] == {"ban_initial_s": 60.0}
    assert written["rate_limits"] == {
        "groups_per_minute": 5000.0,
        "new_peers_tokens_per_minute": 9e7,
    }
    assert written["validation"] == {
        "audit_fraction": 0.2,
        "max_logprob_gap_nats": 12.0,
        "duplicate_history_size": 4096,
    }
    assert written["swarm"] == {"shutdown_serve_s": 1.0, "pull_policy": "auto", "pull_all_max_peers": 8}
    assert "door" not in written
    saved = NodeSettings.model_validate(json.loads(old.home.settings.read_text()))
    assert (saved.rate_limits.groups_per_minute, saved.swarm.pull_all_max_peers) == (5000.0, 8)
    manifest = parse_manifest(old.home.run_toml.read_text(), source="run.toml")
    assert (manifest.run_id, manifest.step.foreign_wait_s) == (RUN_IDS[4], 1.0)
    assert (manifest.step.backfill_with_own, manifest.sampling.truncated_sampling) == (True, "correct")
    (backup,) = old.home.backups.iterdir()
    assert (backup / "node.toml").read_text() == (OLD_HOMES / "node-4.toml").read_text(), (
        "the backup lacks the comments"
    )
    assert own_manifest(old.home, is_given=False) == manifest, "its checkpoints are of another run"


KILLED = """
import os, signal, sys
from pathlib import Path
from ftis_node.config.home import Home
from ftis_node.learner.checkpoint import checkpoint_files
from ftis_node.node.startup import migrations
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
home, moment = Home(Path(sys.argv[1])), sys.argv[2]
if moment == "backup":
    migrations.database.back_up = die

def after(change):
    def change_and_die(*arguments, **options):
        change(*arguments, **options)
        if moment in (change.__name__, f"{change.__name__} {arguments[-1]}", arguments[0].name):
            die()
    return change_and_die

mark = migrations.mark_schema
migrations.mark_schema = lambda home, schema: mark(home, schema) or moment == f"mark_schema {schema}" and die()
migrations.database.upgrade_once = after(migrations.database.upgrade_once)
migrations.note_pruned = after(migrations.note_pruned)
migrations.replace_file = checkpoint_files.replace_file = after(migrations.replace_file)
migrations.upgrade(home)
"""


@pytest.mark.parametrize(
    ("schema", "moment"),
    [
        *((1, moment) for moment in ("backup", "mark_schema 1", "upgrade_once 1", "upgrade_once 2", "note_pruned")),
        *((schema, moment) for schema in (1, 4) for moment in ("checksums.json", "run.toml", "mark_schema 5")),
        *((4, moment) for moment in ("renewed-state.json", "settings.json", "node.toml")),
    ],
)
def test_a_kill_during_an_upgrade_loses_nothing(tmp_path: Path, schema: int, moment: str) -> None:
    old = make_old_home(tmp_path / "home", schema)
    command = [sys.executable, "-c", KILLED, str(old.home.root), moment]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    with migrations.opened(old.home):
        assert is_upgraded(old)
    complete = [path for path in old.home.backups.iterdir() if not path.name.startswith(".")]
    assert complete and all((path / "COMPLETE").exists() for path in complete)


def test_an_upgrade_without_space_for_a_backup_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = make_old_home(tmp_path / "home", 1)
    monkeypatch.setattr(migrations, "SPARE_BYTES", 1 << 60)
    with pytest.raises(MachineError, match="free disk space"), migrations.opened(old.home):
        pass
    assert database.version_of(old.home.replay) == 1
    assert not old.home.backups.exists()


@pytest.mark.parametrize("full", [OSError(28, "No space left on device"), sqlite3.OperationalError("disk is full")])
def test_an_upgrade_continues_after_the_disk_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: Exception
) -> None:
    def fail(*_: object) -> None:
        raise full

    old = make_old_home(tmp_path / "home", 1)
    with monkeypatch.context() as patch:
        patch.setattr(database, "_upgrade_once", fail)
        with pytest.raises(MachineError, match="free disk space"), migrations.opened(old.home):
            pass
    with migrations.opened(old.home):
        assert is_upgraded(old)


@pytest.mark.parametrize("by", ["marker", "buffer"])
def test_a_newer_home_is_refused_and_not_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str], by: str) -> None:
    home = Home(tmp_path)
    if by == "marker":
        mark_schema(home, HOME_SCHEMA + 1)
    else:
        with sqlite3.connect(home.replay) as buffer:
            buffer.execute("PRAGMA user_version = 99")
        buffer.close()
    before = sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.iterdir())
    commands = [["bootstrap", "--listen", "/ip4/127.0.0.1/tcp/0"], ["replay", "list"]]
    with pytest.raises(ConfigError, match="update"), migrations.opened(home):
        pass
    for command in (*commands, ["status"], ["identity", "show"]) if by == "marker" else commands:
        assert run([*command, "--home", str(tmp_path)]) == 2
        assert "update" in capsys.readouterr().err
    assert sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.iterdir()) == before


def test_an_old_home_can_be_read_before_it_is_upgraded(old: OldHome, capsys: pytest.CaptureFixture[str]) -> None:
    home = ["--home", str(old.home.root)]
    assert run(["status", *home]) == 0
    assert run(["replay", "stats", *home]) == 0
    capsys.readouterr()
    assert run(["replay", "list", "--json", *home]) == 0
    groups = json.loads(capsys.readouterr().out)
    assert len(groups) == NUM_GROUPS
    assert database.version_of(old.home.replay) == min(old.schema, 3), "reading changed the buffer"
    migrations.bring_up_to_date(old.home)
    assert is_upgraded(old)


def test_a_ban_on_an_old_home_upgrades_it_first(old: OldHome, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["peers", "ban", PEER, "--home", str(old.home.root)]) == 0
    assert PEER in capsys.readouterr().out
    assert is_upgraded(old)


@pytest.mark.parametrize("schema", [1, 2])
def test_the_run_of_an_old_manifest_has_the_id_of_upgraded_homes(schema: int) -> None:
    """A new setting of the manifest makes this fail. Raise HOME_SCHEMA, and add a step to node/startup/migrations.py
    that renews the run id of checkpoints. Otherwise no present home can be resumed."""
    manifest = parse_manifest((OLD_HOMES / f"run-{schema}.toml").read_text(), source="run.toml", upgrade=True)
    assert manifest.run_id == RUN_IDS[schema]
