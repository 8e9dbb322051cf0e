"""The order of calls by which vLLM's core sleeps, wakes and loads weights, without vLLM.

`FakeClient` replaces vLLM's core: it has one step in flight when a command comes. It stamps versions on outputs as
`EngineCore._attach_weight_version` does. It refuses what `Executor.wake_up` and `GPUWorker.sleep` of vLLM 0.32 refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftis_node.errors import EngineError, ModelError, SharingError, WorkerTaskError
from ftis_node.generation.engines.sleep_trial import try_sleep
from ftis_node.generation.engines.vllm_core import VllmCore
from ftis_node.workers.shared_weights import SharedWeights

LOST = -1
SHARED = SharedWeights(export_id="e", device_uuid="u", storages=(), tensors=())


class FakeClient:
    """A client of a core. `weights` is the version that steps use; `outputs` has pairs of version and stamp."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.outputs: list[tuple[int, str]] = []
        self.weights = 0
        self.refuses = ""
        self.fails: Exception | None = None
        self._stamp = "0"
        self._is_paused = False
        self._asleep: set[str] = set()
        self._level = 0
        self._under_way: int | None = 0

    def _step(self) -> None:
        """Finish the step in flight and begin the next one, as the core does between two commands."""
        if self._is_paused:
            return
        if self._under_way is not None:
            self.outputs.append((self._under_way, self._stamp))
        self._under_way = self.weights

    def sleep(self, level: int, mode: str = "abort") -> None:
        self.calls.append(f"sleep {level}")
        if level == 0:
            assert mode == "keep", "another mode ends requests in flight"
            self._step()
            self._under_way, self._is_paused = None, True
            return
        assert not self._asleep
        self._under_way, self._is_paused, self._level = None, True, level
        self._asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append("wake " + " ".join(tags))
        if tags == ["scheduling"]:
            assert not self._asleep
        elif self._asleep.issuperset(tags):
            self._asleep -= set(tags)
            if "weights" in tags and self._level == 2:
                self.weights = LOST
        if not self._asleep:
            self._is_paused = False
            self._under_way = self.weights

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(method)
        self._step()
        if method == "ftis_open":
            return [self.refuses]
        if self.fails is not None:
            raise self.fails
        assert "weights" not in self._asleep, "there is no memory for the weights"
        self.weights += 10 if self.weights != LOST else 101
        return [{"a": self.weights}]

    def set_weight_version(self, version: str) -> None:
        self._step()
        self._stamp = version

    def run_steps(self) -> None:
        for _ in range(3):
            self._step()


def load(core: VllmCore, transfer: str, version: int) -> dict[str, int]:
    return core.load("path", version) if transfer == "file" else core.load_shared(SHARED, version)


@pytest.mark.parametrize("transfer", ["file", "shared"])
def test_each_token_has_the_version_of_the_weights_that_computed_it(transfer: str) -> None:
    """A completion is in flight during two hand-overs. The stamp of each output is the version that computed it."""
    client = FakeClient()
    core = VllmCore(client, can_sleep=True)
    for version in (10, 20):
        client.run_steps()
        assert load(core, transfer, version) == {"a": version}
        client.run_steps()
    assert {computed for computed, _ in client.outputs} == {0, 10, 20}
    assert all(str(computed) == stamp for computed, stamp in client.outputs), client.outputs
    assert "wake scheduling" in client.calls


