"""Plots traffic, memory, CPU and the fraction of pulled groups over the size of the swarm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm_simulation.traffic import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from swarm_simulation.result import SimulationResult

PANEL_WIDTH, PANEL_HEIGHT = 4.4, 3.4  # inches
DPI = 110


def plot_scale(figures: Sequence[SimulationResult], path: Path) -> None:
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
    figure.savefig(path, dpi=DPI)
