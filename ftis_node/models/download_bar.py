"""Adapter from the hub library's progress bars to a callback.

The library takes a class of bars, and this one draws nothing. It makes several bars for one download, of files and of
bytes. The bar with the most bytes to come reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftis_node.telemetry.progress import OnProgress

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))


def progress_bar_class(repo: str, on_progress: OnProgress) -> type[Any]:
    """Return a class of bars that report the progress of `repo`'s download."""
    from tqdm.std import tqdm

    largest = [0.0]

    class CallbackBar(tqdm):  # type: ignore[misc]  # untyped
        """A bar that counts like its base class and reports instead of drawing."""

        monitor_interval = 0  # no drawing thread

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"file": _Nowhere(), "disable": False})

        def display(self, *_: Any, **__: Any) -> bool:
            """Report progress instead of drawing."""
            total = float(self.total or 0)
            if self.unit == "B" and total > 0 and total >= largest[0]:
                largest[0] = total
                on_progress(min(1.0, self.n / total), f"downloading {repo}, {_of(self.n, total)}")
            return True

    return CallbackBar


def _of(done: float, total: float) -> str:
    size, unit = next(pair for pair in UNITS if total >= pair[0])
    return f"{done / size:.1f} of {total / size:.1f} {unit}"


class _Nowhere:
    """Null object: a file that discards everything."""

    def write(self, text: str) -> int:
        """Discard the text."""
        return len(text)

    def flush(self) -> None:
        """Do nothing."""
