"""`ftis-node identity` shows, backs up and restores a node's key, also with a damaged key."""

from __future__ import annotations

import json
import re
import stat
import time
from typing import TYPE_CHECKING

import pytest

from ftis_node.cli.app import run
from ftis_node.config.home import Home
from ftis_node.records.identity import Identity
from ftis_node.replay.buffer import ReplayBuffer

if TYPE_CHECKING:
    from pathlib import Path

FIRST, SECOND = Identity.from_seed(bytes(32)), Identity.from_seed(bytes([1]) * 32)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.root.mkdir()
    FIRST.save(home.identity)
    return home


@pytest.fixture
def backup(home: Home, tmp_path: Path) -> Path:
    """A backup of the home's identity without passphrase."""
    out = tmp_path / "backup.json"
    assert run(["identity", "backup", str(out), "--home", str(home.root)]) == 0
    return out


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of an invalid use."""
    capsys.readouterr()
    assert run(["identity", *map(str, arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def last_number(home: Home) -> int:
    buffer = ReplayBuffer(home.replay)
    try:
        return buffer.last_number()
    finally:
        buffer.close()


def prompt_position(home: Home) -> int:
    buffer = ReplayBuffer(home.replay)
    try:
        return buffer.prompt_position()
    finally:
        buffer.close()


def test_show_prints_peer_id_file_and_time(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["identity", "show", "--home", str(home.root)]) == 0
    assert FIRST.peer_id in capsys.readouterr().out
    assert run(["identity", "show", "--json", "--home", str(home.root)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown.pop("created_at") == pytest.approx(time.time(), abs=60)
    assert shown == {
        "peer_id": FIRST.peer_id,
        "key_file": str(home.identity),
        "running": False,
        "addresses": [],
    }
    home.identity.unlink()
    assert "identity restore" in error_of(capsys, "show", "--home", home.root)
    assert not home.identity.exists(), "`show` creates no key"


def test_a_backup_is_private_and_not_overwritten(home: Home, backup: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    before = backup.read_bytes()
    assert "--force" in error_of(capsys, "backup", backup, "--home", home.root)
    assert backup.read_bytes() == before
    SECOND.save(home.identity)
    assert run(["identity", "backup", str(backup), "--force", "--home", str(home.root)]) == 0
    assert SECOND.peer_id in backup.read_text()
    assert "keep it private" in capsys.readouterr().err


def test_a_restored_identity_continues_the_sequence_numbers(home: Home, backup: Path, tmp_path: Path) -> None:
    new = Home(tmp_path / "new")
    assert run(["identity", "restore", str(backup), "--home", str(new.root)]) == 0
    assert Identity.load(new.identity) == FIRST
    assert last_number(new) == pytest.approx(time.time(), abs=60)
    assert prompt_position(new) == 0, "a new home begins at the first prompt"
    assert run(["identity", "restore", str(home.identity), "--home", str(tmp_path / "raw")]) == 0, "the key file itself"
    assert Identity.load(Home(tmp_path / "raw").identity) == FIRST


def test_another_identity_is_replaced_only_with_force(
    home: Home, backup: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SECOND.save(home.identity)
    line = error_of(capsys, "restore", backup, "--home", home.root)
    assert SECOND.peer_id in line and "--force" in line
    assert Identity.load(home.identity) == SECOND
    assert run(["identity", "restore", str(backup), "--force", "--home", str(home.root)]) == 0
    assert Identity.load(home.identity) == FIRST
    (old,) = home.root.glob("identity.key.*")
    assert str(old) in capsys.readouterr().out
    assert Identity.load(old) == SECOND


def test_the_error_of_a_damaged_key_names_restore(home: Home, backup: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.identity.write_text("cut o")
    line = error_of(capsys, "show", "--home", home.root)
    assert f"ftis-node identity restore BACKUP --home {home.root}" in line
    assert run(["identity", "restore", str(backup), "--home", str(home.root)]) == 0, "needs no --force"
    assert Identity.load(home.identity) == FIRST
    assert [path.read_text() for path in home.root.glob("identity.key.*")] == ["cut o"]


def test_the_key_of_a_running_node_is_not_replaced(
    home: Home, backup: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with home.owned():
        assert "in use by a running node" in error_of(capsys, "restore", backup, "--home", home.root)
        assert run(["identity", "backup", str(backup), "--force", "--home", str(home.root)]) == 0


def test_a_backup_with_a_passphrase_is_restored_with_it_only(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret, wrong, out, new = (tmp_path / name for name in ("secret", "wrong", "encrypted.json", "new"))
    secret.write_text("correct horse\nnot this")
    wrong.write_text("incorrect horse")
    passphrase = ["--passphrase-file", str(secret)]
    assert run(["identity", "backup", str(out), *passphrase, "--home", str(home.root)]) == 0
    assert FIRST.seed.hex() not in out.read_text()
    assert "passphrase" in error_of(capsys, "restore", out, "--passphrase-file", wrong, "--home", new)
    assert "--passphrase-file" in error_of(capsys, "restore", out, "--home", new)
    assert not new.exists()
    assert run(["identity", "restore", str(out), *passphrase, "--home", str(new)]) == 0
    assert Identity.load(Home(new).identity) == FIRST
    out.write_text(out.read_text().replace(FIRST.peer_id, SECOND.peer_id))
    assert "was changed" in error_of(capsys, "restore", out, *passphrase, "--home", new), "the peer id is authenticated"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "cut off"),
        (lambda text: text.replace(FIRST.peer_id, SECOND.peer_id), "not that of the peer id"),
        (lambda text: text.replace(FIRST.seed.hex(), SECOND.seed.hex()), "not that of the peer id"),
        (lambda text: re.sub(r'"seed": "\w+"', '"seed": "00"', text), "not that of the peer id"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "newer"),
        (lambda text: '{"what": "something"}', "not a backup"),
        (lambda text: text + " " * 5000, "larger than"),
        (lambda text: "", "not a backup"),
    ],
)
def test_an_invalid_backup_is_rejected(
    backup: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: object, message: str
) -> None:
    assert callable(change)
    backup.write_text(change(backup.read_text()))
    assert message in error_of(capsys, "restore", backup, "--home", tmp_path / "new")
    assert not (tmp_path / "new").exists()
