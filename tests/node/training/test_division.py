"""A node with task allocation by advantage: the shares of the tasks after each step, and the problems it samples."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from bench.stubs.stub_node import StubTokenizer
from ftis_node.config.manifest import RunManifest
from ftis_node.node.startup.wiring import Wiring
from ftis_node.node.training.step_shares import Division, division_of, note_signals
from ftis_node.records.envelope import Accepted, seal_group
from ftis_node.records.group import PromptRef
from ftis_node.replay.lifecycle import Candidate
from ftis_node.replay.rows import StoredGroup
from ftis_node.swarm.peer_guard import Place
from ftis_node.tasks import load_task
from tests.conftest import PROMPT_IDS, make_group
from tests.node.loops.test_train import HONEST, MALLORY
from tests.node.nodes import components, events_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ftis_node.records.identity import Identity

MIXTURE = "arithmetic:add+arithmetic:sub"
ADD, SUB = MIXTURE.split("+")
WITH, WITHOUT = (1.0, 0.0), (0.0, 0.0)
ADVANTAGE = RunManifest(name="a", task=MIXTURE, step={"task_allocation": "advantage"})


def new_division() -> Division:
    division = division_of(ADVANTAGE, MIXTURE)
    assert division is not None
    return division


def taken(sender: Identity, task: str, rewards: tuple[float, ...], *, own: bool = False) -> StoredGroup:
    group = replace(make_group(sender), prompt_ref=PromptRef(task, "train", 5))
    envelope = seal_group(group, sender)
    stored = StoredGroup.from_accepted(Accepted(envelope, envelope.to_bytes(), group, tuple(PROMPT_IDS)), own=own)
    return replace(stored, rewards=rewards)


def one_sided_step(division: Division) -> None:
    """Note two groups of each task by this node and two by a peer; each has a signal in one task only."""
    for _ in range(2):
        for task in (ADD, SUB):
            division.note(task, WITH if task == ADD else WITHOUT, own=True)
            division.note(task, WITH if task == SUB else WITHOUT, own=False)
    division.end_step()


def test_only_a_mixture_in_a_run_with_the_setting_is_divided() -> None:
    assert division_of(ADVANTAGE, ADD) is None
    assert division_of(RunManifest(name="a", task=MIXTURE), MIXTURE) is None
    assert division_of(ADVANTAGE, f"{MIXTURE}=3").shares == {ADD: 0.25, SUB: 0.75}  # type: ignore[union-attr]


def test_shares_follow_the_signals_and_become_even_without_peers() -> None:
    division = new_division()
    shares = []
    for _ in range(20):
        one_sided_step(division)
        shares.append(division.shares[ADD])
    assert 0.5 < shares[0] < shares[3] < shares[19]
    assert shares[19] == pytest.approx(0.94, abs=0.01)
    for _ in range(60):
        division.note(ADD, WITH, own=True)
        division.end_step()
    assert division.shares == {ADD: 0.5, SUB: 0.5}, "the absent peer still counts"


def test_tasks_of_peers_outside_the_domain_take_no_memory() -> None:
    division = new_division()
    for number in range(100):
        division.note(f"other-{number}", WITH, own=False)
    figures = division.end_step()
    assert all(set(of) == {ADD, SUB} for of in figures.values())
    assert division.shares == {ADD: 0.5, SUB: 0.5}
    assert set(division._peers) == {ADD, SUB}


def test_a_step_notes_the_groups_that_it_took_and_passed_over(tmp_path: Path) -> None:
    division = new_division()
    with components(tmp_path) as node:
        groups = [taken(HONEST, ADD, WITH, own=True), taken(MALLORY, SUB, WITH)]
        passed_over = [
            Candidate(
                bytes(32), sender, own, 1, created_at=0.0, policy_version=0, problem=b"one", task=task, rewards=WITHOUT
            )
            for sender, own, task in ((HONEST.peer_id, True, SUB), (MALLORY.peer_id, False, ADD))
        ]
        note_signals(division, 7, groups, passed_over, guard=node.gossip.guard, events=node.context.events)
        (event,) = events_of(node)
        assert (event["event"], event["step"]) == ("division", 7)
        assert event["own_rates"] == {ADD: 0.6667, SUB: 0.3333}
        assert event["peer_rates"] == {ADD: 0.3333, SUB: 0.6667}
        assert event["shares"] == {ADD: 0.77, SUB: 0.23}


def test_a_run_without_the_setting_writes_no_event(tmp_path: Path) -> None:
    division = None
    with components(tmp_path) as node:
        note_signals(division, 1, [taken(MALLORY, ADD, WITH)], [], guard=node.gossip.guard, events=node.context.events)
        assert events_of(node) == []


def test_an_error_about_a_peers_group_is_that_peers_fault(tmp_path: Path) -> None:
    division = new_division()
    with components(tmp_path) as node:
        broken: Any = None
        groups = [taken(MALLORY, ADD, broken), taken(HONEST, SUB, WITH)]
        note_signals(division, 1, groups, [], guard=node.gossip.guard, events=node.context.events)
        assert node.gossip.guard.num_faults == {Place.COUNT: 1}
        assert events_of(node, "division")[0]["peer_rates"] == {ADD: 0.5, SUB: 0.6667}
        with pytest.raises(TypeError):
            note_signals(
                division,
                2,
                [taken(HONEST, ADD, broken, own=True)],
                [],
                guard=node.gossip.guard,
                events=node.context.events,
            )


class _PlainTokenizer(StubTokenizer):
    """A tokenizer with one token per byte."""

    def encode_prompt(self, messages: Sequence[Any]) -> list[int]:
        return list(messages[0]["content"].encode())


async def prompts_of(folder: Path, division: Division | None, *, num: int) -> Counter[str]:
    """Count the tasks of a node's next problems."""
    domain = load_task(MIXTURE)
    with components(
        folder, identity=HONEST, manifest=ADVANTAGE, domain_task=domain, division=division, tokenizer=_PlainTokenizer()
    ) as node:
        loop = Wiring(node).generate_loop
        found = Counter([(await loop._next_prompt())[0].ref.task for _ in range(num)])
        assert not events_of(node, "prompt_skipped"), "a passed-over problem is reported as too long"
    return found


