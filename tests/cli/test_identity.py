"""`ftis-node identity`, and what a node says whose key is damaged."""

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
def kept(home: Home, tmp_path: Path) -> Path:
    """A plain backup of the home's identity."""
    out = tmp_path / "kept.json"
    assert run(["identity", "backup", str(out), "--home", str(home.root)]) == 0
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a wrong use gets."""
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


def test_show(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "identity restore" in refused(capsys, "show", "--home", home.root)
    assert not home.identity.exists(), "looking makes no key"


def test_a_plain_backup_is_private_and_not_written_over(
    home: Home, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    before = kept.read_bytes()
    assert "--force" in refused(capsys, "backup", kept, "--home", home.root)
    assert kept.read_bytes() == before
    SECOND.save(home.identity)
    assert run(["identity", "backup", str(kept), "--force", "--home", str(home.root)]) == 0
    assert SECOND.peer_id in kept.read_text()
    assert "keep it private" in capsys.readouterr().err


def test_a_new_home_gets_the_identity_and_goes_on_numbering(home: Home, kept: Path, tmp_path: Path) -> None:
    new = Home(tmp_path / "new")
    assert run(["identity", "restore", str(kept), "--home", str(new.root)]) == 0
    assert Identity.load(new.identity) == FIRST
    assert last_number(new) == pytest.approx(time.time(), abs=60)
    assert prompt_position(new) == 0, "the first prompt, as of a new node"
    assert run(["identity", "restore", str(home.identity), "--home", str(tmp_path / "raw")]) == 0, "the key file itself"
    assert Identity.load(Home(tmp_path / "raw").identity) == FIRST


def test_another_identity_is_replaced_only_when_told_to(
    home: Home, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SECOND.save(home.identity)
    line = refused(capsys, "restore", kept, "--home", home.root)
    assert SECOND.peer_id in line and "--force" in line
    assert Identity.load(home.identity) == SECOND
    assert run(["identity", "restore", str(kept), "--force", "--home", str(home.root)]) == 0
    assert Identity.load(home.identity) == FIRST
    (old,) = home.root.glob("identity.key.*")
    assert str(old) in capsys.readouterr().out
    assert Identity.load(old) == SECOND


def test_a_damaged_key_names_the_way_back(home: Home, kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.identity.write_text("cut o")
    line = refused(capsys, "show", "--home", home.root)
    assert f"ftis-node identity restore BACKUP --home {home.root}" in line
    assert run(["identity", "restore", str(kept), "--home", str(home.root)]) == 0, "needs no --force"
    assert Identity.load(home.identity) == FIRST
    assert [path.read_text() for path in home.root.glob("identity.key.*")] == ["cut o"]


def test_a_running_node_keeps_its_key(home: Home, kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with home.owned():
        assert "in use by a running node" in refused(capsys, "restore", kept, "--home", home.root)
        assert run(["identity", "backup", str(kept), "--force", "--home", str(home.root)]) == 0


def test_a_passphrase_opens_what_it_closed(home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret, wrong, out, new = (tmp_path / name for name in ("secret", "wrong", "sealed.json", "new"))
    secret.write_text("correct horse\nnot this")
    wrong.write_text("incorrect horse")
    given = ["--passphrase-file", str(secret)]
    assert run(["identity", "backup", str(out), *given, "--home", str(home.root)]) == 0
    assert FIRST.seed.hex() not in out.read_text()
    assert "passphrase" in refused(capsys, "restore", out, "--passphrase-file", wrong, "--home", new)
    assert "--passphrase-file" in refused(capsys, "restore", out, "--home", new)
    assert not new.exists()
    assert run(["identity", "restore", str(out), *given, "--home", str(new)]) == 0
    assert Identity.load(Home(new).identity) == FIRST
    out.write_text(out.read_text().replace(FIRST.peer_id, SECOND.peer_id))
    assert "was changed" in refused(capsys, "restore", out, *given, "--home", new), "the peer id is sealed in"


@pytest.mark.parametrize(
    ("change", "said"),
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
def test_a_file_that_is_no_backup(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: object, said: str
) -> None:
    assert callable(change)
    kept.write_text(change(kept.read_text()))
    assert said in refused(capsys, "restore", kept, "--home", tmp_path / "new")
    assert not (tmp_path / "new").exists()
