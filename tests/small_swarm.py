"""A small real swarm that test files share: a bootstrap node and two nodes of different size that trained together.

It is for tests that only read. Both nodes have used their budgets of tokens and wait for groups, so they take no
processor time from other tests. A test must not stop them or ban a member. `copied_home` makes the home of a stopped
node.

The swarm starts for the first test that uses it. It takes more than 2 GB of memory, so it stops before the first test
of another group (tests/tiers.py). A later user starts a new swarm.
"""

import json
import os
import shutil
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ftis_node.config.home import Home
from tests.node.support import ANY_PORT, RunningNode, started, write_manifest
from tests.scheduling import group_of

START_S = 500.0  # for both nodes, on a busy machine
FOREIGN_WAIT_S = 600.0  # until the other node starts; later, with too few groups for a step, both nodes are idle
EVAL_EVERY_STEPS = 2  # in the manifest
MIN_STEPS = 3
BUDGET_TOKENS = 320  # of completions of three or four tokens each: about five steps
HF_TOKEN, WANDB_KEY = "hf_" + "Zq7" * 10, "f00d" * 10
SWARM_SECRET = "5eC2e7" * 12


@dataclass(frozen=True)
class SmallSwarm:
    """Two nodes on default ports: `ann` (model s), with a port for monitoring and a tracker, and `bob` (model m)."""

    folder: Path
    models: Mapping[str, Path]
    manifest: Path
    secret: Path
    address: str
    bootstrap: RunningNode
    ann: RunningNode
    bob: RunningNode


@dataclass
class SharedSwarm:
    """The running swarm, if there is one."""

    swarm: SmallSwarm | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def running(self, folders: pytest.TempPathFactory, models: Mapping[str, Path]) -> SmallSwarm:
        """Return the swarm, started if none runs."""
        if self.swarm is None:
            self.swarm = self._stack.enter_context(_running_swarm(folders.mktemp("swarm"), models))
        return self.swarm

    def stop(self) -> None:
        self.swarm = None
        self._stack.close()


SHARED_SWARM = pytest.StashKey[SharedSwarm]()


@pytest.fixture(scope="module")
def small_swarm(pytestconfig, tmp_path_factory, tiny_models):
    if SHARED_SWARM not in pytestconfig.stash:
        pytestconfig.stash[SHARED_SWARM] = SharedSwarm()
        pytestconfig.add_cleanup(pytestconfig.stash[SHARED_SWARM].stop)  # if the test run is interrupted
    return pytestconfig.stash[SHARED_SWARM].running(tmp_path_factory, tiny_models)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Stop the swarm after the last test of a group."""
    try:
        yield
    finally:
        if SHARED_SWARM in item.config.stash and (
            nextitem is None or group_of(nextitem.nodeid) != group_of(item.nodeid)
        ):
            item.config.stash[SHARED_SWARM].stop()


@contextmanager
def _running_swarm(folder: Path, models: Mapping[str, Path]) -> Iterator[SmallSwarm]:
    """Start both nodes; ann has tokens in the environment, and a umask that permits the group to write."""
    manifest = write_manifest(folder / "run.toml", foreign_wait_s=FOREIGN_WAIT_S)
    secret = folder / "swarm.secret"
    secret.write_text(SWARM_SECRET)
    secret.chmod(0o600)
    for name, observe in (("ann", '[observe]\nlisten = "0.0.0.0:0"\n'), ("bob", "")):
        (folder / name).mkdir()
        (folder / name / "node.toml").write_text(f'{observe}[swarm]\nsecret_file = "{secret}"\n')
    with ExitStack() as stack:
        bootstrap = stack.enter_context(started(folder / "bootstrap", "bootstrap", "--listen", ANY_PORT))
        address = bootstrap.first_line()

        def joined(name: str, size: str, *more: str) -> RunningNode:
            arguments = (
                "join", "--model", str(models[size]), "--task", "arithmetic", "--run", str(manifest),
                "--peers", address, "--engine", "torch", "--name", name,
                "--steps", "1000", "--generate-tokens", str(BUDGET_TOKENS),
            )  # fmt: skip
            return stack.enter_context(started(folder / name, *arguments, *more))

        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("HF_TOKEN", HF_TOKEN)
            environment.setenv("WANDB_API_KEY", WANDB_KEY)
            umask = os.umask(0o002)
            try:
                ann = joined("ann", "s", "--track", "tensorboard")
            finally:
                os.umask(umask)
        bob = joined("bob", "m")
        for node in (ann, bob):
            node.wait_for(lambda node=node: _has_settled(node), timeout_s=START_S)
        yield SmallSwarm(folder, models, manifest, secret, address, bootstrap, ann, bob)
        for node in (ann, bob):
            node.stop()


def _has_settled(node: RunningNode) -> bool:
    """Return whether the node used its budget, trained on foreign groups too, and saved its status after that."""
    path = Home(node.home).status
    if not path.exists():
        return False
    saved = json.loads(path.read_bytes())
    return bool(
        saved["budget"]["generate_tokens"]["left"] == 0
        and saved["learner"]["step"] == len(node.events("step")) >= MIN_STEPS
        and saved["learner"]["foreign_groups"]
        and saved["peers"]
    )


def copied_home(node: RunningNode, target: Path) -> Home:
    """Copy a running node's home at one moment: the home of a killed node, but without the lock file."""
    family = node.processes()
    for process in family:
        process.suspend()
    try:
        shutil.copytree(node.home, target, ignore=shutil.ignore_patterns("lock", "run"))
    finally:
        for process in family:
            process.resume()
    return Home(target)
