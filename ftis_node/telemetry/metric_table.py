"""The table of metrics, read from `metrics.toml` beside this file; its head says what the columns mean."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib import resources
from typing import Literal

import msgspec

TABLE_FILE = "metrics.toml"


class Metric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One metric, or one part of a metric that several paths of the status share."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    normal: str
    advice: str = ""
    path: str = ""
    label: str = ""
    part: tuple[str, str] | None = None
    labels: tuple[str, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of its labels, in the order in which values are given."""
        if self.part is not None:
            return (self.part[0],)
        return (self.label,) if self.label else self.labels


@lru_cache(maxsize=1)
def all_metrics() -> tuple[Metric, ...]:
    """Each with what it says of itself; those that several paths share come once a path."""
    text = resources.files("ftis_node.telemetry").joinpath(TABLE_FILE).read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["metric"], tuple[Metric, ...])


def help_of(name: str) -> str:
    """The help text of a metric. Raises KeyError for one that is not in the table."""
    return {metric.name: metric.help for metric in all_metrics()}[name]
