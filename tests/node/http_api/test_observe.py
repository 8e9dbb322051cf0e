"""The outputs of a real node: status, probes, metrics, the metrics in dashboard and alerts. None has a secret."""

import json
import re
import shutil
import stat
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ftis_node.cli.app import run
from ftis_node.records.identity import Identity
from ftis_node.telemetry.secrets import forms_of
from tests.node.support import RunningNode
from tests.small_swarm import HF_TOKEN, SWARM_SECRET, WANDB_KEY

pytestmark = pytest.mark.timeout(600)
DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "ftis-node.json"
RULES = DEPLOY / "prometheus" / "alerts.yaml"
KEY_FILES = {"identity.key", "control.token", "observe.token", "p2pd.key"}
METRIC = re.compile(r"\bftis_[a-z0-9_]+")


@pytest.fixture
def node(small_swarm):
    """Return a node of a swarm, with secrets in its environment and its settings."""
    return small_swarm.ann


def _get(node: RunningNode, path: str, **headers: str) -> str:
    url = (node.home / "lock").read_text().split("\n")[1]
    with urllib.request.urlopen(urllib.request.Request(url + path, headers=headers), timeout=10) as response:
        return str(response.read().decode())


def _names(node: RunningNode) -> set[str]:
    """Return the names of the node's metrics, as queries write them."""
    families = text_string_to_metric_families(_get(node, "/metrics"))
    return {family.name + ("_total" if family.type == "counter" else "") for family in families}


def _queries() -> list[str]:
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    queries += [variable["definition"] for variable in board["templating"]["list"] if "definition" in variable]
    rules = yaml.safe_load(RULES.read_text())
    return queries + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def test_dashboard_and_alerts_query_only_metrics_of_a_node(node):
    exported = _names(node)
    for query in _queries():
        named = set(METRIC.findall(query))
        assert named <= exported, f"{query} queries {named - exported}, which a node does not export"
        assert named or query.startswith("up{")


def test_a_running_node_is_healthy_and_ready(node):
    assert (_get(node, "/healthz"), _get(node, "/readyz")) == ("ok\n", "ready\n")
    health = node.status()["health"]
    assert (health["healthy"], health["ready"], health["problems"]) == (True, True, [])


def test_replay_show_has_texts_use_and_events_of_a_group(node, capsys):
    own = {event["group"] for event in node.events("admitted") if event["own"]}
    taken = next(event for event in node.events("taken") if event["group"] in own)
    assert run(["replay", "show", taken["group"][:16], "--home", str(node.home), "--json"]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert re.fullmatch(r"user: \d+[+-]\d+=", shown["prompt"]["text"])
    assert shown["texts_missing"] == ""
    assert all(isinstance(completion["text"], str) for completion in shown["completions"])
    assert shown["used"] == f"trained in step {taken['step']}"
    assert [event["event"] for event in shown["events"]][:2] == ["admitted", "announced"]


def test_no_secret_is_in_any_file_or_output_of_the_node(node, capsys, tmp_path):
    assert run(["report", "--home", str(node.home), "--out", str(tmp_path / "report.html")]) == 0
    assert run(["identity", "show", "--home", str(node.home), "--json"]) == 0
    printed = capsys.readouterr()
    texts = {
        "printed": printed.out + printed.err,
        "log": node.log.read_text(),
        "report": (tmp_path / "report.html").read_text(),
    }
    texts |= {path: _get(node, path) for path in ("/status", "/peers", "/metrics", "/healthz")}
    files = [path for path in node.home.rglob("*") if path.is_file() and path.name not in KEY_FILES]
    texts |= {str(path.relative_to(node.home)): path.read_bytes().decode("latin-1") for path in files}
    assert {"replay.sqlite", "events.jsonl", "settings.json", "logs/generation.log", "logs/learner.log"} <= set(texts)
    tokens = [(node.home / name).read_text().strip() for name in ("control.token", "observe.token")]
    secrets = [Identity.load(node.home / "identity.key").seed, *(text.encode() for text in tokens)]
    secrets += [bytes.fromhex(token) for token in tokens] + [
        text.encode() for text in (HF_TOKEN, WANDB_KEY, SWARM_SECRET)
    ]
    forms = {form for secret in secrets for form in (*forms_of(secret), secret.decode("latin-1"))}
    assert {(name, form) for name, text in texts.items() for form in forms if form in text} == set()


def test_only_the_owner_can_read_the_home_and_its_files(node):
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in (node.home, *node.home.rglob("*"))}
    of_operator = {node.home / "node.toml"}
    assert len(modes) > 20
    assert {(str(path), oct(mode)) for path, mode in modes.items() if mode & 0o077 and path not in of_operator} == set()


def test_every_alert_has_a_description_and_a_row_in_the_documentation():
    page = (DEPLOY.parent / "docs/reference/metrics.md").read_text()
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    in_page = dict(re.findall(r"^\| `(Ftis\w+)` \| (\w+) \|", page, flags=re.MULTILINE))
    assert in_page == {rule["alert"]: rule["labels"]["severity"] for rule in rules}
    for rule in rules:
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: `apt-get install prometheus`")
def test_promtool_accepts_the_files_and_each_alert_fires():
    checks = (
        ("check", "config", RULES.with_name("prometheus.yaml")),
        ("check", "rules", RULES),
        ("test", "rules", RULES.with_name("alerts_test.yaml")),
    )
    for check in checks:
        done = subprocess.run(["promtool", *map(str, check)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
