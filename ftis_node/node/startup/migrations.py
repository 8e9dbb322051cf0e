"""Migrations: open a home that an older version of ftis-node wrote, step by step, with a backup of changed files.

    schema 1 -> 2   the buffer stores the tokens of groups that were received as text
    schema 2 -> 3   the buffer stores which peer's weights sampled a group, and the numbers of deleted groups
    schema 3 -> 4   checkpoints have checksums and name the groups of their step, and the run by its present id;
                    settings.json loses the settings that no longer exist
    schema 4 -> 5   settings and the run's manifest have standard keys; the manifest, and so the run, has a new id

The upgrade first checks the free space. Then it writes `backups/<time>-schema-N/` atomically, and then the changes.
Each change is one transaction or one replaced file, and a second time it changes nothing. `home.json` gets the new
schema last. If the machine stops before that, the next start repeats the upgrade. The upgrade refuses a home of a newer
version and does not change it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import tomli_w
from pydantic import ValidationError

from ftis_node.config.disk_room import disk_full, free_bytes, is_disk_full
from ftis_node.config.home_files import HOME_SCHEMA, mark_schema, marked_schema, refuse_newer
from ftis_node.config.manifest import read_own_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.config.renamed_keys import NODE_KEYS, with_new_keys
from ftis_node.errors import DamagedError, FileError, MachineError
from ftis_node.files import read_object, read_toml, replace_file
from ftis_node.learner.checkpoint.checkpoint_files import older_checkpoints, renew
from ftis_node.node.startup.recovery import rescue_files
from ftis_node.replay import database
from ftis_node.replay.reader import ReplayReader
from ftis_node.replay.reset import note_pruned
from ftis_node.telemetry.event_log_summary import read_event_log_summary
from ftis_node.workers.durable import complete_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ftis_node.config.home import Home

log = logging.getLogger(__name__)

BUFFER_SCHEMAS = (1, 2)  # of a home, equal to those of its buffer
BACKUP_NAME = "%Y%m%dT%H%M%SZ"
SPARE_BYTES = 64 << 20  # for database journals and replaced files


@contextmanager
def opened(home: Home) -> Iterator[None]:
    """Hold the home's lock, after an upgrade of the home to the present schema.

    Raise HomeInUseError, ConfigError for a newer or damaged home, MachineError without space for a backup.
    """
    refuse_newer(home)
    with suppress(DamagedError):  # refuse a newer buffer before any change; `rescue_files` handles a damaged one
        if home.replay.exists():
            database.version_of(home.replay)
    with home.owned():
        try:
            rescue_files(home)
            upgrade(home)
        except (OSError, sqlite3.Error) as error:
            if is_disk_full(error, home.root):
                raise disk_full(home.root) from None
            raise MachineError(f"cannot upgrade {home.root}: {error}; free disk space there, and start again") from None
        yield


def bring_up_to_date(home: Home) -> None:
    """Upgrade a home before a command that only reads it. Do nothing at the present schema. Raise as `opened`."""
    refuse_newer(home)
    if _schema_of(home) < HOME_SCHEMA:
        with opened(home):
            pass


def upgrade(home: Home) -> None:
    """Upgrade a home to the present schema; the caller holds its lock."""
    schema = _schema_of(home)
    if schema == HOME_SCHEMA:
        if marked_schema(home) is None:
            mark_schema(home, HOME_SCHEMA)
        return
    run_id = read_own_manifest(home.run_toml).run_id if home.run_toml.exists() else None
    if files := _files_to_change(home, schema, run_id=run_id):
        _check_disk_space(home, files)
        log.info(
            "%s is of schema %d: a copy of what is changed is in %s", home.root, schema, _back_up(home, schema, files)
        )
    mark_schema(home, schema)  # after a crash, the schema of the buffer would be that of the home
    if schema in BUFFER_SCHEMAS and home.replay.exists():
        for buffer_schema in BUFFER_SCHEMAS:
            database.upgrade_once(home.replay, buffer_schema)
        note_pruned(home.replay, record=read_event_log_summary(home.events))
    _renew_checkpoints(home, run_id=run_id)
    _renew_settings(home)
    _rename_keys(home)
    mark_schema(home, HOME_SCHEMA)
    log.info("%s is of schema %d now", home.root, HOME_SCHEMA)


def _schema_of(home: Home) -> int:
    """Return the schema by the marker, else by buffer and checkpoints. A new home has the present schema."""
    if (schema := marked_schema(home)) is not None:
        return schema
    if home.replay.exists() and (version := database.version_of(home.replay)):
        return version
    return BUFFER_SCHEMAS[-1] + 1 if any(home.checkpoints.glob("step-*")) else HOME_SCHEMA


def _files_to_change(home: Home, schema: int, *, run_id: str | None) -> list[Path]:
    """Return the files that the upgrade changes, and those that the next start rewrites (settings, manifest)."""
    checkpoints = older_checkpoints(home.checkpoints, run_id=run_id)
    states = [path / name for path in checkpoints for name in ("state.json", "checksums.json")]
    buffer = [home.replay] if schema in BUFFER_SCHEMAS else []
    return [path for path in (*buffer, *states, home.settings, home.run_toml, home.node_toml) if path.exists()]


def _check_disk_space(home: Home, files: list[Path]) -> None:
    needed = sum(path.stat().st_size for path in files) + SPARE_BYTES
    free = free_bytes(home.root)
    if free < needed:
        raise MachineError(
            f"upgrading {home.root} needs {needed / 1e6:.0f} MB for a backup, and {free / 1e6:.0f} MB are free: "
            "free disk space, or move the home; nothing was changed"
        )


def _back_up(home: Home, schema: int, files: list[Path]) -> Path:
    target = home.backups / f"{time.strftime(BACKUP_NAME, time.gmtime())}-schema-{schema}"
    with complete_folder(target) as folder:
        for path in files:
            copy = folder / path.relative_to(home.root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path == home.replay:
                database.back_up(path, copy)
            else:
                shutil.copy2(path, copy)
    return target


def _rename_keys(home: Home) -> None:
    """Write node.toml and run.toml with the present keys. Comments of node.toml stay in the backup."""
    if home.run_toml.exists():
        replace_file(home.run_toml, read_own_manifest(home.run_toml).to_toml().encode())
    if os.path.lexists(home.node_toml):
        tables = read_toml(home.node_toml)
        renamed = with_new_keys(tables, NODE_KEYS)
        if renamed != tables:
            replace_file(home.node_toml, tomli_w.dumps(renamed).encode())
            log.info("%s has new keys; the former file is in %s", home.node_toml, home.backups)


def _renew_checkpoints(home: Home, *, run_id: str | None) -> None:
    reader = ReplayReader(home.replay) if home.replay.exists() else None
    try:
        for path in older_checkpoints(home.checkpoints, run_id=run_id):
            renew(path, run_id=run_id, groups_of=reader.taken_by if reader else lambda step: ())
            log.info("%s is readable again", path.name)
    finally:
        if reader:
            reader.close()


def _renew_settings(home: Home) -> None:
    """Drop settings of the last start that no longer exist: a file with unknown settings cannot be read."""
    if not home.settings.exists():
        return
    try:
        former = read_object(home.settings)
    except FileError as error:
        log.warning("%s is damaged (%s); the next start of the node rewrites it", home.settings, error)
        return
    saved = with_new_keys(former, NODE_KEYS)
    try:
        NodeSettings.model_validate(saved)
    except ValidationError as error:
        for finding in error.errors():
            if finding["type"] == "extra_forbidden":
                *sections, name = map(str, finding["loc"])
                table = saved
                for section in sections:
                    table = table[section]
                del table[name]
    if saved != former:
        replace_file(home.settings, json.dumps(saved, indent=1).encode())