async def test_problems_are_sampled_by_the_shares(tmp_path: Path) -> None:
    division = new_division()
    assert await prompts_of(tmp_path, division, num=100) == await prompts_of(tmp_path, None, num=100), (
        "even shares differ from the mixture"
    )
    for _ in range(20):
        one_sided_step(division)
    found = await prompts_of(tmp_path, division, num=2000)
    assert found[ADD] / 2000 == pytest.approx(division.shares[ADD], abs=0.02)
    assert found == await prompts_of(tmp_path, division, num=2000), "a second pass has other problems"


@pytest.mark.parametrize("skipped", [0, 1_700_000_000])
async def test_nodes_with_horizontal_prompts_sample_the_same_ones_after_a_restored_identity(
    tmp_path: Path, skipped: int
) -> None:
    manifest = RunManifest(name="a", task=ADD, step={"prompt_sharing": "horizontal"})
    domain = load_task(ADD)

    async def next_prompts(folder: Path, identity: Identity, last_number: int) -> list[PromptRef]:
        changes: dict[str, Any] = {"domain_task": domain, "tokenizer": _PlainTokenizer()}
        with components(folder, identity=identity, manifest=manifest, **changes) as node:
            node.buffer.raise_last_number(last_number)
            loop = Wiring(node).generate_loop
            return [(await loop._next_prompt())[0].ref for _ in range(20)]

    assert await next_prompts(tmp_path / "one", HONEST, skipped) == await next_prompts(tmp_path / "other", MALLORY, 0)