@pytest.mark.parametrize(("discard", "level"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("transfer", ["file", "shared"])
def test_new_weights_wake_the_core_and_its_cache_last(transfer: str, discard: bool, level: int) -> None:
    client = FakeClient()
    core = VllmCore(client, can_sleep=True)
    core.sleep(discard=discard)
    core.sleep(discard=discard)  # no-op
    assert core.is_asleep
    load(core, transfer, 100 if discard else 10)
    opened = ["ftis_open"] if transfer == "shared" else []
    name = "ftis_load_shared" if transfer == "shared" else "ftis_load"
    assert client.calls == [f"sleep {level}", *opened, "wake weights", name, "wake kv_cache"]
    assert (core.is_asleep, core.has_weights) == (False, True)
    client.run_steps()
    assert all(str(computed) == stamp for computed, stamp in client.outputs)
    core.sleep(discard=False)
    core.wake()
    assert client.calls[-1] == "wake weights kv_cache"


def test_no_step_runs_on_discarded_weights() -> None:
    client = FakeClient()
    core = VllmCore(client, can_sleep=True)
    core.sleep(discard=True)
    for _ in range(2):
        with pytest.raises(WorkerTaskError, match="discarded its weights"):
            core.wake()
    assert core.is_asleep
    client.fails = ModelError("the file is gone")
    with pytest.raises(ModelError):
        core.load("path", 100)
    with pytest.raises(WorkerTaskError, match="discarded its weights"):
        core.wake()
    client.fails = None
    core.load("path", 100)
    client.run_steps()
    assert LOST not in {computed for computed, _ in client.outputs}
    assert client.calls == ["sleep 2", "wake weights", "ftis_load", "ftis_load", "wake kv_cache"]


def test_a_failed_load_leaves_the_kept_weights() -> None:
    client = FakeClient()
    core = VllmCore(client, can_sleep=True)
    client.fails = ModelError("the file is gone")
    with pytest.raises(ModelError):
        core.load("path", 10)
    assert client.calls == ["sleep 0", "ftis_load", "wake scheduling"], "the core stays paused"
    core.sleep(discard=False)
    with pytest.raises(ModelError):
        core.load("path", 10)
    assert core.is_asleep
    core.wake()
    assert client.calls[3:] == ["sleep 1", "wake weights", "ftis_load", "wake kv_cache"]
    client.run_steps()
    assert set(client.outputs) == {(0, "0")}


@pytest.mark.parametrize("asleep", [True, False])
def test_shared_weights_that_cannot_be_mapped_change_nothing(asleep: bool) -> None:
    client = FakeClient()
    core = VllmCore(client, can_sleep=True)
    if asleep:
        core.sleep(discard=True)
    client.refuses = "CUDA IPC cannot open a handle"
    with pytest.raises(SharingError, match="^CUDA IPC cannot open a handle$"):
        core.load_shared(SHARED, 10)
    assert client.calls == ["sleep 2", "ftis_open"] if asleep else ["ftis_open"]
    assert (core.is_asleep, client.weights) == (asleep, 0)
    load(core, "file", 100 if asleep else 10)
    client.run_steps()
    assert all(str(computed) == stamp for computed, stamp in client.outputs)


def test_a_core_that_cannot_sleep_keeps_its_weights() -> None:
    client = FakeClient()
    core = VllmCore(client, can_sleep=False)
    core.sleep(discard=True)
    assert (core.is_asleep, core.has_weights, client.calls) == (True, True, [])
    core.wake()
    core.sleep(discard=True)
    load(core, "file", 10)
    assert client.calls == ["ftis_load"]
    assert not core.is_asleep


class SleepyEngine:
    """An engine whose log-probs after a sleep are given, or raise an error."""

    def __init__(self, after: Callable[[], list[float]]) -> None:
        self._after = after
        self._num_sleeps = 0

    async def probe(self, token_ids: Any) -> list[float]:
        return self._after() if self._num_sleeps else [-1.0, -2.0]

    async def sleep(self) -> None:
        self._num_sleeps += 1

    async def wake(self) -> None:
        assert self._num_sleeps == 1


def fail(message: str) -> list[float]:
    raise RuntimeError(message)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (lambda: [-1.0, -2.001], None),
        (
            lambda: [-1.0, float("nan")],
            (EngineError, r"on this card \(log-probs differ by nan .*placement = \"shared\""),
        ),
        (lambda: [-1.0, -2.5], (EngineError, r"on this card \(log-probs differ by 0\.5 ")),
        (lambda: fail("double free"), (EngineError, r"on this card \(.*double free")),
        (lambda: fail("CUDA out of memory"), (RuntimeError, "^CUDA out of memory$")),  # not the card's fault
    ],
)
async def test_a_card_is_refused_if_the_engine_differs_after_its_first_sleep(
    tmp_path: Path, after: Callable[[], list[float]], expected: tuple[type[Exception], str] | None
) -> None:
    engine: Any = SleepyEngine(after)
    marker = tmp_path / "cache" / "card"
    if expected is None:
        await try_sleep(engine, (1, 2, 3), marker)
    else:
        with pytest.raises(expected[0], match=expected[1]):
            await try_sleep(engine, (1, 2, 3), marker)
    assert marker.exists() == (expected is None)
