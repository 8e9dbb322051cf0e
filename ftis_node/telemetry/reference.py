"""Generator of the metrics reference: `python -m ftis_node.telemetry.reference`.

A test compares it with `docs/reference/metrics.md`, so every metric has its line there and no line is out of date.
"""

from __future__ import annotations

import sys

from ftis_node.documentation import as_links
from ftis_node.telemetry.metrics import Metric, all_metrics

HEADER = """# Metrics

A node serves three paths over HTTP:

| path | answer |
|---|---|
| `/metrics` | the metrics below, for Prometheus |
| `/healthz` | 200 while the daemon's loops run, also while models load; 503 with the cause if only a restart helps |
| `/readyz` | 200 once the role's workers and the network are up; 503 with what is missing |

Only a restart helps if a worker failed for good, or if a loop ended or hangs. The local port has the three paths on
127.0.0.1. `ftis-node status` finds it, and `--status-port` sets it. For a container's probes or another machine's
Prometheus set `observe.listen` in `node.toml`, or `FTIS_OBSERVE__LISTEN`:

    [observe]
    listen = "0.0.0.0:9464"

That port has these three paths and nothing else. Beyond 127.0.0.1 `/metrics` requires the header `Authorization: Bearer
TOKEN`. The token is that of `observe.token_file`, or of `observe.token` in the home, which the first start creates.

`deploy/prometheus/prometheus.yaml` scrapes nodes, `deploy/prometheus/alerts.yaml` has the alerts, and
`deploy/grafana/ftis-node.json` is a dashboard in three rows: contributing, learning, healthy.

Counters start at 0 with each start of the node (those of generation continue), so query `rate()` or `increase()`. A
value that has not been measured yet is absent.

## Every metric

| metric | kind | labels | meaning | what is normal | what to do when it is not |
|---|---|---|---|---|---|
"""


ALERTS = """
## Alerts

Alerts of `deploy/prometheus/alerts.yaml`. *critical*: the node does no work; *warning*: less urgent.

| alert | severity | condition | what to do |
|---|---|---|---|
| `FtisNodeDown` | critical | no answer for 5 minutes | see `ftis-node status`, start the node again |
| `FtisNodeUnhealthy` | critical | `/healthz` returns 503 for 2 minutes | restart the node; the answer has the cause |
| `FtisNodeNotReady` | warning | `/readyz` returns 503 for 45 minutes | see its answer and `logs/` in the home |
| `FtisWorkerRestarts` | warning | over 3 restarts in an hour | `logs/`; often memory: ftis-node docs operate/resources |
| `FtisNoPeers` | warning | no connected peer for 15 minutes | `ftis-node doctor`; ftis-node docs operate/networking |
| `FtisPaused` | warning | paused by a disk limit for 15 minutes | free disk space; ftis-node docs operate/resources |
| `FtisNotContributing` | warning | ready, no contribution for 30 minutes | see `ftis-node status` |
| `FtisUnconfirmed` | warning | peers confirmed no group for an hour | compare versions, clocks, reachability |
| `FtisNotLearning` | warning | ready, no learning for 2 hours | see `ftis-node status` |
| `FtisManyRefused` | warning | more groups refused than accepted | `ftis-node peers`; ftis-node docs reference/rejections |
| `FtisMismatch` | warning | most tokens differ | another engine or dtype |
| `FtisClockSkew` | warning | peers' clocks are more than 10 s off | switch on time synchronization |
| `FtisWeightsOld` | warning | a generator's weights are older than 2 hours | check its learner; ftis-node docs train/roles |
"""  # noqa: E501


def render_reference() -> str:
    """Return the whole page as Markdown."""
    rows: dict[str, list[Metric]] = {}
    for metric in all_metrics():
        rows.setdefault(metric.name, []).append(metric)
    return as_links(HEADER + "".join(_row(parts) for parts in rows.values()) + ALERTS)


def _row(parts: list[Metric]) -> str:
    first = parts[0]
    columns = (
        f"`{first.name}`",
        first.kind,
        ", ".join(f"`{name}`" for name in first.label_names) or "-",
        first.help,
        _each(parts, "normal"),
        _each(parts, "advice") or "-",
    )
    return f"| {' | '.join(columns)} |\n"


def _each(parts: list[Metric], column: str) -> str:
    """Return one text for all parts, or one for each part if they differ."""
    texts = [str(getattr(part, column)) for part in parts]
    if len(set(texts)) == 1:
        return texts[0]
    return "; ".join(f"{part.part[1]}: {text}" for part, text in zip(parts, texts, strict=True) if part.part)


if __name__ == "__main__":
    sys.stdout.write(render_reference())
