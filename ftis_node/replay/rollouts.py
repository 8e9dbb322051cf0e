"""Rollouts of a home as tables, for scripts and notebooks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftis_node.config.home import Home
from ftis_node.replay.reader import ReplayReader
from ftis_node.replay.rollout_rows import flat_rows, group_rows

if TYPE_CHECKING:
    from collections.abc import Iterator


class RolloutTable:
    """Read-only view of a home's replay buffer, exported as `ftis_node.ReplayBuffer`. It works beside a running node.

    A row is one completion, with the keys of `replay export --flat`.
    """

    def __init__(self, home: Home) -> None:
        self._home = home

    @classmethod
    def open(cls, home: str | Path) -> RolloutTable:
        """Return the rollouts of the node's home. Raises ConfigError if it has no buffer."""
        where = Home(Path(home).expanduser())
        ReplayReader(where.replay).close()
        return cls(where)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one row per completion, oldest first."""
        reader = ReplayReader(self._home.replay)
        try:
            yield from flat_rows(group_rows(reader))
        finally:
            reader.close()

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with one row per completion."""
        import pandas

        return pandas.DataFrame(list(self.rows()))

    def to_dataset(self) -> Any:
        """Return a `datasets.Dataset` with one row per completion."""
        import datasets

        return datasets.Dataset.from_list(list(self.rows()))
