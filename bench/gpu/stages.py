"""The stages of half an hour on a GPU, and which of them may start now. Pure: no clock, no process."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

PARTS = ("node", "vllm", "needs", "model")  # what bench/gpu/parts.py packs
SITES = tuple(f"{{work}}/site/{part}" for part in ("node", "vllm", "needs"))
SMALL_S = 240.0  # of any stage on two CPU cores, which others may use, too
LIMIT_RATIO = 2.0  # a stage that takes longer than this times its expected seconds is killed
State = Literal["waiting", "running", "passed", "failed", "killed", "skipped"]
ENDED: frozenset[State] = frozenset({"passed", "failed", "killed", "skipped"})


@dataclass(frozen=True, slots=True)
class Stage:
    """A command with `{out}`, the stage's folder, and `{work}`, the folder of all.

    `needs` are parts that are unpacked, and stages that passed. `after` are stages that have ended in whatever way. Of
    the stages with `on_gpu` one runs at a time.
    """

    name: str
    command: tuple[str, ...]
    expected_s: float
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    on_gpu: bool = True

    @property
    def limit_s(self) -> float:
        return LIMIT_RATIO * self.expected_s


def stages_of(*, small: bool) -> tuple[Stage, ...]:
    """Return the stages in their order: if time is short, the last are skipped.

    The small ones run on two CPU cores, with the torch engine.
    """
    device = ("--device", "cpu", "--small") if small else ("--device", "cuda")
    check, nodes = ("bench/gpu_check.py", "--out", "{out}", *device), ("-m", "gpu.nodes", "--work", "{work}", *device)
    if small:
        memory, engines = "2m-full-kept-256,2m-lora-recomputed-256,2m-4bit-256", "2m-small,2m-inside"
    else:
        kinds = ("0.5b-full-kept", "3b-full-recomputed", "3b-lora-kept", "3b-4bit")
        memory = ",".join(f"{kind}-16384" for kind in kinds)
        engines = "0.5b-small,0.5b-inside,3b-large,3b-adapter"
    made = (
        Stage(
            "imports",
            ("-m", "gpu.parts", "check", "--out", "{out}", "--site", *SITES),
            150,
            ("node", "vllm", "needs"),
            on_gpu=False,
        ),
        Stage("machine", (*check, "env", "host"), 60, ("node",)),
        Stage("memory", (*check, "memory", "--cases", memory), 110, ("node",)),
        Stage("models", (*nodes, "models"), 120, ("node", "model"), on_gpu=False),
        Stage("nodes", (*nodes, "exchange"), 420, ("models",), ("imports", "memory")),
        Stage(
            "engines",
            (*check, "generate", "--cases", engines, "--together", "4"),
            330,
            ("imports",),
            ("nodes",),
        ),
        Stage("one_gpu", (*check, "one_gpu"), 240, ("imports",), ("engines",)),
        Stage("base", (*check, "base"), 220, ("imports",), ("one_gpu",)),
        Stage("curves", (*nodes, "curves"), 240, ("models",), ("nodes", "base")),
    )
    if not small:
        return made
    return tuple(replace(stage, expected_s=SMALL_S) for stage in made)


def startable(
    stages: Sequence[Stage], states: Mapping[str, State], parts: Iterable[str], *, left_s: float
) -> list[Stage]:
    """Return the waiting stages that may start now: they have what they need, and are expected to end in time."""
    passed = {*parts, *(name for name, state in states.items() if state == "passed")}
    is_gpu_free = not any(stage.on_gpu and states[stage.name] == "running" for stage in stages)
    found = []
    for stage in stages:
        if states[stage.name] != "waiting" or stage.expected_s > left_s or not passed.issuperset(stage.needs):
            continue
        if any(states[name] not in ENDED for name in stage.after) or (stage.on_gpu and not is_gpu_free):
            continue
        is_gpu_free = is_gpu_free and not stage.on_gpu
        found.append(stage)
    return found


def impossible(
    stages: Sequence[Stage],
    states: Mapping[str, State],
    parts: Iterable[str],
    *,
    left_s: float,
    more_parts: bool,
    damaged: Collection[str] = (),
) -> dict[str, str]:
    """Return the waiting stages that can no longer start, each with the reason. `more_parts`: some may still arrive.

    `damaged` are parts that arrived and cannot be unpacked.
    """
    there, reasons = set(parts), {}
    for stage in stages:
        if states[stage.name] != "waiting":
            continue
        lost = [name for name in stage.needs if name in states and states[name] in ENDED - {"passed"}]
        missing = [name for name in stage.needs if name in PARTS and name not in there]
        if lost:
            reasons[stage.name] = f"{lost[0]} was {states[lost[0]]}"
        elif broken := [name for name in missing if name in damaged]:
            reasons[stage.name] = f"the part {broken[0]} is damaged"
        elif missing and not more_parts:
            reasons[stage.name] = f"the part {missing[0]} did not arrive"
        elif stage.expected_s > left_s:
            reasons[stage.name] = f"it takes about {stage.expected_s:.0f} s, and {max(0.0, left_s):.0f} s are left"
    return reasons
