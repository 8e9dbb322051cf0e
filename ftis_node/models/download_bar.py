"""The hub library's progress bars, told instead of drawn: it takes a class of bars, and gets one that draws nothing.

It makes several bars for one download, of files and of bytes; told is the one with most bytes to come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftis_node.telemetry.progress import OnProgress

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))


def progress_bar_class(repo: str, on_progress: OnProgress) -> type[Any]:
    """A class of bars that tell how much of `repo` is here."""
    from tqdm.std import tqdm

    largest = [0.0]

    class CallbackBar(tqdm):  # type: ignore[misc]  # untyped
        """Counts as its base does."""

        monitor_interval = 0  # no thread that looks after the drawing

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"file": _Nowhere(), "disable": False})

        def display(self, *_: Any, **__: Any) -> bool:
            """In the place of drawing."""
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
    """A file that keeps nothing."""

    def write(self, text: str) -> int:
        """Takes it."""
        return len(text)

    def flush(self) -> None:
        """Nothing to do."""
