"""Fixtures of the learner's tests: the tiny model of tests/models, saved once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "models"):  # for `learner_rig` and `tiny_models`
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from tiny_models import save_tiny  # noqa: E402  found by the path above


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("learner") / "tiny", seed=5)
