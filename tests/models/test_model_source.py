"""A wrong `--model` is an error of one line before torch or transformers are imported."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import save_tiny

from ftis_node.errors import ModelError, NetworkError, UntrainableModelError
from ftis_node.models import hub, resolve_model
from tests.hub_stand_in import TOKEN, Repository, running_stand_in


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("hub") / "tiny", max_shard_size="100KB")


@pytest.fixture
def folder(saved, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(saved, tmp_path / "tiny")


def test_a_model_is_named_after_its_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    source = resolve_model(".")
    assert (source.name, source.folder) == ("tiny", folder)
    assert len(source.weights_files) > 1  # it is sharded, and every shard is listed
    assert all(path.is_file() for path in source.weights_files)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer: expected tokenizer.json"),
        ("model-00001-of-*.safetensors", "weight files: model-00001-of-"),
        ("model*", "has no weights: expected model.safetensors"),
    ],
)
def test_a_missing_file_is_named(folder, missing, message):
    paths = list(folder.glob(missing))
    assert paths
    for path in paths:
        path.unlink()
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model(str(folder))
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


def replace_weights(folder, name):
    for path in folder.glob("model*"):
        path.unlink()
    (folder / name).touch()


def cut_weights(folder):
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: replace_weights(folder, "pytorch_model.bin"), "pickled weights are not read"),
        (cut_weights, r"model-00001-of-.* is damaged"),
        (lambda folder: (folder / "config.json").write_text('{"hello": 1}'), "no model_type"),
    ],
    ids=["pickled", "truncated", "no model type"],
)
def test_a_damaged_or_pickled_model_is_refused_with_the_reason(folder, change, message):
    change(folder)
    with pytest.raises(ModelError, match=message):
        resolve_model(str(folder))


def configured(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"bits": 4}}, "unknown method"),
        ({"text_config": {"quantization_config": {"quant_method": "gptq"}}}, "gptq"),
        ({"quantization": {"bits": 4}}, "unknown method"),
    ],
)
def test_a_quantized_model_is_not_trained(folder, changes, method):
    model = configured(folder, **changes)
    with pytest.raises(UntrainableModelError, match=rf"is quantized \({method}\): quantized weights cannot be trained"):
        resolve_model(model)
    assert resolve_model(model, trains=False).folder == folder, "it can be evaluated"


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("model.safetensors", "model.safetensors", "is a file: give a folder with config.json, safetensors weights"),
        ("model-q4.gguf", "", r"in a GGUF file: give the file itself, --model .*/NAME\.gguf"),
    ],
)
def test_a_file_or_a_folder_with_a_gguf_file_alone_says_what_to_give(tmp_path, name, given, message):
    (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=message):
        resolve_model(str(tmp_path / given))


@pytest.mark.parametrize("model", ["./nowhere", "~/nowhere", "a/b/c"])
def test_a_path_that_does_not_exist_is_refused(model):
    with pytest.raises(ModelError, match=f"no such folder: {model}"):
        resolve_model(model)


# Each name look-up of this process fails or hangs, as on a machine without a network.
OFFLINE = """
import socket, sys, time
def getaddrinfo(*_args, **_kwargs):
    time.sleep({delay_s})
    raise socket.gaierror(-2, "Name or service not known")
socket.getaddrinfo = getaddrinfo
from ftis_node.errors import FtisError
from ftis_node.models import hub, resolve_model
hub.fetch_snapshot.__kwdefaults__["answer_within_s"] = 2.0
try:
    resolve_model("Qwen/Qwen2.5-3B")
except FtisError as error:
    assert "torch" not in sys.modules and "transformers" not in sys.modules
    sys.stderr.write(f"{{error}}\\n")
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize(
    ("delay_s", "reason"), [(0, "[Errno -2] Name or service not known"), (60, "no answer within 2 s")]
)
def test_a_missing_network_is_an_error_of_one_line_within_seconds(tmp_path, delay_s, reason):
    command = [sys.executable, "-c", OFFLINE.format(delay_s=delay_s)]
    environment = {"PATH": "/usr/bin:/bin", "HF_HOME": str(tmp_path), "HOME": str(tmp_path)}
    limits = {"timeout": 55, "check": False}  # less than the 60 s of one look-up
    done = subprocess.run(command, capture_output=True, text=True, env=environment, **limits)
    assert done.returncode == NetworkError.exit_code == 4
    line = f"cannot fetch Qwen/Qwen2.5-3B from the hub ({reason}): give a local folder with --model DIR\n"
    assert (done.stderr, done.stdout) == (line, "")


def make_cache(home, saved, *, missing=()):
    """Write a cache of the hub with one snapshot, without the `missing` files."""
    repo = home / "hub" / "models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for path in saved.iterdir():
        if path.name not in missing:
            (snapshot / path.name).write_bytes(path.read_bytes())
    return snapshot


def test_a_cached_model_needs_no_network(saved, tmp_path, monkeypatch):
    snapshot = make_cache(tmp_path, saved)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("ftis_node.models.source.fetch_snapshot", lambda repo, **_: pytest.fail("the network is used"))
    source = resolve_model("org/tiny")
    assert (source.name, source.folder) == ("org/tiny", snapshot)


def test_a_downloaded_model_is_found_without_a_network(saved, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with running_stand_in() as stand_in:
        files = {path.name: path.read_bytes() for path in saved.iterdir()}
        stand_in.repositories["org/tiny"] = Repository(private=False, branches={"main": files})
        files_at = stand_in.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", stand_in.url)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files_at)
        fetched = resolve_model("org/tiny").folder
        num_requests = len(stand_in.requests)
        assert hub.cached_snapshot("org/tiny") == resolve_model("org/tiny").folder == fetched
        assert len(stand_in.requests) == num_requests, "the network is used again"


def test_a_cached_model_that_lacks_a_shard_is_fetched(saved, tmp_path, monkeypatch):
    make_cache(tmp_path, saved, missing=(sorted(saved.glob("*.safetensors"))[0].name,))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("ftis_node.models.source.fetch_snapshot", lambda repo, **_: saved)
    assert resolve_model("org/tiny").folder == saved


UNPRIVILEGED = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
READ = "import sys; from ftis_node.models import resolve_model; print(resolve_model(sys.argv[1]))"


@pytest.mark.skipif(bool(UNPRIVILEGED) and shutil.which("setpriv") is None, reason="root without setpriv")
def test_a_cached_model_is_read_without_a_lock(saved, tmp_path):
    """The cache is another user's, so nothing in it can be written."""
    make_cache(cache := tmp_path / "hf", saved)
    folders = [cache, *filter(Path.is_dir, cache.rglob("*"))]
    environment = {**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*UNPRIVILEGED, sys.executable, "-c", READ, "org/tiny"]
    for folder in folders:
        folder.chmod(0o555)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    for folder in folders:
        folder.chmod(0o755)
    assert "name='org/tiny'" in done.stdout, done.stderr


def test_a_download_into_a_cache_of_another_user_names_the_path(monkeypatch):
    def locked(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "/cache/.locks/models--o--n/x.lock")

    monkeypatch.setattr(hub, "_snapshot", locked)
    monkeypatch.setattr(hub, "_within", lambda *_: type("Info", (), {"sha": "abc"}))
    for get in (hub.fetch_snapshot, hub.cached_snapshot):
        with pytest.raises(ModelError, match=r"^o/n: .* cache at /cache/\.locks/models--o--n/x\.lock \(Perm.*HF_HOME"):
            get("o/n")
