"""Invitations: all presets and a changed run, and texts that are damaged or hostile."""

from __future__ import annotations

import base64
import hashlib

import msgspec
import pytest

from ftis_node.config.invite import CHECK_BYTES, MAX_CHARS, PREFIX, invite_to, read_invite
from ftis_node.config.manifest import PRESETS, load_manifest
from ftis_node.errors import ConfigError

ADDRESS = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWKVUU6HyBAxFk1xtH4qEU7NmphAH9gx5PWRmJPNd1wnPM"
NOW = 1_800_000_000
RUN = load_manifest("arithmetic-ftis")
GOOD = invite_to(RUN, addresses=[ADDRESS], secret=bytes(range(32)), expires_at=NOW)


def sealed(body: bytes) -> str:
    """Return an invitation with a right checksum over any body."""
    check = hashlib.sha256(body).digest()[:CHECK_BYTES]
    return PREFIX + base64.urlsafe_b64encode(body + check).decode().rstrip("=")


def changed(**fields: object) -> str:
    return sealed(msgspec.msgpack.encode(msgspec.structs.replace(GOOD, **fields)))


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_an_invitation_is_read_as_it_was_written(preset):
    run = load_manifest(preset)
    other = run.model_copy(update={"name": "ours", "step": run.step.model_copy(update={"own_groups": 3})})
    for manifest in (run, other):
        text = invite_to(manifest, addresses=[ADDRESS] * 9, secret=b"", expires_at=NOW).text()
        read = read_invite(f" {text}\n", now=NOW)
        assert (read.manifest().run_id, len(read.addresses), read.secret) == (manifest.run_id, 4, b"")


def test_a_changed_run_is_as_short_as_its_changes():
    run = load_manifest("words-ftis").model_copy(update={"task": "words:1+words:2"})
    invite = invite_to(run, addresses=[ADDRESS], secret=b"", expires_at=NOW)
    assert invite.run == b'words-ftis{"task":"words:1+words:2"}'
    assert len(invite.text()) < 260


@pytest.mark.parametrize(
    "run",
    [b"no-such-run", b"words-ftis{", b'words-ftis{"a":' * 200, b"words-ftis" + b'{"a":' * 800, b'words-ftis{"task":{}}',
     b'words-ftis{"step":[]}', b'words-ftis{"x":1}', b"\xff\xfe", b'words-ftis{"task":"words:1"}', b'{"name":"a"}'],
)  # fmt: skip
def test_a_run_that_is_none_is_one_line(run):
    with pytest.raises(ConfigError, match="damaged|unknown here|version of ftis-node|use the version of the sender"):
        read_invite(changed(run=run), now=NOW).manifest()


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
        ("hello", "no invitation: one begins with ftis1-"),
        (PREFIX + "A" * MAX_CHARS, "no invitation"),
        ("ftis2-AAAA", "another version"),
        (PREFIX, "damaged"),
        (PREFIX + "é" * 20, "damaged"),
        (changed(expires_at=NOW - 1), "has expired: ask for a new one"),
        (changed(addresses=[]), "cannot be used"),
        (changed(addresses=[ADDRESS] * 5), "cannot be used"),
        (changed(addresses=["/ip4/1.2.3.4/tcp/1"]), "without a peer"),
        (changed(addresses=["--home=/etc"]), "cannot be used"),
        (changed(run=b"x" * 5000), "cannot be used"),
        (changed(secret=bytes(2000)), "cannot be used"),
        (changed(run_id="../../etc/passwd"), "cannot be used"),
        (sealed(b"\xdd\xff\xff\xff\xff"), "cannot be used"),
        (sealed(msgspec.msgpack.encode([1] * 9)), "cannot be used"),
    ],
)
def test_a_text_that_is_no_usable_invitation_gives_one_line(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_invite(text, now=NOW)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("run", "message"),
    [(b"{}", "another version"), (b"\xff\xfe", "another version"), (b"gsm8k-ftis", "use the version of the sender")],
)
def test_a_run_that_is_not_the_named_one_is_refused(run, message):
    with pytest.raises(ConfigError, match=message):
        msgspec.structs.replace(GOOD, run=run).manifest()
