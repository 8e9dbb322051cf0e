"""The Grafana dashboard: its queries fit the metrics and labels, its variables exist, its panels fit the grid."""

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftis_node.telemetry.metrics import Metric, all_metrics

BOARD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "deploy/grafana/ftis-node.json").read_text())
PANELS: list[dict[str, Any]] = BOARD["panels"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel.get("targets", [])]
VARIABLES = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
METRICS: dict[str, list[Metric]] = {
    name: list(rows)
    for name, rows in itertools.groupby(sorted(all_metrics(), key=lambda one: one.name), lambda one: one.name)
}
FROM_PROMETHEUS = {"instance", "job"}
BUILT_IN = {"__rate_interval", "__all"}
COLUMNS = 24
SELECTOR = re.compile(r"\b(ftis_\w+)(?:\{([^}]*)\})?")
PER_TIME = re.compile(r"\b(?:rate|increase)\((ftis_\w+)")


def labels_of(metric: str) -> set[str]:
    return {label for row in METRICS[metric] for label in row.label_names} | FROM_PROMETHEUS


def faults_of(expression: str, legend: str = "") -> list[str]:
    """Return how a query differs from the metrics: in names, kinds, and labels of selectors, `by` and the legend."""
    named = SELECTOR.findall(expression)
    if unknown := [name for name, _ in named if name not in METRICS]:
        return [f"no metric {name}" for name in unknown]
    faults = ["no metric at all"] if not named else []
    shared = set.intersection(*(labels_of(name) for name, _ in named)) if named else set()
    for name, matchers in named:
        used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        faults += [f"{name} has no label {label}" for label in used - labels_of(name)]
    groups = re.findall(r"\b(?:by|without) \(([^)]*)\)", expression)
    kept = {label.strip() for group in groups for label in group.split(",")}
    shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
    faults += [f"no label {label} to group by or to show" for label in (kept | shown) - shared]
    faults += [f"the legend shows {label}, which the query sums over" for label in shown - kept if groups]
    per_time = set(PER_TIME.findall(expression))
    counters = {name for name, _ in named if METRICS[name][0].kind == "counter"}
    faults += [f"{name} is a counter and needs rate() or increase()" for name in counters - per_time]
    faults += [f"{name} is a gauge: rate() is wrong" for name in per_time - counters]
    return faults


def overlaps(first: dict[str, int], second: dict[str, int]) -> bool:
    return (
        first["x"] < second["x"] + second["w"]
        and second["x"] < first["x"] + first["w"]
        and first["y"] < second["y"] + second["h"]
        and second["y"] < first["y"] + first["h"]
    )


def test_every_query_fits_the_metrics_and_their_labels():
    assert len(TARGETS) > 30
    faults = {
        f"{title}: {target['expr']}": found
        for title, target in TARGETS
        if (found := faults_of(target["expr"], target.get("legendFormat", "")))
    }
    assert not faults


WRONG_QUERIES = (
    ("ftis_learner_stepp", "", "no metric ftis_learner_stepp"),
    ('ftis_learner_step{worker="a"}', "", "ftis_learner_step has no label worker"),
    ("ftis_learner_step", "{{reason}}", "no label reason to group by or to show"),
    ("ftis_swarm_sent_groups_total", "", "ftis_swarm_sent_groups_total is a counter and needs rate() or increase()"),
    ("rate(ftis_learner_step[5m])", "", "ftis_learner_step is a gauge: rate() is wrong"),
    (
        "sum by (instance) (rate(ftis_swarm_refused_groups_total[5m]))",
        "{{reason}}",
        "the legend shows reason, which the query sums over",
    ),
)


def test_a_query_that_does_not_fit_is_reported():
    for expression, legend, fault in WRONG_QUERIES:
        assert faults_of(expression, legend) == [fault]


def test_queries_of_a_panel_have_different_names_and_legends():
    for panel in PANELS:
        targets = panel.get("targets", [])
        assert len({target["refId"] for target in targets}) == len(targets), panel["title"]
        legends = {target.get("legendFormat", "") for target in targets}
        assert len(legends) == len(targets), panel["title"]


def test_every_variable_and_data_source_exists():
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(BOARD)))
    assert used - set(VARIABLES) - BUILT_IN == set()
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert (VARIABLES["datasource"]["type"], VARIABLES["datasource"]["query"]) == ("datasource", "prometheus")
    assert VARIABLES["instance"]["datasource"] == source
    assert all(panel["datasource"] == source for panel in PANELS if panel["type"] != "row")
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", VARIABLES["instance"]["definition"]).groups()  # type: ignore[union-attr]
    assert label in labels_of(metric)


def test_panels_fit_the_grid_and_do_not_overlap():
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["w"] > 0 and place["h"] > 0 and place["x"] + place["w"] <= COLUMNS
    clashes = [
        (first["title"], second["title"])
        for first, second in itertools.combinations(PANELS, 2)
        if overlaps(first["gridPos"], second["gridPos"])
    ]
    assert not clashes
    filled = sum(panel["gridPos"]["w"] * panel["gridPos"]["h"] for panel in PANELS)
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in PANELS)
    assert filled == COLUMNS * height, "there is a gap between panels"
    assert [panel["gridPos"]["y"] for panel in PANELS] == sorted(panel["gridPos"]["y"] for panel in PANELS)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: `apt-get install prometheus`")
def test_prometheus_parses_every_query(tmp_path):
    rules = [
        {
            "record": f"panel:{number}",
            "expr": target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*"),
        }
        for number, (_, target) in enumerate(TARGETS)
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout
