"""Shared helpers and fixtures: hand-made groups, trained tiny models, installed example packages; pytest hooks."""

import json
import multiprocessing.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main
from hypothesis import HealthCheck, settings

from ftis_node.config.manifest import RunManifest
from ftis_node.errors import TaskError
from ftis_node.records.codec import hash_messages, hash_prompt
from ftis_node.records.envelope import Accepted, seal_group
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
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.tasks import dataset_rows
from ftis_node.tasks.arithmetic import ArithmeticTask
from tests import scheduling, tiers
from tests.small_swarm import pytest_runtest_teardown as pytest_runtest_teardown  # a hook
from tests.small_swarm import small_swarm as small_swarm  # a fixture
from tests.trained_models import copy_trained_models

PROMPT_IDS = [5, 6, 7]
PROMPT = ArithmeticTask()[5].prompt
EOS = 2
EXAMPLES = Path(__file__).parents[1] / "examples"
RUN_ID = "ab" * 16
TOKENIZER = "cd" * 16

# Typer makes all commands and options again for each command that runs.
typer.main.get_command = cache(typer.main.get_command)

# No deadline: the time of an example depends on the load of the machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Set a temporary folder for this test run, which workers and nodes inherit, and remove it at the end.

    A killed node leaves files in it.
    """
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        return
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # `tmp_path` keeps its place
    folder = tempfile.mkdtemp(prefix="ftis-tests-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # multiprocessing removes its folder inside with priority -100. This folder goes after it.
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
    scheduling.make_sendable(report)
    return report


@pytest.fixture
def identity():
    return Identity.from_seed(bytes(range(32)))


def raises_line(kind: type[Exception], *parts: str) -> pytest.RaisesExc[Exception]:
    """Expect an error of one line that has these parts."""
    return pytest.raises(kind, check=lambda error: "\n" not in str(error) and all(part in str(error) for part in parts))


def make_completion(*ids: int, reward: float = 0.0, versions: tuple[int, int] = (3, 3)) -> Completion:
    """Make a completion with these token ids and policy versions; its finish reason is `STOP` if the last id is EOS."""
    return Completion(
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=np.linspace(-0.1, -2.0, len(ids), dtype=np.float32),
        finish_reason=FinishReason.STOP if ids[-1] == EOS else FinishReason.LENGTH,
        reward=reward,
        policy_version=versions[0],
        policy_version_newest=versions[1],
    )


def problem_hash(index: int) -> bytes:
    """Return the hash of the messages of the problem `index` of the task arithmetic."""
    return hash_messages(ArithmeticTask()[index].prompt)


def make_group(identity: Identity, *, versions: tuple[int, int] = (3, 3), **changes: Any) -> Group:
    """Make a group of two completions with rewards 1 and 0, sampled by these policy versions.

    The first group of a sender is about problem 5, each further one about the next problem.
    """
    index = (4 + changes.get("number", 1)) % 2**31
    group = Group.from_completions(
        run_id=RUN_ID,
        sender=identity.peer_id,
        number=1,
        prompt_ref=PromptRef("arithmetic", "train", index),
        problem_hash=problem_hash(index),
        prompt_hash=hash_prompt(PROMPT_IDS),
        completions=(
            make_completion(10, 11, EOS, reward=1.0, versions=versions),
            make_completion(12, 13, versions=versions),
        ),
        sampling=SamplingSettings(),
        model="tiny-s",
        tokenizer=TOKENIZER,
        created_at=round(time.time(), 3),
        end_ids=(EOS,),
    )
    if (completions := changes.pop("completions", None)) is not None:
        group = group.with_completions(completions)
    return replace(group, **changes)


def make_text_group(identity: Identity, **changes: Any) -> TextGroup:
    """Make a group of two texts by a peer with another tokenizer; the first has reward 1."""
    group = TextGroup(
        run_id=RUN_ID,
        sender=identity.peer_id,
        number=1,
        prompt_ref=PromptRef("arithmetic", "train", 5),
        problem_hash=bytes(16),
        prompt_hash=bytes(4),
        sampling=SamplingSettings(),
        model="tiny-other",
        tokenizer="ef" * 16,
        policy_version=3,
        policy_version_newest=4,
        created_at=round(time.time(), 3),
        exact_group=bytes(range(32)),
        completions=(
            TextCompletion("10", mean_logprob=-0.25, num_tokens=3, finish_reason=FinishReason.STOP, reward=1.0),
            TextCompletion("naïve 京", mean_logprob=-2.0, num_tokens=5, finish_reason=FinishReason.LENGTH),
        ),
    )
    return replace(group, **changes)


def accept(group: Group | TextGroup, sender: Identity, ids: Sequence[Sequence[int]] = ((1, 2), (3,))) -> Accepted:
    """Seal a group and return it as validation does; `ids` are the tokens of the texts of a text group."""
    envelope = seal_group(group, sender)
    if isinstance(group, TextGroup):
        return Accepted(envelope, envelope.to_bytes(), group.in_tokens(ids), tuple(PROMPT_IDS), group.exact_group)
    return Accepted(envelope, envelope.to_bytes(), group, tuple(PROMPT_IDS))


def with_sections(manifest: RunManifest, **sections: dict[str, Any]) -> RunManifest:
    """Return the manifest with these values in its sections."""
    changed = {name: getattr(manifest, name).model_copy(update=values) for name, values in sections.items()}
    return manifest.model_copy(update=changed)


def fill_buffer(path: Path, *groups: Accepted, own: Identity | None = None) -> None:
    """Store groups in the buffer at `path`, those of `own` as the node's own."""
    with closing(ReplayBuffer(path)) as buffer:
        for each in groups:
            assert buffer.admit(each, own=own is not None and each.group.sender == own.peer_id)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """Folders of the tiny models s and m by size, trained so briefly that only some of their answers are correct."""
    return copy_trained_models(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def example_plugin(tmp_path_factory):
    """A folder into which pip has installed the example package with a task and a reward."""
    return _installed(EXAMPLES / "ftis-node-task-sorting", tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="session")
def example_method(tmp_path_factory):
    """A folder into which pip has installed the example package with a loss, a filter, advantages and a choice."""
    return _installed(EXAMPLES / "ftis-node-methods", tmp_path_factory.mktemp("method"))


@pytest.fixture
def methods_package(example_method, monkeypatch):
    """The folder of `example_method`, on the path."""
    monkeypatch.syspath_prepend(example_method)
    return example_method


@pytest.fixture
def fresh_plugins():
    """Clear the caches, so that each test loads the plug-ins on its path."""
    from ftis_node.algorithms.methods import load_method
    from ftis_node.algorithms.scored_batch import load_advantage
    from ftis_node.algorithms.settings import load_filter
    from ftis_node.replay.group_choice import load_choice

    loaders = (load_method, load_filter, load_advantage, load_choice)
    for load in loaders:
        load.cache_clear()
    yield
    for load in loaders:
        load.cache_clear()


@pytest.fixture(scope="session")
def example_episode(tmp_path_factory):
    """A folder into which pip has installed the example package with an episode."""
    return _installed(EXAMPLES / "ftis-node-episode-lock", tmp_path_factory.mktemp("episode"))


def write_distribution(folder: Path, package: str, entry_points: str, *, version: str = "1.0") -> None:
    """Write the metadata that pip writes for a package in `folder`; the test writes the package's modules."""
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def _installed(package: Path, folder: Path) -> Path:
    """Install the package without an index and return the target, a folder in `folder`."""
    copy = shutil.copytree(package, folder / "source")  # building leaves files behind
    flags = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    target = folder / "target"
    pip = [sys.executable, "-m", "pip", "install", *flags, "--target", str(target), str(copy)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def rows_in_this_process(monkeypatch):
    """Read rows without a child process, which takes a third of a second."""

    def read(source, limit_s, instead):
        with redirect_stdout(StringIO()) as rows, redirect_stderr(StringIO()) as errors:
            code = dataset_rows._run(json.dumps(asdict(source)))
        if code:
            raise TaskError(errors.getvalue().strip())
        return rows.getvalue().encode()

    monkeypatch.setattr(dataset_rows, "_output_of_child", read)
