"""An empty buffer on disk, and a reader of it."""

import pytest

from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.reader import ReplayReader


@pytest.fixture
def path(tmp_path):
    return tmp_path / "replay.sqlite"


@pytest.fixture
def buffer(path):
    buffer = ReplayBuffer(path)
    yield buffer
    buffer.close()


@pytest.fixture
def reader(buffer, path):
    reader = ReplayReader(path)
    yield reader
    reader.close()
