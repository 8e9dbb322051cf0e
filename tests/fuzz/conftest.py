"""A fixture that disables the log of the package during fuzzing."""

import pytest

from tests.fuzz.fuzzed_node import quiet


@pytest.fixture(autouse=True)
def quiet_package():
    with quiet():
        yield
