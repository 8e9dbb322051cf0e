"""The package logs nothing while it is fuzzed, and as before afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fuzz.world import quiet

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def quiet_package() -> Iterator[None]:
    with quiet():
        yield
