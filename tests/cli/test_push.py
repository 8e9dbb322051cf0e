"""`--push-to` with the real commands and the real `huggingface_hub` client, against a fake hub on loopback."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from ftis_node.cli.app import run
from ftis_node.config.home import Home
from ftis_node.config.manifest import load_manifest
from ftis_node.records.identity import Identity
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.lifecycle import ReleaseReason
from tests.cli.test_export import trained_home
from tests.conftest import accept, fill_buffer, make_group, make_text_group
from tests.hub_stand_in import TOKEN, Repository, StandIn, running_stand_in

REPO = "ann/swarm-tiny"
DATA = f"datasets/{REPO}"
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
    """Two trained homes with secrets, peers and groups; the key says whether they trained LoRA."""
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
        as_text = accept(make_text_group(peer, number=2), peer)
        fill_buffer(home.replay, accept(make_group(me), me), accept(make_group(peer), peer), as_text, own=me)
        with closing(ReplayBuffer(home.replay)) as buffer:
            buffer.take(1, own=1, foreign=1)
            assert buffer.release_step(1, ReleaseReason.TRAINED) == 2
    return homes


def _private_texts(home: Home) -> list[str]:
    """Return what must not leave the machine: keys, tokens, peers' ids, names and addresses, paths."""
    peers = [Identity.from_seed(bytes([number]) * 32).peer_id for number in (1, 2)]
    names = ["203.0.113.77", "198.51.100.9", "bob of the hills", "ann's node", "BEGIN PRIVATE KEY", TOKEN]
    return [*SECRETS.values(), *peers, *names, str(home.root), str(home.root.parent)]


def _assert_nothing_private(hub: StandIn, home: Home, *, allowed: tuple[str, ...] = ()) -> None:
    sent = hub.sent
    assert b"ftis-node join --run run.toml" in sent, "the fake hub decodes the request bodies"
    for text in _private_texts(home):
        assert text in allowed or text.encode() not in sent, text
    seed = bytes([1]) * 32
    assert not any(key in sent for key in (home.identity.read_bytes().strip(), seed, seed.hex().encode()))


def _model(home: Home, out: Path, *options: str) -> int:
    return run(["export", "--home", str(home.root), "--out", str(out), "--push-to", REPO, *options])


def _rollouts(home: Home, out: Path, *options: str) -> int:
    return run(["replay", "export", "--home", str(home.root), "--out", str(out), "--push-to", REPO, *options])


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


@pytest.mark.parametrize(("form", "options"), [("jsonl", ()), ("parquet", ("--flat", "--text"))])
def test_pushed_rollouts_load_as_a_data_set(hub, homes, tmp_path, form, options):
    import datasets
    from huggingface_hub import DatasetCard

    out, there = tmp_path / "out", tmp_path / "there"
    assert _rollouts(homes[False], out, "--format", form, "--license", "mit", *options) == 0
    assert hub.repositories[DATA].private
    assert hub.files(DATA) == _folder(out)
    card = DatasetCard(hub.files(DATA)["README.md"].decode())
    assert (card.data.license, card.data.task_categories) == ("mit", ["text-generation"])
    assert "| groups | 1 own, 2 of 1 peers |" in card.text
    for path, data in hub.files(DATA).items():
        (there / path).parent.mkdir(parents=True, exist_ok=True)
        (there / path).write_bytes(data)
    table = datasets.load_dataset(str(there), split="train", cache_dir=str(tmp_path / "cache"))
    assert (len(table), table.unique("sender")) == (6 if options else 3, ["own", "peer-1"])
    first = table[0] if options else table[0]["completions"][0]
    assert first["logprobs"] == pytest.approx([-0.1, -1.05, -2.0])
    _assert_nothing_private(hub, homes[False])


def test_senders_are_pushed_only_with_with_senders(hub, homes, tmp_path):
    home = homes[False]
    assert _rollouts(home, tmp_path / "out", "--with-senders", "--text") == 0
    rows = [json.loads(line) for line in hub.files(DATA)["data/train.jsonl"].splitlines()]
    assert {row["sender_name"] for row in rows} == {"ann's node", "bob of the hills"}
    peers = tuple(Identity.from_seed(bytes([number]) * 32).peer_id for number in (1, 2))
    assert {row["sender"] for row in rows} == set(peers)
    _assert_nothing_private(hub, home, allowed=("ann's node", "bob of the hills", *peers))


def test_a_repository_is_public_only_with_public(hub, homes, tmp_path, capsys):
    assert _rollouts(homes[False], tmp_path / "a", "--public") == 0
    assert not hub.repositories[DATA].private
    before = dict(hub.files(DATA))
    assert _rollouts(homes[False], tmp_path / "b", "--flat") == 2
    assert f"{REPO} is public: add --public" in capsys.readouterr().err
    assert hub.files(DATA) == before


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
    assert _rollouts(homes[False], out, "--format", "parquet") == code
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line
    assert f"the export is in {out}: `hf upload {REPO} {out} . --type dataset` pushes it" in line
    assert _folder(out).keys() == {"README.md", "run.toml", "data/train.parquet"}
    assert DATA not in hub.repositories or not hub.repositories[DATA].commits
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


def test_only_tables_are_pushed_and_only_with_push_to_and_a_login(hub, homes, tmp_path, capsys, monkeypatch):
    assert _rollouts(homes[False], tmp_path / "out", "--format", "envelope") == 2
    assert "choose --format jsonl or parquet" in capsys.readouterr().err
    assert run(
        ["replay", "export", "--home", str(homes[False].root), "--out", str(tmp_path / "out"), "--license", "mit"]
    )
    assert "are for --push-to" in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert _rollouts(homes[False], tmp_path / "out") == 2
    assert "you are not logged in to the hub: run `hf auth login`" in capsys.readouterr().err
    assert not hub.requests
