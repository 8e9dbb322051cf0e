"""An empty buffer on disk, and a reader of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.reader import ReplayReader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "replay.sqlite"


@pytest.fixture
def buffer(path: Path) -> Iterator[ReplayBuffer]:
    buffer = ReplayBuffer(path)
    yield buffer
    buffer.close()


@pytest.fixture
def reader(buffer: ReplayBuffer, path: Path) -> Iterator[ReplayReader]:
    reader = ReplayReader(path)
    yield reader
    reader.close()
