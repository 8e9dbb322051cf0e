"""Every number of the status is a metric with a name by the conventions of Prometheus."""

import re
from typing import get_args, get_type_hints

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from ftis_node.telemetry.metrics import Metric, all_metrics, render_metrics
from ftis_node.telemetry.status import (
    EvalStatus,
    GenerationStatus,
    LearnerStatus,
    NodeStatus,
    ReplayStatus,
    RunStatus,
    Status,
    SwarmStatus,
)

STATUS = Status(
    node=NodeStatus(state="running", name='a"b\\c\nd'),
    run=RunStatus(name="test"),
    generation=GenerationStatus(state="ready", groups_made=3),
    learner=LearnerStatus(state="backing-off", step=7, loss=0.25, own_groups=4, foreign_groups=5),
    swarm=SwarmStatus(state="standalone", groups_refused={"reward_mismatch": 2}),
    replay=ReplayStatus(ready=6),
    eval=[EvalStatus(step=0, task="t", pass_at_1=0.1, n=8), EvalStatus(5, "t", 0.5, n=8, cut_fraction=0.25)],
)


def _numbers() -> set[str]:
    """Return the paths of the numbers and tables of counts in a status."""
    paths = set()
    for section, hint in get_type_hints(Status).items():
        (kind,) = get_args(hint) or (hint,)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            for name, field in get_type_hints(kind).items():
                kinds = {field, *get_args(field)}
                if kinds & {int, float, bool} or field == dict[str, int]:
                    paths.add(f"{section}.{name}")
    return paths


def test_the_metrics_are_the_numbers_of_the_status():
    assert {metric.path for metric in all_metrics() if metric.path} == _numbers()


NAME = re.compile(r"ftis_(node|event_loop|worker|model|generation|learner|swarm|replay|eval)_[a-z0-9_]*[a-z0-9]")
UNITS = (("_per_s", "_per_second"), ("bytes", "_bytes"), ("_age_s", "_age_seconds"), ("_at", "_seconds"))


def _faults(metric: Metric) -> list[str]:
    """Return what the name, kind and texts of a metric lack."""
    checks = {
        "a name of a known part": NAME.fullmatch(metric.name),
        "_total for counters only": (metric.kind == "counter") == metric.name.endswith("_total"),
        "base units in full": not re.search(r"_(s|ms|mb|kb|percent)(_|$)", metric.name),
        "the unit of its field": all(unit in metric.name for end, unit in UNITS if metric.path.endswith(end)),
        "a sentence of help": metric.help.endswith(".") and len(metric.help) > 15,
        "a normal value": metric.normal,
    }
    return [f"{metric.name} ({metric.path}) lacks: {what}" for what, holds in checks.items() if not holds]


def test_every_metric_has_a_valid_name_kind_and_texts():
    faults = [fault for metric in all_metrics() for fault in _faults(metric)]
    assert not faults, "\n".join(faults)


def test_prometheus_reads_the_values_of_the_status():
    text = render_metrics(STATUS).decode()
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert (samples["ftis_learner_step",], samples["ftis_learner_loss",]) == (7, 0.25)
    assert ("ftis_learner_reward_mean",) not in samples, "an unset number has no sample"
    assert samples["ftis_generation_groups_total",] == 3
    assert samples["ftis_swarm_refused_groups_total", ("reason", "reward_mismatch")] == 2
    assert samples["ftis_learner_used_groups", ("origin", "own")] == 4
    assert samples["ftis_learner_used_groups", ("origin", "foreign")] == 5
    assert samples["ftis_replay_groups", ("state", "ready")] == 6
    assert samples["ftis_eval_pass_at_1", ("task", "t")] == 0.5, "the newest evaluation"
    assert samples["ftis_eval_cut_ratio", ("task", "t")] == 0.25
    assert ("ftis_eval_completion_tokens", ("task", "t")) not in samples
    assert samples["ftis_swarm_state", ("state", "standalone")] == 1
    assert samples["ftis_swarm_state", ("state", "connected")] == 0
    assert samples["ftis_worker_state", ("state", "backing-off"), ("worker", "learner")] == 1
    assert samples["ftis_node_contributing",] == 0
    (info,) = [dict(key[1:]) for key in samples if key[0] == "ftis_node_info"]
    assert (info["name"], info["run"]) == ('a"b\\c\nd', "test")


def test_a_role_without_a_learner_has_no_metric_of_learning():
    status = msgspec.structs.replace(STATUS, learner=LearnerStatus(state="off"))
    assert b"\nftis_node_learning" not in render_metrics(status)
    assert b"\nftis_node_learning 0.0\n" in render_metrics(STATUS)
