"""A fixture that disables the log of the package during fuzzing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.fuzzed_node import quiet


@pytest.fixture(autouse=True)
def quiet_package() -> Iterator[None]:
    with quiet():
        yield
