"""What every test may use: a signed group made by hand, the tiny models; and how the suite is divided and reported."""

from __future__ import annotations

import multiprocessing.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from ftis_node.records.codec import hash_prompt
from ftis_node.records.group import (
    Completion,
    FinishReason,
    Group,
    PromptRef,
    SamplingSettings,
    TextCompletion,
    TextGroup,
)
from ftis_node.records.identity import Identity
from tests import scheduling, summary, tiers
from tests.small_swarm import pytest_runtest_teardown as pytest_runtest_teardown  # a hook
from tests.small_swarm import small_swarm as small_swarm  # a fixture
from tests.trained_models import copy_trained_models

if TYPE_CHECKING:
    from collections.abc import Generator

    from _pytest.terminal import TerminalReporter

PROMPT_IDS = [5, 6, 7]
EOS = 2
EXAMPLES = Path(__file__).parents[1] / "examples"
RUN_ID = "ab" * 16
TOKENIZER = "cd" * 16

# What an example takes is a matter of how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """A folder for what a killed node leaves in the temporary one, removed at the end; workers and nodes inherit it."""
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        return
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # `tmp_path` stays where it was
    folder = tempfile.mkdtemp(prefix="ftis-tests-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # After multiprocessing's own folder in it, whose priority is -100.
    multiprocessing.util.Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=-200)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.mark(items)
    scheduling.longest_first(items)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> scheduling.ByFile:
    return scheduling.ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    summary.make_sendable(report)
    return report


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    summary.write_summary(terminalreporter)


@pytest.fixture
def identity() -> Identity:
    return Identity.from_seed(bytes(range(32)))


def make_completion(*ids: int, reward: float = 0.0, versions: tuple[int, int] = (3, 3)) -> Completion:
    """A completion of these ids, sampled by these versions; it stopped if it ends with EOS."""
    return Completion(
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=np.linspace(-0.1, -2.0, len(ids), dtype=np.float32),
        finish_reason=FinishReason.STOP if ids[-1] == EOS else FinishReason.LENGTH,
        reward=reward,
        policy_version=versions[0],
        policy_version_newest=versions[1],
    )


def make_group(identity: Identity, *, versions: tuple[int, int] = (3, 3), **changes: Any) -> Group:
    """A group of two completions of the problem 5, one of them right; both were sampled by these versions."""
    group = Group.from_completions(
        run_id=RUN_ID,
        sender=identity.peer_id,
        number=1,
        prompt_ref=PromptRef("arithmetic", "train", 5),
        prompt_hash=hash_prompt(PROMPT_IDS),
        completions=(
            make_completion(10, 11, EOS, reward=1.0, versions=versions),
            make_completion(12, 13, versions=versions),
        ),
        sampling=SamplingSettings(),
        model="tiny-s",
        tokenizer=TOKENIZER,
        created_at=round(time.time(), 3),
    )
    if (completions := changes.pop("completions", None)) is not None:
        group = group.with_completions(completions)
    return replace(group, **changes)


def make_text_group(identity: Identity, **changes: Any) -> TextGroup:
    """A group of two texts by a peer with another tokenizer; the first is right."""
    group = TextGroup(
        run_id=RUN_ID,
        sender=identity.peer_id,
        number=1,
        prompt_ref=PromptRef("arithmetic", "train", 5),
        prompt_hash=bytes(16),
        sampling=SamplingSettings(),
        model="tiny-other",
        tokenizer="ef" * 16,
        policy_version=3,
        policy_version_newest=4,
        created_at=round(time.time(), 3),
        retells=bytes(range(32)),
        completions=(
            TextCompletion("10", mean_logprob=-0.25, num_tokens=3, finish_reason=FinishReason.STOP, reward=1.0),
            TextCompletion("naïve 京", mean_logprob=-2.0, num_tokens=5, finish_reason=FinishReason.LENGTH),
        ),
    )
    return replace(group, **changes)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The two tiny models with less than half of their training: right now and then."""
    return copy_trained_models(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def example_plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the example package with a task and a reward."""
    return _installed(EXAMPLES / "ftis-node-task-sorting", tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="session")
def example_method(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the example package with a loss method and a filter."""
    return _installed(EXAMPLES / "ftis-node-method-sqrt", tmp_path_factory.mktemp("method"))


def write_distribution(folder: Path, package: str, entry_points: str, *, version: str = "1.0") -> None:
    """What pip leaves of a package that is installed in `folder`; its modules are the test's."""
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def _installed(package: Path, folder: Path) -> Path:
    """Install the package without an index into a folder below `folder`."""
    copy = shutil.copytree(package, folder / "source")  # building leaves files behind
    flags = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    target = folder / "target"
    pip = [sys.executable, "-m", "pip", "install", *flags, "--target", str(target), str(copy)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target
