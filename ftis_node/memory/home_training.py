"""What a home already trains, by its newest checkpoint and the settings of its last start, without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftis_node.errors import FileError
from ftis_node.files import read_object
from ftis_node.workers.durable import newest_complete

if TYPE_CHECKING:
    from pathlib import Path

    from ftis_node.config.home import Home

CHECKPOINT_PREFIX = "step-"  # as in learner/checkpoint/checkpoint.py, which imports torch
ADAPTER = re.compile(r"LoRA of rank (\d{1,5}), alpha (\d{1,5}),")  # names as in learner/checkpoint/checkpoint.py


@dataclass(frozen=True, slots=True)
class PreviousTraining:
    """What a home trains. `rank` and `alpha` are an adapter's.

    `optimizer_states` is that of the settings of its last start, "" if unknown.
    """

    lora: bool
    rank: int = 0
    alpha: int = 0
    optimizer_states: str = ""


def read_previous_training(home: Home, model: str) -> PreviousTraining | None:
    """Return what the home has begun to train, or None for a home that has begun nothing.

    Its newest checkpoint decides. Before the first one, the settings of its last start do, if that used this model.
    """
    try:
        last = read_object(home.settings)
        of_last = PreviousTraining(
            lora=last["lora"],
            rank=int(last["lora_adapter"]["rank"]),
            alpha=int(last["lora_adapter"]["alpha"]),
            optimizer_states=str(last["learner"]["optimizer_states"]),
        )
    except (OSError, FileError, KeyError, TypeError, ValueError):
        last, of_last = {}, None
    newest = newest_complete(home.checkpoints, CHECKPOINT_PREFIX)
    trains = "" if newest is None else str(checkpoint_owner(newest / "state.json").get("trains", ""))
    if not trains:
        is_same = last.get("model") == model and last.get("role") not in ("generator", "exchange")
        return of_last if is_same and of_last is not None and isinstance(of_last.lora, bool) else None
    states = of_last.optimizer_states if of_last is not None else ""
    if (adapter := ADAPTER.match(trains)) is None:
        return PreviousTraining(lora=False, optimizer_states=states)
    return PreviousTraining(lora=True, rank=int(adapter[1]), alpha=int(adapter[2]), optimizer_states=states)


def checkpoint_owner(state_file: Path) -> dict[str, Any]:
    """Return the owner that a checkpoint's `state.json` names; {} where that file cannot be read."""
    try:
        owner = read_object(state_file)["owner"]
    except (OSError, FileError, KeyError):
        return {}
    return owner if isinstance(owner, dict) else {}
