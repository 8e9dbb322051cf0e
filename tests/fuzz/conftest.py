"""A fixture that disables the log of the package during fuzzing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fuzz.fuzzed_node import quiet

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def quiet_package() -> Iterator[None]:
    with quiet():
        yield
