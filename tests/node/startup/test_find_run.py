"""`join --run RUN_ID` joins exactly the requested run or fails."""

import hashlib

import pytest

from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings
from ftis_node.errors import ConfigError
from ftis_node.gossip.directory.entries import RUN_ID_HEX, pack_manifest, unpack_manifest
from ftis_node.node.startup.run_plan import find_run

PEER = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
CANONICAL = RunManifest(name="wanted", task="arithmetic").canonical()


def find(text: bytes, monkeypatch: pytest.MonkeyPatch) -> RunManifest:
    """Return the run that a node reads from this text, which a peer serves under its hash."""
    run_id = hashlib.sha256(text).hexdigest()[:RUN_ID_HEX]

    async def served(settings: object, *, run_id: str, timeout_s: float) -> bytes:
        unpacked = unpack_manifest(pack_manifest(text), run_id=run_id)
        assert unpacked is not None, "the hash does not match"
        return unpacked

    monkeypatch.setattr("ftis_node.gossip.directory.lookup.find_manifest", served)
    return find_run(run_id, NodeSettings(model="m", peers=(PEER,)))


def test_a_canonical_text_is_the_requested_run(monkeypatch):
    manifest = find(CANONICAL, monkeypatch)
    assert (manifest.name, manifest.canonical()) == ("wanted", CANONICAL)


@pytest.mark.parametrize(
    "text",
    [
        CANONICAL.replace(b",", b", "),
        CANONICAL.replace(b'"name":"wanted"', b'"name":"other","name":"wanted"'),
        CANONICAL.replace(b"1e-06", b"0.000001"),
    ],
    ids=["spaces", "a repeated key", "another form of a number"],
)
def test_a_text_with_another_canonical_form_is_refused_in_one_line(text, monkeypatch):
    assert text != CANONICAL
    with pytest.raises(ConfigError, match="not in the canonical form") as caught:
        find(text, monkeypatch)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
