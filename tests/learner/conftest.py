"""Fixtures of the learner's tests: the tiny model of tests/models, saved once, and a micro-batch."""

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "models", HERE.parent / "generation"):  # for `learner_rig` and `tiny_models`
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from learner_rig import random_groups  # noqa: E402  found by the path above
from tiny_models import save_tiny  # noqa: E402

from ftis_node.learner.batch import make_batch, make_micro_batches  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("learner") / "tiny", seed=5)


@pytest.fixture(scope="session")
def micro_batch():
    """Return all of `random_groups` as one micro-batch of padded rows."""
    (only,) = make_micro_batches(make_batch(random_groups()), max_tokens=10_000)
    return only
