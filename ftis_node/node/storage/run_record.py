"""Facts about a home's run for the cards of what it exports. They hold no name, key or address of a node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ftis_node.config.manifest import read_own_manifest
from ftis_node.errors import ConfigError, FileError
from ftis_node.files import read_object
from ftis_node.models.source import HUB_ID
from ftis_node.replay.reader import ReplayReader
from ftis_node.telemetry.status import EvalStatus, LearnerStatus

if TYPE_CHECKING:
    from ftis_node.config.home import Home
    from ftis_node.config.manifest import RunManifest


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Facts about a run. `base` is the hub id of the node's model, or its folder's own name.

    `lora` is None if the home does not say whether an adapter was trained. `num_peers` counts the peers that sent
    accepted groups. Token counts are those of the steps, None without a buffer.
    """

    manifest: RunManifest
    base: str
    step: int
    lora: bool | None
    seed: int
    own_groups: int = 0
    foreign_groups: int = 0
    num_peers: int = 0
    own_tokens: int | None = None
    foreign_tokens: int | None = None
    evaluations: tuple[EvalStatus, ...] = ()

    @property
    def hub_base(self) -> str | None:
        """The base model's id on the hub; None if the node was given a folder."""
        return self.base if HUB_ID.fullmatch(self.base) else None


def read_run_record(home: Home, *, base: str | None = None, step: int | None = None) -> RunRecord:
    """Return the facts from the home's files, without evaluations after `step` (None: the last step).

    `base` replaces the name of the node's model. Raises ConfigError if no node has run with the home.
    """
    if not home.run_toml.exists() or not home.settings.exists():
        raise ConfigError(f"no node has run with the home {home.root}: give the right one with --home")
    settings = read_object(home.settings)
    document = _last_document(home)
    learner = _converted(document.get("learner"), LearnerStatus) or LearnerStatus()
    evaluations = _converted(document.get("eval"), list[EvalStatus]) or []
    last = learner.step if step is None else step
    own_tokens, foreign_tokens = _trained_tokens(home)
    return RunRecord(
        manifest=read_own_manifest(home.run_toml),
        base=base or _public_name(str(settings.get("model", ""))),
        step=last,
        lora=None if settings.get("lora") is None else bool(settings["lora"]),
        seed=seed if isinstance(seed := settings.get("seed"), int) else 0,
        own_groups=learner.own_groups,
        foreign_groups=learner.foreign_groups,
        num_peers=_num_peers(document),
        own_tokens=own_tokens,
        foreign_tokens=foreign_tokens,
        evaluations=tuple(entry for entry in evaluations if entry.step <= last),
    )


def _public_name(model: str) -> str:
    """Return the name that other nodes see, as `ModelSource.name`, also of a model that is gone."""
    return model if HUB_ID.fullmatch(model) else Path(model).name


def _last_document(home: Home) -> dict[str, Any]:
    try:
        return read_object(home.status)
    except (OSError, FileError):
        return {}


def _converted(value: Any, kind: Any) -> Any:
    """Return the part of the status as a record; None if it is damaged."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return None


def _num_peers(document: dict[str, Any]) -> int:
    rows = document.get("peers")
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    accepted = [row.get("groups_accepted") for row in rows]
    return sum(1 for number in accepted if isinstance(number, int) and number > 0)


def _trained_tokens(home: Home) -> tuple[int, int] | tuple[None, None]:
    if not home.replay.exists():
        return None, None
    reader = ReplayReader(home.replay)
    try:
        return reader.trained_tokens_by_origin()
    finally:
        reader.close()
