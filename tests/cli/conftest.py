"""A tiny model that the tests of commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.tiny_models import save_tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny-model")
