"""A key of an older version is refused in one line that names the new key. A file of an older home is converted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ftis_node.cli.app import run
from ftis_node.config.home import Home
from ftis_node.config.home_files import HOME_SCHEMA, mark_schema
from ftis_node.config.manifest import RunManifest, parse_manifest
from ftis_node.config.node import NodeSettings, load_node_settings
from ftis_node.config.renamed_keys import (
    MANIFEST_KEYS,
    NODE_KEYS,
    VALUES,
    refuse_old_keys,
    variable_of,
    with_new_keys,
)
from ftis_node.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import BaseModel

RUN = 'name = "a"\ntask = "arithmetic"\n'


def _keys(settings: type[BaseModel]) -> set[str]:
    return {
        f"{section}.{name}"
        for section, field in settings.model_fields.items()
        for name in getattr(field.annotation, "model_fields", {})
    }


@pytest.mark.parametrize(("renamed", "settings"), [(NODE_KEYS, NodeSettings), (MANIFEST_KEYS, RunManifest)])
def test_the_settings_have_each_new_key_and_no_old_one(renamed: dict[str, str], settings: type[BaseModel]) -> None:
    keys = _keys(settings)
    assert set(renamed.values()) <= keys
    assert not set(renamed) & keys
    assert len(set(renamed.values())) == len(renamed)


@pytest.mark.parametrize(("old", "new"), NODE_KEYS.items())
def test_an_old_key_of_a_node_is_refused_with_its_new_name(
    old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section, _, name = old.partition(".")
    file = tmp_path / "node.toml"
    file.write_text(f"[{section}]\n{name} = 1\n")
    with pytest.raises(ConfigError) as caught:
        load_node_settings(file, model="m")
    assert str(caught.value) == f"{file}: {old!r} is now {new!r}: rename it"
    file.unlink()
    monkeypatch.setenv(variable_of(old), "1")
    with pytest.raises(ConfigError, match=variable_of(new)):
        load_node_settings(file, model="m")


@pytest.mark.parametrize(("old", "new"), MANIFEST_KEYS.items())
def test_an_old_key_of_a_manifest_is_refused_with_its_new_name(old: str, new: str) -> None:
    section, _, name = old.partition(".")
    with pytest.raises(ConfigError) as caught:
        parse_manifest(f"{RUN}[{section}]\n{name} = 1\n", source="my.toml")
    assert str(caught.value) == f"my.toml: {old!r} is now {new!r}: rename it"


def test_the_command_prints_the_new_name_of_an_old_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"{RUN}[step]\nfill = true\n")
    assert run(["join", "--model", str(tmp_path), "--run", str(file), "--home", str(tmp_path / "home")]) == 2
    assert "'step.fill' is now 'step.backfill_with_own': rename it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "old", "new"), [(key, old, new) for key, values in VALUES.items() for old, new in values.items()]
)
def test_an_old_value_is_refused_with_its_new_name(key: str, old: str, new: str, tmp_path: Path) -> None:
    section, _, name = key.partition(".")
    file = tmp_path / "node.toml"
    file.write_text(f'[{section}]\n{name} = "{old}"\n')
    with pytest.raises(ConfigError, match=f"is now '{new}'"):
        load_node_settings(file, model="m")
    mark_schema(Home(tmp_path), HOME_SCHEMA - 1)
    assert getattr(load_node_settings(file, model="m"), section).model_dump()[name] == new


def test_the_file_of_an_older_home_is_read_with_new_keys(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("[door]\nban_first_s = 60.0\n[swarm]\nlinger_s = 1.0\n")
    mark_schema(Home(tmp_path), HOME_SCHEMA - 1)
    settings = load_node_settings(file, model="m")
    assert (settings.access.ban_initial_s, settings.swarm.shutdown_serve_s) == (60.0, 1.0)
    mark_schema(Home(tmp_path), HOME_SCHEMA)
    with pytest.raises(ConfigError, match="access.ban_initial_s"):
        load_node_settings(file, model="m")


def test_a_new_key_overrides_an_old_one_and_nothing_else_changes() -> None:
    tables = {"door": {"allow": [1], "other": 2}, "access": {"allow": [3]}, "swarm": "no table", "name": "x"}
    changed = with_new_keys(tables, NODE_KEYS)
    assert changed == {"door": {"other": 2}, "access": {"allow": [3]}, "swarm": "no table", "name": "x"}
    assert tables["door"] == {"allow": [1], "other": 2}, "the argument is unchanged"
    refuse_old_keys(changed, NODE_KEYS, source="x")
    assert with_new_keys({"door": {"allow": [1]}, "access": 3}, NODE_KEYS) == {"access": 3}, (
        "validation refuses it later"
    )


def test_a_manifest_of_schema_1_without_old_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match="schema_version"):
        parse_manifest(f"schema_version = 1\n{RUN}", source="my.toml")
    assert parse_manifest(f"schema_version = 1\n{RUN}", source="run.toml", upgrade=True).schema_version == 2
