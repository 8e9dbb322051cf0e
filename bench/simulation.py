"""A node's traffic, memory and CPU against the size of the swarm: 10 to 10,000 nodes in virtual time.

    python bench/simulation.py [--nodes 10 100 1000 10000] [--minutes 5] [--seed 0] [--jobs 1]
                               [--plot docs/assets/scale.png]

The policies of `ftis_node/swarm` decide everything, and nothing is real but them (`bench/swarm_simulation`). Of a
swarm in which a node reads no shard but its own, `--most` nodes are simulated: all members of some shards.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from swarm_simulation import SimulationResult, SimulationSettings, simulate
from swarm_simulation.host_link import Kind
from swarm_simulation.settings import shards_for, simulated_shards_for

PROGRESS_S = 60.0  # of virtual time
PANEL_WIDTH, PANEL_HEIGHT = 4.4, 3.4  # inches


def main() -> None:
    options = arguments()
    settings = [settings_for(num_nodes, options) for num_nodes in options.nodes]
    if options.read:
        figures = [SimulationResult(**one) for path in options.read for one in json.loads(path.read_text())["swarms"]]
    elif options.jobs > 1:
        with ProcessPoolExecutor(options.jobs) as pool:
            figures = list(pool.map(run, sorted(settings, key=lambda one: -one.num_nodes)))
    else:
        figures = [run(one) for one in settings]
    figures.sort(key=lambda one: one.num_nodes)
    sys.stderr.write(table(figures))
    if options.plot:
        plot_scale(figures, options.plot)
    sys.stdout.write(json.dumps({"swarms": [asdict(one) for one in figures]}) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 1000, 10000])
    parser.add_argument("--minutes", type=float, default=5.0, help="virtual time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, help="instead of the number for the swarm's size")
    parser.add_argument("--most", type=int, default=600, help="nodes to simulate if shards do not interact")
    parser.add_argument("--jobs", type=int, default=1, help="swarms at a time")
    parser.add_argument("--read", type=Path, nargs="+", help="combine results of earlier runs, without a new run")
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def settings_for(num_nodes: int, options: argparse.Namespace) -> SimulationSettings:
    num_shards = options.shards or shards_for(num_nodes)
    return SimulationSettings(
        num_nodes=num_nodes,
        minutes=options.minutes,
        seed=options.seed,
        num_shards=num_shards,
        num_simulated_shards=simulated_shards_for(num_nodes, num_shards, most_nodes=options.most),
    )


def run(settings: SimulationSettings) -> SimulationResult:
    """Simulate one swarm, with a line on stderr for each minute of virtual time."""
    begun = time.monotonic()

    def print_progress(now: float) -> None:
        if now % PROGRESS_S < 10.0:
            took_s = time.monotonic() - begun
            sys.stderr.write(f"{settings.num_nodes} nodes: {now:.0f} of {settings.end_s:.0f} s, {took_s:.0f} s here\n")

    return simulate(settings, progress=print_progress)


def table(figures: list[SimulationResult]) -> str:
    """Return the main figures as rows."""
    names = "nodes (simulated)  shards  read  kB/s in  out  memory kB  CPU ms/s  pulled %  at once %  full %  share\n"
    rows = [
        f"{one.num_nodes} ({one.num_simulated})  {one.num_shards}  {one.shards_read:.1f}"
        f"  {one.received_in_all / 1e3:.1f}  {one.sent_in_all / 1e3:.1f}  {one.memory_bytes / 1e3:.0f}"
        f"  {one.cpu_ms_per_s:.2f}  {100 * one.pulled_share:.2f}  {100 * one.pulled_at_first_share:.1f}"
        f"  {100 * one.full_steps_share:.2f}  {one.top_share_of_cap:.2f}\n"
        for one in figures
    ]
    return "".join([names, *rows])


def plot_scale(figures: list[SimulationResult], path: Path) -> None:
    """Plot four panels side by side, one point for each swarm."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * PANEL_WIDTH, PANEL_HEIGHT), layout="constrained")
    traffic, memory, cpu, pulled = figure.subplots(1, 4)
    sizes = [one.num_nodes for one in figures]
    for kind in Kind:
        name = kind.name.lower()
        traffic.plot(sizes, [one.received_bytes_per_s[name] / 1e3 for one in figures], "o-", label=name)
    traffic.plot(sizes, [one.received_in_all / 1e3 for one in figures], "ko-", label="all")
    traffic.set(title="received by a node", ylabel="kB/s", ylim=(0, None))
    traffic.legend(fontsize="x-small")
    memory.plot(sizes, [one.memory_bytes / 1e3 for one in figures], "o-", label="mean")
    memory.plot(sizes, [one.memory_bytes_max / 1e3 for one in figures], "o--", label="largest")
    memory.set(title="the policies' memory", ylabel="kB", ylim=(0, None))
    memory.legend(fontsize="x-small")
    cpu.plot(sizes, [one.cpu_ms_per_s for one in figures], "o-")
    cpu.set(title="the policies' time", ylabel="ms of one core a second", ylim=(0, None))
    pulled.plot(sizes, [100 * one.pulled_share for one in figures], "o-", label="groups pulled by another")
    pulled.plot(sizes, [100 * one.full_steps_share for one in figures], "o-", label="steps with all foreign groups")
    pulled.axhline(99, color="grey", linestyle=":")
    pulled.set(title="nothing is lost", ylabel="%", ylim=(97, 100.1))
    pulled.legend(fontsize="x-small")
    for panel in (traffic, memory, cpu, pulled):
        panel.set(xscale="log", xlabel="nodes in the swarm")
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
