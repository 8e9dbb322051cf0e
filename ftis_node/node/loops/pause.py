"""The pause loop: pauses and resumes the node, by the operator's commands and by `[schedule]` of the settings.

During a pause the workers have ended, so their memory is free. All other loops run: the node serves its groups, takes
part in the gossip, and answers. The step in progress ends first, and the learner saves it. A group in generation that
does not end within `GROUPS_END_S` begins again after the pause.

`pause.json` in the home keeps the last command, so a restarted node remains paused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ftis_node.config.home import Home
from ftis_node.config.node import NodeSettings
from ftis_node.errors import FileError, how_to_install
from ftis_node.files import read_object, replace_file
from ftis_node.node.context import NodeContext
from ftis_node.node.pausing import Command, Decision, decide, length_of
from ftis_node.node.supervision.machine_observer import MachineFacts, MachineObserver
from ftis_node.node.supervision.waits import in_background, wait_at_most
from ftis_node.node.training.generation_limits import GenerateBudget
from ftis_node.telemetry.health_summary import pause_words
from ftis_node.telemetry.nvml import opened_nvml
from ftis_node.workers.supervisor import Supervisor
from ftis_node.workers.weight_store import discard_published

log = logging.getLogger(__name__)

PERIOD_S = 10.0
GROUPS_END_S = 10.0
POLL_S = 0.1
MAX_LENGTH_S = 366 * 86400.0
ACTIONS = ("pause", "resume")


@dataclass(eq=False, repr=False)
class PauseLoop:
    """Loop that decides every ten seconds, and at each command, whether the node computes."""

    context: NodeContext
    home: Home
    workers: tuple[Supervisor, ...]  # one or two, in the order in which they end; they start in the reverse order
    sync_weights: Callable[[], None]  # gives the weights of the learner's new process to the generator's
    published: Path | None  # the folder of the learner's weights, usually in memory; None: it stays
    budget: GenerateBudget
    observer: MachineObserver
    _facts: MachineFacts = field(default_factory=MachineFacts, init=False)
    _asked: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        self._gate = self.context.pause
        self._command = read_command(self.home)

    async def run(self) -> None:
        while True:
            self._asked.clear()
            await self.check()
            await wait_at_most(PERIOD_S, self._asked)

    async def check(self) -> None:
        """Pause or resume, as the settings, the last command, the time and the machine require."""
        self._facts = await in_background(self.observer.facts)
        decision = self._decision()
        if decision.is_pause and not self._gate.is_paused:
            await self._begin(decision)
        elif self._gate.is_paused and not decision.is_pause:
            await self._end()
        elif self._gate.is_paused:
            self._gate.decision = decision

    def change(self, action: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Do one of ACTIONS, for `arguments["for_s"]` seconds if given, and return what follows. Raise UsageError.

        `resume` with a time overrides the schedule until then. If `pause.json` cannot be written, only the log says so.
        """
        length_s = length_of(arguments, most_s=MAX_LENGTH_S)
        until = None if length_s is None else time.time() + length_s
        command = Command("pause", until) if action == "pause" else Command("run", until) if until else Command()
        self._command = command
        try:
            replace_file(self.home.pause, msgspec.json.encode(command))
        except (OSError, FileError) as error:  # for example a full disk
            log.warning("the command %s does not survive a restart of the node: %s", action, error)
        self._asked.set()
        decision = self._decision()
        return {"reason": decision.reason, "until": decision.until, "in_effect": self._gate.is_in_effect}

    def _decision(self) -> Decision:
        return decide(self.context.settings.schedule, self._command, self._facts, now=time.time())

    async def _begin(self, decision: Decision) -> None:
        self.context.events.write("pause_began", reason=decision.reason, until=decision.until)
        log.info("%s; the step in progress ends first", pause_words(decision.reason, decision.until, now=time.time()))
        await self._gate.begin(decision)
        if not self._decision().is_pause:  # a command came meanwhile
            await self._end()
            return
        deadline = time.monotonic() + GROUPS_END_S
        while self.budget.num_under_way and time.monotonic() < deadline:  # noqa: ASYNC110 - the budget sets no event for it
            await asyncio.sleep(POLL_S)
        await self._end_workers()

    async def _end_workers(self) -> None:
        for worker in self.workers:  # in turn: a generator that starts may ask the learner for weights
            await worker.pause()
        if self.published is not None:
            with suppress(OSError):  # the learner's next process removes what is left
                await in_background(discard_published, self.published)  # it publishes its version again
        self._gate.take_effect()
        log.info("paused: the workers have ended, their memory is free")

    async def _end(self) -> None:
        if self._gate.is_in_effect and not await self._start_workers():
            log.info("paused again before the workers had loaded the model")
            await self._end_workers()
            return
        length_s = self._gate.end()
        self.context.events.write("pause_ended", paused_s=round(length_s, 1))
        log.info("resumed")

    async def _start_workers(self) -> bool:
        """Start the workers and return True; return False as soon as the decision is a pause again."""
        log.info("the pause ends: the workers load the model")
        self._gate.lose_effect()
        *later, first = self.workers
        if not await self._is_started(first):
            return False
        if later:  # a generator that starts last loads the weights that the learner's new process writes
            self.sync_weights()
        for worker in later:
            if not await self._is_started(worker):
                return False
        return True

    async def _is_started(self, worker: Supervisor) -> bool:
        """Start a worker and wait until it is ready. Return False as soon as the decision is a pause again."""
        worker.resume()
        ready = asyncio.ensure_future(worker.wait_ready())
        try:
            while not ready.done():
                asked = asyncio.ensure_future(self._asked.wait())
                await asyncio.wait({ready, asked}, timeout=PERIOD_S, return_when=asyncio.FIRST_COMPLETED)
                asked.cancel()
                self._asked.clear()
                self._facts = await in_background(self.observer.facts)
                self._gate.decision = self._decision()
                if self._gate.decision.is_pause:
                    return False
            await ready
            return True
        finally:
            ready.cancel()


def first_decision(settings: NodeSettings, home: Home) -> Decision:
    """Return the decision for a node that starts now. Warn of a setting without effect here.

    It takes some milliseconds.
    """
    if settings.schedule.when_gpu_is_used == "pause" and opened_nvml() is None:
        log.warning(
            "schedule.when_gpu_is_used has no effect: there is no NVIDIA driver, or nvidia-ml-py is missing; %s",
            how_to_install("gpu-figures"),
        )
    facts = MachineObserver(settings.schedule).facts()
    return decide(settings.schedule, read_command(home), facts, now=time.time())


def read_command(home: Home) -> Command:
    """Return the last command; none if the home has no readable one."""
    try:
        return msgspec.convert(read_object(home.pause), Command)
    except (OSError, FileError, msgspec.ValidationError):
        return Command()
