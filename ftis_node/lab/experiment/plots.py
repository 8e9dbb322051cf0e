"""Plots of an experiment: learning curves, methods side by side, and accuracy along a varied axis."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from ftis_node.lab.experiment.specs import ALONE
from ftis_node.lab.experiment.summary import Estimate, MethodResult, has_no_peers, varied_axes
from ftis_node.lab.experiment.trial_result import TrialResult
from ftis_node.view.formats import CURVES

CAP_SIZE, CAP_WIDTH = 2.5, 0.9  # of error bars, in points
DASHES = (("black", "--"), ("dimgrey", "-."), ("dimgrey", ":"), ("darkgrey", "-."), ("darkgrey", ":"))  # of baselines
PANEL_WIDTH, PANEL_HEIGHT = 5.6, 3.9  # inches
DPI = 110


def plot_curves(lines: Sequence[MethodResult], task: str, path: Path, *, by_tokens: bool = False) -> None:
    """Plot accuracy by step, or by own tokens: one panel per model of a pairing, one line per method."""
    panels = {
        title: {line.method: line.token_curve(task) if by_tokens else line.curve(task) for line in here}
        for title, here in _by_model(lines).items()
    }
    dashed = {line.method for line in lines if has_no_peers(line)}
    plot_panels(panels, path, x="own tokens" if by_tokens else "step", y=_accuracy(task), dashed=dashed)


def plot_panels(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, Estimate]]]],
    path: Path,
    *,
    y: str,
    x: str = "step",
    dashed: Container[str] = (),
) -> None:
    """Plot curves by `x`: one panel per title, one line per label, bars of one standard error over seeds."""
    figure, axes = new_panels(len(panels))
    for (title, lines), panel in zip(panels.items(), axes, strict=False):
        dashes = itertools.cycle(DASHES)
        for label, curve in lines.items():
            at, estimates = zip(*curve, strict=True)
            style = dict(zip(("color", "linestyle"), next(dashes), strict=True)) if label in dashed else {}
            _draw(panel, at, estimates, label=label, **style)
        panel.set(title=title, xlabel=x, ylabel=y)
    save_figure(figure, axes[: len(panels)], path)


def plot_methods(lines: Sequence[MethodResult], task: str, path: Path) -> None:
    """Plot the methods side by side: mean and final accuracy, with bars of one standard error."""
    panels = {
        title: {
            line.method.replace(":kl_", ":"): {"mean of the curve": line.along(task), "end": line.final(task)}
            for line in here
        }
        for title, here in _by_model(lines).items()
    }
    plot_rows(panels, path, x=_accuracy(task))


def plot_sweep(lines: Sequence[MethodResult], results: Sequence[TrialResult], task: str, path: Path) -> None:
    """Plot the final accuracy along the only axis that varies; nothing if another number of axes varies.

    A dashed line shows `alone` if it does not depend on that axis.
    """
    varied = varied_axes(results)
    if len(varied) != 1:
        return
    axis = varied[0]
    panels = _by_model(lines)
    figure, axes = new_panels(len(panels))
    for (title, here), panel in zip(panels.items(), axes, strict=False):
        along = [line for line in here if f" {axis}=" in line.method]
        places = list(dict.fromkeys(str(line.labels[axis]) for line in along))
        for method in dict.fromkeys(str(line.labels["method"]) for line in along):
            chosen = {str(line.labels[axis]): line for line in along if line.labels["method"] == method}
            at = [places.index(place) for place in places if place in chosen]
            _draw(panel, at, [chosen[places[position]].final(task) for position in at], label=method, marker="o")
        for line in here:
            if line.method == ALONE:
                panel.axhline(line.final(task).mean, color="black", linestyle="--", linewidth=1, label="alone")
        panel.set_xticks(range(len(places)), places)
        panel.set(title=title, xlabel=axis, ylabel=_accuracy(task, "at the end"))
    save_figure(figure, axes[: len(panels)], path, counts_on_x=False)


def plot_rows(panels: Mapping[str, Mapping[str, Mapping[str, Estimate]]], path: Path, *, x: str) -> None:
    """Plot values side by side: one panel per title, one row per name from top to bottom, one mark per value."""
    figure, axes = new_panels(len(panels))
    for (title, rows), panel in zip(panels.items(), axes, strict=False):
        for name in dict.fromkeys(name for row in rows.values() for name in row):
            there = [(place, row[name]) for place, row in enumerate(rows.values()) if name in row]
            errors = [value.error or 0.0 for _, value in there]
            places = [place for place, _ in there]
            panel.errorbar([value.mean for _, value in there], places, xerr=errors, fmt="o", label=name)
        panel.set_yticks(range(len(rows)), list(rows), fontsize="x-small")
        panel.invert_yaxis()
        panel.set(title=title, xlabel=x)
        panel.locator_params(axis="x", nbins=6)
    save_figure(figure, axes[: len(panels)], path, counts_on_x=False)


def _accuracy(task: str, when: str = "") -> str:
    """Return the label of an axis, in two lines: the specs of mixtures are long."""
    return "\n".join((f"greedy pass@1 {when}".strip(), textwrap.shorten(task.replace("+", " + "), 40)))


def _by_model(lines: Sequence[MethodResult]) -> dict[str, list[MethodResult]]:
    """Return the lines of each panel, by its title."""
    found: dict[str, list[MethodResult]] = {}
    for line in lines:
        found.setdefault(f"{line.pair}: {line.model}", []).append(line)
    return found


def new_panels(count: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    columns = min(2, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(PANEL_WIDTH * columns, PANEL_HEIGHT * rows), layout="constrained")
    flat = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in flat:
        panel.set_prop_cycle(color=CURVES)
    for unused in flat[count:]:
        unused.axis("off")
    return figure, flat


def _draw(panel: Any, x: Sequence[float], estimates: Sequence[Estimate], **style: Any) -> None:
    """Draw a line with error bars; a mean of one seed has none."""
    means, errors = [value.mean for value in estimates], [value.error for value in estimates]
    bars = {"elinewidth": CAP_WIDTH, "capsize": CAP_SIZE, "capthick": CAP_WIDTH}
    panel.errorbar(x, means, yerr=None if None in errors else errors, **bars, **style)


def save_figure(figure: Any, axes: Sequence[Any], path: Path, *, counts_on_x: bool = True) -> None:
    """Write a figure with grids to a file. `counts_on_x`: steps or tokens, so whole numbers.

    Panels with the same labels have one legend, below them, because then each label has one color.
    """
    from matplotlib.ticker import MaxNLocator

    for panel in axes:
        panel.grid(alpha=0.3)
        if counts_on_x and panel.get_xscale() == "linear":
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = axes[0].get_legend_handles_labels()
    if all(panel.get_legend_handles_labels()[1] == labels for panel in axes):
        if labels:
            figure.legend(handles, labels, loc="outside lower center", ncols=min(len(axes), 2), fontsize="small")
    else:
        for panel in axes:
            panel.legend(fontsize="small")
    figure.savefig(path, dpi=DPI)
