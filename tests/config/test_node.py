"""Settings by flags, environment and file, in that order; numbers have bounds; one process at a time owns a home."""

import math
import os
import subprocess
import sys
import types
from typing import Any, Union, get_args, get_origin

import pytest
from pydantic import ValidationError

from ftis_node.config.home import Home
from ftis_node.config.manifest import RunManifest
from ftis_node.config.node import NodeSettings, load_node_settings
from ftis_node.config.section import Section
from ftis_node.errors import ConfigError, UsageError
from tests.conftest import raises_line


def test_flags_override_the_environment_and_the_environment_overrides_the_file(tmp_path, monkeypatch):
    file = tmp_path / "node.toml"
    file.write_text('name = "from-file"\nseed = 1\nengine = "torch"\n[learner]\nthreads = 3\n')
    monkeypatch.setenv("FTIS_SEED", "2")
    monkeypatch.setenv("FTIS_NAME", "from-environment")
    monkeypatch.setenv("FTIS_PEERS", "/ip4/1.2.3.4/tcp/1,/ip4/1.2.3.4/tcp/2")
    monkeypatch.setenv("FTIS_LEARNER__MICRO_BATCH_TOKENS", "4096")
    settings = load_node_settings(file, model="m", name="from-flag", seed=None)
    assert (settings.name, settings.seed, settings.engine) == ("from-flag", 2, "torch")
    assert settings.peers == ("/ip4/1.2.3.4/tcp/1", "/ip4/1.2.3.4/tcp/2")
    assert (settings.learner.threads, settings.learner.micro_batch_tokens) == (3, 4096)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('nam = "x"', "unknown key 'nam': did you mean 'name'?"), ("seed = -1", "seed"), ('engine = "jax"', "engine"),
        ("[learner]\nthread = 1", "unknown key 'learner.thread': did you mean 'threads'?"),
        ('role = "generator"', "--follow PEER_ID"),
        ('role = "learner"\n[roles]\nfollow = "12D3KooWx"', "follows no learner"),
        ('role = "exchange"\n[roles]\nfollow = "12D3KooWx"', "follows no learner"),
        ('role = "exchange"\n[budget]\nlearn_steps = 4', "neither generates nor trains"),
        ('role = "exchange"\n[schedule]\nhours = "22-07"', "no workers to pause: remove the section [schedule]"),
        ('[roles]\nweights_delay = "fixed:2000"', "at most 1800 seconds"), ("seed seed", "not TOML"),
        ('[generation]\nadapters = "serve"', "set lora = true"),
        ('lora = true\n[generation]\nadapters = "serve"\n[lora_adapter]\nrank = 513', "rank up to 512"),
        ('quantize = "4bit"\nlora = false', "remove --full (lora = false), or give --quantize none"),
        ('quantize = "4bit"\n[generation]\nadapters = "merge"', "no adapter is merged into 4-bit weights"),
        ('quantize = "4bit"\n[generation]\nengine_options = {quantization = "fp8"}', "exclude each other"),
        ("[learner]\ngpus = [1, 2]\nprocesses = 3", "processes is 3 and learner.gpus names 2"),
        ("[learner]\ngpus = [1, 1]", "names a GPU twice"),
    ],
)  # fmt: skip
def test_an_invalid_file_is_refused_in_one_line(tmp_path, text, complaint):
    file = tmp_path / "node.toml"
    file.write_text(text)
    with raises_line(ConfigError, complaint, "node.toml"):
        load_node_settings(file, model="m")


