"""`--push-to` with the real commands and the real `huggingface_hub` client, against a fake hub on loopback."""

import json
from pathlib import Path

import pytest

from ftis_node.cli.app import run
from ftis_node.config.home import Home
from ftis_node.config.manifest import load_manifest
from ftis_node.records.identity import Identity
from tests.cli.test_export import trained_home
from tests.hub_stand_in import TOKEN, Repository, StandIn, running_stand_in

REPO = "ann/swarm-tiny"
CONTROL = "control-token-0123456789abcdef"
PEER_ADDRESS = "/ip4/203.0.113.77/tcp/4001"
SECRETS = {"control.token": CONTROL, "observe.token": "observe-token-0123456789", "secret.txt": "ab" * 32}


@pytest.fixture
def hub(monkeypatch):
    """A fake hub that this process uses as under HF_ENDPOINT, HF_TOKEN and HF_HUB_DISABLE_XET."""
    with running_stand_in() as started:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", started.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield started


@pytest.fixture(scope="module")
def homes(tmp_path_factory):
    """Two trained homes with secrets and peers; the key says whether they trained LoRA."""
    homes = {}
    for lora in (False, True):
        root = tmp_path_factory.mktemp("home")
        trained_home(root, lora=lora)
        homes[lora] = home = Home(root / "home")
        me, peer = Identity.from_seed(bytes([1]) * 32), Identity.from_seed(bytes([2]) * 32)
        me.save(home.identity)
        for name, text in SECRETS.items():
            (home.root / name).write_text(text)
        settings = json.loads(home.settings.read_text())
        settings["swarm"] = settings.get("swarm", {}) | {"secret_file": str(home.root / "secret.txt")}
        settings["peers"] = [f"{PEER_ADDRESS}/p2p/{peer.peer_id}"]
        home.settings.write_text(json.dumps(settings))
        status = json.loads(home.status.read_text())
        status["node"] |= {"peer_id": me.peer_id, "name": "ann's node", "addresses": ["/ip4/198.51.100.9/tcp/4001"]}
        row = {"peer_id": peer.peer_id, "name": "bob of the hills", "groups_accepted": 2, "addresses": [PEER_ADDRESS]}
        status["peers"] = [row, row | {"peer_id": "p3", "groups_accepted": 0}]
        home.status.write_text(json.dumps(status))
    return homes


def _private_texts(home: Home) -> list[str]:
    """Return what must not leave the machine: keys, tokens, peers' ids, names and addresses, paths."""
    peers = [Identity.from_seed(bytes([number]) * 32).peer_id for number in (1, 2)]
    names = ["203.0.113.77", "198.51.100.9", "bob of the hills", "ann's node", "BEGIN PRIVATE KEY", TOKEN]
    return [*SECRETS.values(), *peers, *names, str(home.root), str(home.root.parent)]


def _assert_nothing_private(hub: StandIn, home: Home) -> None:
    sent = hub.sent
    assert b"ftis-node join --run run.toml" in sent, "the fake hub decodes the request bodies"
    for text in _private_texts(home):
        assert text.encode() not in sent, text
    seed = bytes([1]) * 32
    assert not any(key in sent for key in (home.identity.read_bytes().strip(), seed, seed.hex().encode()))


def _model(home: Home, out: Path, *options: str) -> int:
    return run(["export", "--home", str(home.root), "--out", str(out), "--push-to", REPO, *options])


def _folder(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize("lora", [False, True])
def test_the_pushed_model_equals_the_export(hub, homes, tmp_path, lora, capsys):
    """A second push replaces the weights of the first; a branch is created; other files stay."""
    from huggingface_hub import ModelCard

    old = {"model-00001-of-00002.safetensors": b"1", "notes.txt": b"keep"}
    hub.repositories[REPO] = Repository(private=True, branches={"main": dict(old)})
    out = tmp_path / "out"
    assert _model(homes[lora], out, "--license", "apache-2.0", "--base-model", "org/tiny") == 0
    assert f"pushed to {REPO} (private)" in capsys.readouterr().out
    assert hub.files(REPO) == _folder(out) | {"notes.txt": b"keep"}
    assert ("adapter_model.safetensors" if lora else "model.safetensors") in hub.files(REPO)
    assert hub.repositories[REPO].commits == ["Upload the model after step 2"]
    card = ModelCard(hub.files(REPO)["README.md"].decode())
    assert (card.data.license, card.data.base_model) == ("apache-2.0", "org/tiny")
    assert card.data.library_name == ("peft" if lora else "transformers")
    assert load_manifest(str(out / "run.toml")) == load_manifest(str(homes[lora].run_toml))
    (result,) = card.data.eval_results
    assert (result.dataset_type, result.metric_type, result.metric_value) == ("arithmetic", "pass@1", 0.5)
    for line in (
        "| license | apache-2.0 |",
        "| groups trained on | 6 own, 2 of peers |",
        "| task data | arithmetic: problems generated by ftis-node (Apache-2.0) |",
        f"ftis-node join --run run.toml --model org/tiny{' --lora' if lora else ' --full'} --seed 0 --steps 2",
    ):
        assert line in card.text, line
    if lora:
        assert json.loads(hub.files(REPO)["adapter_config.json"])["base_model_name_or_path"] == "org/tiny"
    assert _model(homes[lora], tmp_path / "branch", "--revision", "step-2", "--commit-message", "Second") == 0
    assert hub.files(REPO, "step-2") == _folder(tmp_path / "branch") | {"notes.txt": b"keep"}
    _assert_nothing_private(hub, homes[lora])


def test_a_repository_is_public_only_with_public(hub, homes, tmp_path, capsys):
    assert _model(homes[True], tmp_path / "a", "--public") == 0
    assert not hub.repositories[REPO].private
    before = dict(hub.files(REPO))
    assert _model(homes[True], tmp_path / "b", "--merge") == 2
    assert f"{REPO} is public: add --public" in capsys.readouterr().err
    assert hub.files(REPO) == before


@pytest.mark.parametrize(
    ("path", "status", "code", "message"),
    [
        ("/commit/", 500, 4, "cannot push to"), ("/validate-yaml", 429, 4, "cannot push to"),
        ("/create", 403, 2, "the hub refuses the push to"), ("/api/", 401, 2, "the hub refuses the push to"),
    ],
)  # fmt: skip
def test_a_failed_push_leaves_the_export_and_no_commit(hub, homes, tmp_path, path, status, code, message, capsys):
    hub.fail[path] = status
    out = tmp_path / "out"
    assert _model(homes[False], out) == code
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line
    assert f"the export is in {out}: `hf upload {REPO} {out} .` pushes it" in line
    assert {"README.md", "run.toml", "model.safetensors"} <= _folder(out).keys()
    assert REPO not in hub.repositories or not hub.repositories[REPO].commits
    assert TOKEN not in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--push-to", "no name"), "names no repository of the hub"), (("--push-to", "alone"), "write OWNER/NAME"),
        (("--push-to", REPO, "--license", "MIT License"), "is no id of a license"),
        (("--revision", "x", "--commit-message", "y"), "--revision, --commit-message: add --push-to"),
    ],
)  # fmt: skip
def test_invalid_options_fail_before_any_work(hub, homes, tmp_path, options, message, capsys):
    out = tmp_path / "out"
    assert run(["export", "--home", str(homes[False].root), "--out", str(out), *options]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists() and not hub.requests


def test_a_push_needs_a_login(hub, homes, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert _model(homes[False], tmp_path / "out") == 2
    assert "you are not logged in to the hub: run `hf auth login`" in capsys.readouterr().err
    assert not hub.requests
