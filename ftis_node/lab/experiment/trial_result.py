"""Result of a trial: the metrics of each member, read from its event log."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from ftis_node import __version__
from ftis_node.learner.senders import SenderStats, add_up
from ftis_node.node.wiring import NodeComponents
from ftis_node.swarm.sequence import counter_of
from ftis_node.telemetry.events import read_events

STEP_FIGURES = (
    *("reward_mean", "own_reward_mean", "kept_fraction", "truncated_fraction", "mean_kl", "grad_norm", "entropy"),
)
SIDES = ("own", "foreign")
SHARES = tuple(SenderStats("", False).shares())
SENDER_FIGURES = tuple(f"{side}_{name}" for side in SIDES for name in SHARES)
TRAINED_COST, GENERATED_COST = 6, 2  # FLOP per parameter and token: forward and backward; forward only
ROOT = Path(__file__).parents[3]


@cache
def made_by() -> str:
    """Return the version of this process's code as one line."""
    commit = _commit()
    built = f"ftis-node {__version__}{f' at commit {commit}' if commit else ''}"
    return f"{built}, torch {version('torch')}, Python {platform.python_version()}"


def _commit() -> str | None:
    """Return the checkout's commit in 12 digits, with a `+` if tracked files differ; None outside of a checkout."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None  # git is missing, or the checkout belongs to another user


class Evaluation(msgspec.Struct, frozen=True):
    """One point of a curve. `tokens_generated` and `tokens_received` count completion tokens up to this step."""

    step: int
    task: str
    pass_at_1: float
    n: int
    reward_mean: float | None
    tokens_generated: int
    tokens_received: int


class MemberResult(msgspec.Struct, frozen=True):
    """Result of one node. `steps` maps each name in STEP_FIGURES and SENDER_FIGURES to one value per step.

    `peer_weights` has the weights of the other members by name, one dict per step, if the method weights peers.
    `refused` counts refusals by reason. `tokens_generated` and `tokens_trained` count completion tokens of all steps.
    `domain` is None if the member generated for the whole task.
    """

    name: str
    model: str
    parameters: int
    trainable_parameters: int
    own_groups: int
    foreign_groups: int
    bytes_received: int
    refused: dict[str, int]
    evaluations: list[Evaluation]
    steps: dict[str, list[float | None]]
    domain: str | None = None
    tokens_generated: int = 0
    tokens_trained: int = 0
    peer_weights: list[dict[str, float]] = []

    @property
    def compute(self) -> float:
        """Return the FLOP by the usual formula: per parameter 6 for a trained token, 2 for a generated one."""
        return self.parameters * (TRAINED_COST * self.tokens_trained + GENERATED_COST * self.tokens_generated)

    def curve(self, task: str) -> list[Evaluation]:
        return [point for point in self.evaluations if point.task == task]


class FinalEvaluationResult(msgspec.Struct, frozen=True):
    """Accuracy of the trained members together on a task's held-out problems, in one mode of the ensemble."""

    task: str
    mode: str
    pass_at_1: float
    n: int
    generated_tokens: int
    forward_tokens: int


class TrialResult(msgspec.Struct, frozen=True):
    """Result of a finished trial. `labels` are its place in the trial matrix: pair, method, delay and more.

    `made_by` is the version of the code. `seconds` is wall time, `processor_seconds` the CPU time of its threads.
    """

    key: str
    labels: dict[str, Any]
    manifest: dict[str, Any]
    steps: int
    seed: int
    members: list[MemberResult]
    seconds: float
    final_evaluation: list[FinalEvaluationResult] = []
    made_by: str = ""
    processor_seconds: float = 0.0


def read_member(
    name: str, parts: NodeComponents, *, due: Callable[[str, int], int], names: Mapping[str, str]
) -> MemberResult:
    """Return the result of a member that has ended, from its event log.

    `due(peer_id, step)` is the number of groups that a sender has generated up to a step. `names` maps peer ids to
    names.
    """
    events = read_events(parts.home.events)
    steps = [event for event in events if event["event"] == "step"]
    admitted = [event for event in events if event["event"] == "admitted"]
    rewards = {event["step"]: event["reward_mean"] for event in steps}

    def tokens(step: int, *, own: bool) -> int:
        """Count tokens of groups generated up to this step. Groups of later steps may have arrived already."""
        return sum(
            event["num_tokens"]
            for event in admitted
            if event["own"] == own and counter_of(event["number"]) <= due(event["sender"], step)
        )

    state = parts.learner.state
    assert state is not None, "a learner that took steps has a state"
    return MemberResult(
        name=name,
        model=parts.source.name,
        parameters=state.parameters,
        trainable_parameters=state.trainable_parameters,
        own_groups=sum(event["own_groups"] for event in steps),
        foreign_groups=sum(event["foreign_groups"] for event in steps),
        bytes_received=parts.context.counters.envelope_bytes_received,
        refused=dict(parts.context.counters.refused),
        evaluations=[
            Evaluation(
                step=event["step"],
                task=event["task"],
                pass_at_1=event["pass_at_1"],
                n=event["n"],
                reward_mean=rewards.get(event["step"]),
                tokens_generated=tokens(event["step"], own=True),
                tokens_received=tokens(event["step"], own=False),
            )
            for event in events
            if event["event"] == "eval"
        ],
        steps={figure: [event[figure] for event in steps] for figure in STEP_FIGURES} | _by_side(steps),
        domain=parts.context.about.domain or None,
        tokens_generated=tokens(state.step, own=True),
        tokens_trained=sum(event["num_tokens"] for event in steps),
        peer_weights=[
            {names[peer_id]: weight for peer_id, weight in event["weights"].items()}
            for event in events
            if event["event"] == "peer_weights"
        ],
    )


def _by_side(steps: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Return one value per step for each of SENDER_FIGURES: of own completions, and of all remote ones together."""
    senders = [msgspec.convert(event["by_sender"], list[SenderStats]) for event in steps]
    found: dict[str, list[float | None]] = {}
    for side in SIDES:
        shares = [add_up(each for each in step if each.own == (side == "own")).shares() for step in senders]
        found |= {f"{side}_{name}": [values[name] for values in shares] for name in SHARES}
    return found