@pytest.mark.parametrize(
    ("name", "value"),
    [("FTIS_LISTEN", "/ip4/0.0.0.0/tcp/1"), ("FTIS_TRACKING__TO", "wandb"), ("FTIS_GENERATION", "abc")],
)
def test_plain_text_in_the_variable_of_a_list_or_a_table_is_refused(tmp_path, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with raises_line(ConfigError, f"the environment variable {name} is not JSON", '["A", "B"]'):
        load_node_settings(tmp_path / "node.toml", model="m")


def test_a_second_owner_of_a_home_is_refused(tmp_path):
    home = Home(tmp_path / "home")
    with home.owned(), pytest.raises(UsageError, match=str(os.getpid())), Home(tmp_path / "home").owned():
        pass
    with home.owned():
        assert home.checkpoints.is_dir()


def test_a_killed_process_releases_the_lock(tmp_path):
    code = (
        "import sys, os; from pathlib import Path; from ftis_node.config.home import Home\n"
        "home = Home(Path(sys.argv[1]))\n"
        "with home.owned():\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "home")], check=False).returncode == -9
    with Home(tmp_path / "home").owned():
        pass


def test_a_home_has_a_status_address_only_while_the_node_runs(tmp_path):
    home = Home(tmp_path / "home")
    assert home.running_url() is None
    with home.owned():
        assert Home(home.root).running_url() is None, "the node does not serve HTTP yet"
        home.publish_address("http://127.0.0.1:5")
        assert Home(home.root).running_url() == "http://127.0.0.1:5"
    assert home.running_url() is None


def test_socket_paths_are_short_for_a_long_home_path(tmp_path):
    long = Home(tmp_path / ("x" * 100))
    used = []
    for _ in range(2):
        with long.owned():
            used.append(long.sockets)
            assert len(str(long.sockets)) <= 70 and long.sockets.is_dir()
            assert long.sockets.stat().st_mode & 0o077 == 0
        assert not used[-1].exists() and not long.sockets.exists()
    assert used[0] != used[1], "another user cannot predict the path"


def test_sockets_of_a_killed_node_are_removed_and_a_foreign_link_is_not_followed(tmp_path):
    long = Home(tmp_path / ("x" * 100))
    long.create()
    left = long.sockets
    (left / "dead.sock").touch()
    with long.owned():
        assert not left.exists()
    foreign = tmp_path / "ftis-foreign"
    foreign.mkdir()
    (foreign / "file").touch()
    for home in (long, Home(tmp_path / "h")):
        home.root.mkdir(exist_ok=True)
        (home.root / "run").symlink_to(foreign)
        with home.owned():
            assert home.sockets != foreign and home.sockets.is_dir()
        assert (foreign / "file").exists()


def test_a_home_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--home"), Home(tmp_path / "file" / "home").owned():
        pass


@pytest.mark.parametrize(
    ("listen", "address"),
    [("", None), ("127.0.0.1:9464", ("127.0.0.1", 9464)), ("0.0.0.0:0", ("0.0.0.0", 0)), ("[::1]:9464", ("::1", 9464))],
)
def test_the_observe_address_is_host_and_port(tmp_path, listen, address):
    (tmp_path / "node.toml").write_text(f'model = "m"\n[observe]\nlisten = "{listen}"\n')
    assert load_node_settings(tmp_path / "node.toml").observe.address == address


@pytest.mark.parametrize("listen", ["9464", "127.0.0.1", "127.0.0.1:70000", "http://h:1", "::1:9464"])
def test_an_invalid_observe_address_is_refused(tmp_path, listen):
    (tmp_path / "node.toml").write_text(f'model = "m"\n[observe]\nlisten = "{listen}"\n')
    with pytest.raises(ConfigError, match="127.0.0.1:9464"):
        load_node_settings(tmp_path / "node.toml")


def test_peers_are_read_from_a_file(tmp_path, monkeypatch):
    (tmp_path / "peers").write_text("/ip4/1.2.3.4/tcp/1  # ours\n\n# another\n/ip4/1.2.3.4/tcp/2\n")
    expected = ("/ip4/1.2.3.4/tcp/1", "/ip4/1.2.3.4/tcp/2", "/ip4/1.2.3.4/tcp/3")
    named = f"@{tmp_path / 'peers'}"
    settings = load_node_settings(tmp_path / "node.toml", model="m", peers=(named, expected[1], expected[2]))
    assert settings.peers == expected
    monkeypatch.setenv("FTIS_PEERS", f"{named},{expected[2]}")
    assert load_node_settings(tmp_path / "node.toml", model="m").peers == expected


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        *((None, "cannot be read"), ("# none\n", "is empty"), ("\xff", "not UTF-8 text")),
        ("# none\n" * 20_000, "larger than"),
    ],
)
def test_an_unusable_file_of_peers_is_refused_by_its_path(tmp_path, content, complaint):
    if content is not None:
        (tmp_path / "peers").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=f"{tmp_path}/peers .*{complaint}"):
        load_node_settings(tmp_path / "node.toml", model="m", peers=(f"@{tmp_path}/peers",))


def test_the_model_is_read_from_the_file_and_without_one_the_error_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="name it with --model ID_OR_DIR"):
        load_node_settings(tmp_path / "node.toml")
    (tmp_path / "node.toml").write_text('model = "m"\n')
    assert load_node_settings(tmp_path / "node.toml").model == "m"


def test_ftis_home_in_the_environment_is_not_read_as_a_setting(tmp_path, monkeypatch):
    monkeypatch.setenv("FTIS_HOME", str(tmp_path))
    assert load_node_settings(tmp_path / "node.toml", model="m").model == "m"


ABSURD = 1e300


def sections(kind: type[Section]) -> set[type[Section]]:
    """Return a section and all sections in it."""
    found = {kind}
    for field in kind.model_fields.values():
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, Section):
                found |= sections(part)
    return found


def holds(annotation: Any, kind: type) -> bool:
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        return any(holds(part, kind) for part in get_args(annotation))
    inner = get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
    return inner is kind


FIELDS = [
    (section, name, kind)
    for root in (RunManifest, NodeSettings)
    for section in sorted(sections(root), key=lambda each: each.__name__)
    for name, field in section.model_fields.items()
    for kind in (float, int)
    if holds(field.annotation, kind)
]


def refuses(section: type[Section], name: str, value: Any) -> bool:
    try:
        section.model_validate({name: value})
    except ValidationError as error:
        return any(finding["loc"][:1] == (name,) for finding in error.errors())
    return False


def test_every_number_has_bounds():
    wrong = {float: [math.inf, -math.inf, math.nan, ABSURD, -ABSURD], int: [10**30, -(10**30)]}
    accepted = [
        f"{section.__name__}.{name} accepts {value}"
        for section, name, kind in FIELDS
        for value in wrong[kind]
        if not refuses(section, name, value)
    ]
    assert not accepted, "\n".join(accepted)


def test_the_search_finds_the_fields():
    names = {f"{section.__name__}.{name}" for section, name, _ in FIELDS}
    assert {"OptimizerSection.learning_rate", "MethodSection.cap", "StepSection.own_groups"} <= names
    assert len(FIELDS) > 40
