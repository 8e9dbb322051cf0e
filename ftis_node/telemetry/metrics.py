"""Render the status snapshot as Prometheus metrics.

Numbers come from the table in `metrics.toml`, whose header explains its columns. States and answers are computed here.
A number that is None gives no sample. So a metric is absent until it is measured.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from importlib import resources
from itertools import chain
from typing import Any, Literal, NamedTuple

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ftis_node.telemetry.health_summary import AnswerWord, summarize_health
from ftis_node.telemetry.status import EvalStatus, Status

Family = GaugeMetricFamily | CounterMetricFamily
TABLE_FILE = "metrics.toml"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NODE_STATES = ("starting", "running", "stopping", "stopped", "failed")
SWARM_STATES = ("starting", "standalone", "connected", "stopped")
WORKER_STATES = ("stopped", "starting", "ready", "backing-off", "paused", "failed", "off")


class Metric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of the table: a metric, or one part of a metric that several status paths share."""

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
        if self.part is not None:
            return (self.part[0],)
        return (self.label,) if self.label else self.labels


@lru_cache(maxsize=1)
def all_metrics() -> tuple[Metric, ...]:
    """Return the table's rows. A metric that several status paths share has one row for each path."""
    text = resources.files("ftis_node.telemetry").joinpath(TABLE_FILE).read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["metric"], tuple[Metric, ...])


def help_of(name: str) -> str:
    """Return the help text of a metric. Raise KeyError if the table does not have it."""
    return {metric.name: metric.help for metric in all_metrics()}[name]


class _Collector(NamedTuple):
    families: Iterable[Family]

    def collect(self) -> Iterable[Family]:
        return self.families


def render_families(families: Iterable[Family]) -> bytes:
    """Return the text that a Prometheus server scrapes."""
    return generate_latest(_Collector(families))


def render_metrics(status: Status) -> bytes:
    document = msgspec.to_builtins(status)
    newest = {one["task"]: one for one in document["eval"]}
    document["eval"] = {
        key: {task: one[key] for task, one in newest.items() if one[key] is not None}
        for key in EvalStatus.__struct_fields__
    }
    families = (_info(document), _states(document), _answers(status), _numbers(document))
    return render_families(chain.from_iterable(families))


def _numbers(document: dict[str, Any]) -> Iterator[Family]:
    families: dict[str, Family] = {}
    for metric in (metric for metric in all_metrics() if metric.path):
        section, _, key = metric.path.partition(".")
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = families.setdefault(metric.name, kind(metric.name, metric.help, labels=metric.label_names))
        for labels, value in _samples(metric, document[section][key]):
            family.add_metric(labels, value)
    yield from families.values()


def _samples(metric: Metric, value: Any) -> Sequence[tuple[list[str], float]]:
    if value is None:
        return []
    if metric.label:
        return [([str(key)], float(count)) for key, count in value.items()]
    return [([metric.part[1]] if metric.part else [], float(value))]


def _info(document: dict[str, Any]) -> Iterator[GaugeMetricFamily]:
    node, run = document["node"], document["run"]
    labels = {name: node[name] for name in ("name", "peer_id", "version", "role")} | {
        "run": run["name"],
        "run_id": run["id"],
        "method": run["method"],
        "task": run["task"],
        "model": document["model"]["name"],
        "engine": document["generation"]["engine"],
    }
    family = GaugeMetricFamily("ftis_node_info", help_of("ftis_node_info"), labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    yield family


def _states(document: dict[str, Any]) -> Iterator[GaugeMetricFamily]:
    for section, known in (("node", NODE_STATES), ("swarm", SWARM_STATES)):
        name = f"ftis_{section}_state"
        family = GaugeMetricFamily(name, help_of(name), labels=["state"])
        for state in known:
            family.add_metric([state], document[section]["state"] == state)
        yield family
    family = GaugeMetricFamily("ftis_worker_state", help_of("ftis_worker_state"), labels=["worker", "state"])
    for worker in ("generation", "learner"):
        for state in WORKER_STATES:
            family.add_metric([worker, state], document[worker]["state"] == state)
    yield family


def _answers(status: Status) -> Iterator[GaugeMetricFamily]:
    health = summarize_health(status, now=time.time())
    yield GaugeMetricFamily("ftis_node_paused", help_of("ftis_node_paused"), value=bool(status.limits.paused))
    for question, answer in (("contributing", health.contributing), ("learning", health.learning)):
        if answer.word is not AnswerWord.NOT_APPLICABLE:
            name = f"ftis_node_{question}"
            yield GaugeMetricFamily(name, help_of(name), value=answer.word is AnswerWord.YES)
