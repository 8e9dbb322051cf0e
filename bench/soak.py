"""Soak test: real nodes at work for an hour, and which of their resources grow.

    python bench/soak.py --minutes 60 --plot docs/assets/soak.png
    python bench/soak.py --minutes 60 --rate 10 --plot docs/assets/soak-10x.png   # ten times the normal inbound groups
    python bench/soak.py --read DIR/samples.csv --plot FILE   # judge an earlier soak again

It runs a bootstrap node and four nodes of `ftis-node join` with two different tiny models. Every few seconds it samples
from outside: memory, descriptors and threads of each process, disk and rows of each home, event loop lag. After a
warm-up (a third, at most ten minutes) each quantity has a slope with its 95 % interval, and a verdict. The verdict is
`flat`, `grows` or `falls`, or `unclear` if the series is too short or too noisy. With `--rate R` honest guests send so
much that a node gets R times the groups that it got from its peers before. The last line is JSON; the exit code is 1 if
something grows.

The machine has separate rows, which do not count: the processor time of a constant loop, and the time that the host
gives to others. After the host took more than 5 %, lags and answers are not judged for a minute and a half.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np

from nodes.hosts import log_line
from soaking.guests import guests
from soaking.sampling import MACHINE, Point, Sampler, sample_machine
from soaking.swarm import Node, swarm
from soaking.verdicts import (
    Finding,
    Series,
    disturbances,
    findings_of,
    is_calm,
    markdown,
    per_minute,
    series_of,
    warm_up_minutes,
)

BEFORE_GUESTS_MINUTES = 2.0
PANELS = {
    "rss_mib": "resident memory, MiB",
    "cpu_percent": "processor time, % of a core",
    "disk_mib": "disk of the homes, MiB",
    "descriptors": "open descriptors",
    "threads": "threads",
    "rows": "rows",
    "lag_ms": "event loop lag, ms",
    "answer_ms": "answer to /status, ms",
    "done": "done a minute",
}
COLUMNS, WIDTH, HEIGHT, DPI = 2, 5.6, 2.7, 110


def main() -> None:
    """Run a soak, or read an earlier one, and print the table, then JSON."""
    options = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as ctrl-C, so that the nodes are ended
    if options.read:
        with options.read.open() as file:
            points = [Point(float(row[0]), *row[1:4], float(row[4])) for row in list(csv.reader(file))[1:]]
    else:
        with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
            folder = (options.out or Path(scratch)).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            points = asyncio.run(soak(folder, options))
    minutes = max(point.minute for point in points)
    series = series_of(points)
    warm_up = warm_up_minutes(minutes) if options.warm_up is None else options.warm_up
    if warm_up >= minutes:
        sys.exit(f"--warm-up {warm_up:g}: the soak has only {minutes:.0f} minutes")
    findings = findings_of(series, after=warm_up)
    sys.stdout.write(markdown(findings))
    if options.plot:
        plot_soak(series, options.plot, warm_up=warm_up, title=f"{options.nodes} nodes, {minutes:.0f} minutes")
    result = summary(series, findings, warm_up=warm_up)
    about = {"bench": "soak", "minutes": round(minutes, 1), "rate": options.rate, "nodes": options.nodes}
    sys.stdout.write(json.dumps(about | {"cores": os.cpu_count()} | result) + "\n")
    sys.exit(0 if result["flat"] else 1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=1.0, help="of the normal inbound groups; above 1 guests send")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--every-s", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--warm-up", type=float, help="minutes that are not judged (default: a third, at most ten)")
    parser.add_argument("--out", type=Path, help="folder for homes, logs and samples.csv (default: none is kept)")
    parser.add_argument("--plot", type=Path, help="file of the plot")
    parser.add_argument("--read", type=Path, help="read the samples.csv of an earlier soak, without a new run")
    return parser.parse_args()


async def soak(folder: Path, options: argparse.Namespace) -> list[Point]:
    """Run the swarm and sample it. All its processes have ended when it returns."""
    with swarm(folder, options.nodes) as (address, nodes), (folder / "samples.csv").open("w", newline="") as file:
        record = Record(nodes, csv.writer(file), every_s=options.every_s)
        log_line(f"{options.nodes} nodes are at work; samples go to {file.name}")
        async with AsyncExitStack() as stack:
            if options.rate > 1:
                await record.until(min(BEFORE_GUESTS_MINUTES, options.minutes))
                normal = per_minute(series_of(record.points), "foreign groups") or 0.0
                extra_per_s = (options.rate - 1) * normal / options.nodes / 60
                log_line(
                    f"a node gets {normal / options.nodes:.0f} groups a minute; guests send {extra_per_s:.1f} a second"
                )
                model = folder / "tiny-s"
                await stack.enter_async_context(guests(folder, model, address, groups_per_s=extra_per_s))
            await record.until(options.minutes)
    return record.points


class Record:
    """The samples so far, also as lines of a file."""

    def __init__(self, nodes: Sequence[Node], file: Any, *, every_s: float) -> None:
        self.points: list[Point] = []
        self._nodes, self._file, self._every_s = nodes, file, every_s
        self._samplers = [Sampler(node) for node in nodes]
        self._began = time.monotonic()
        file.writerow(Point._fields)

    async def until(self, minute: float) -> None:
        """Sample all nodes periodically until this minute. Raises RuntimeError if one of them has ended."""
        while (now := (time.monotonic() - self._began) / 60) < minute:
            for node in self._nodes:
                if node.child.exit_code is not None:
                    raise RuntimeError(f"{node.name} ended with {node.child.exit_code}: {node.child.last_words()}")
            samples = [asyncio.to_thread(sampler.sample, round(now, 3)) for sampler in self._samplers]
            for points in await asyncio.gather(*samples):
                self.points += points
                self._file.writerows(points)
            about_machine = sample_machine(round(now, 3))
            self.points += about_machine
            self._file.writerows(about_machine)
            await asyncio.sleep(self._every_s)


def summary(series: Sequence[Series], findings: Sequence[Finding], *, warm_up: float) -> dict[str, Any]:
    """Return the printed JSON object: rates of all nodes together, and each quantity with its verdict."""
    verdicts = [finding.verdict for finding in findings if finding.series.who != MACHINE]
    rates = {
        f"{what.replace(' ', '_')}_per_minute": rate if rate is None else round(rate, 1)
        for what in ("steps", "own groups", "foreign groups", "refused groups")
        for rate in [per_minute(series, what, after=warm_up)]
    }
    restarts = sum(max(one.values) for one in series if one.quantity == "lives") - sum(
        min(one.values) for one in series if one.quantity == "lives"
    )
    before = per_minute(series, "foreign groups", before=BEFORE_GUESTS_MINUTES)
    inbound = rates["foreign_groups_per_minute"]
    counts = {f"num_{verdict}": verdicts.count(verdict) for verdict in ("flat", "falls", "unclear", "grows")}
    return {
        "flat": "grows" not in verdicts and "unclear" not in verdicts,
        "warm_up_minutes": round(warm_up, 1),
        "calm_share": round(calm_share(series, after=warm_up), 3),
        "restarts": round(restarts),
        **rates,
        "inbound_ratio": round(inbound / before, 2) if inbound and before else None,
        **counts,
        "quantities": [finding.as_dict() for finding in findings],
    }


def calm_share(series: Sequence[Series], *, after: float) -> float:
    """Return the share of the judged time without disturbances by the host, in which lags and answers are judged."""
    minutes = [minute for one in series if one.who == MACHINE for minute in one.minutes if minute >= after]
    disturbed = disturbances(series)
    return sum(is_calm(minute, disturbed) for minute in minutes) / len(minutes) if minutes else 1.0


def plot_soak(series: Sequence[Series], path: Path, *, warm_up: float, title: str) -> None:
    """Write the plot. Parts of nodes are sums over all nodes, and lines of the bootstrap node are dotted."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = {quantity: name for quantity, name in PANELS.items() if any(one.quantity == quantity for one in series)}
    rows = -(-len(shown) // COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(WIDTH * COLUMNS, HEIGHT * rows), layout="constrained")
    for (quantity, name), panel in zip(shown.items(), axes.flat, strict=False):
        for one in (one for one in series if one.quantity == quantity):
            minutes, values = _rates(one) if quantity == "done" else (one.minutes, one.values)
            style = ":" if one.who == "bootstrap" else "-"
            panel.plot(minutes, values, style, label=one.part if style == "-" else f"{one.part} (bootstrap)", lw=1)
        panel.axvspan(0, warm_up, color="0.92", zorder=0)
        panel.set(title=name, xlabel="minutes", ylim=(0, None))
        panel.legend(fontsize="x-small", ncols=2)
        panel.grid(alpha=0.3)
    for unused in list(axes.flat)[len(shown) :]:
        unused.axis("off")
    figure.suptitle(title)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def _rates(one: Series) -> tuple[Sequence[float], Sequence[float]]:
    """Return the increase of a count in each minute of the soak."""
    if len(one.minutes) < 2:
        return [], []
    marks = np.arange(one.minutes[0], one.minutes[-1], 1.0)
    return list(marks[1:]), list(np.diff(np.interp(marks, one.minutes, one.values)))


if __name__ == "__main__":
    main()
