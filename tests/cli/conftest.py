"""A tiny model that the tests of commands share."""

import pytest

from tests.models.tiny_models import save_tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny-model")
