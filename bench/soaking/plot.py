"""The soak as a picture: a panel for each kind of quantity, a line for each part, the warm-up in grey."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from soaking.verdicts import Series

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


def plot_soak(series: Sequence[Series], path: Path, *, warm_up: float, title: str) -> None:
    """Writes the picture. The nodes' parts are sums over all nodes; the bootstrap node's lines are dotted."""
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
    """What a count grew by in each of the soak's minutes."""
    if len(one.minutes) < 2:
        return [], []
    marks = np.arange(one.minutes[0], one.minutes[-1], 1.0)
    return list(marks[1:]), list(np.diff(np.interp(marks, one.minutes, one.values)))
