"""Groups about one text under several indices are groups about one problem."""

from __future__ import annotations

import sqlite3
from collections import Counter

import pytest

from ftis_node.node.training.step_peers import train_group
from ftis_node.records.group import PromptRef
from ftis_node.records.identity import Identity
from ftis_node.replay.buffer import ReplayBuffer
from ftis_node.replay.eviction import MAX_PER_PROBLEM
from ftis_node.replay.lifecycle import choose_newest, choose_same_prompts
from ftis_node.tasks.arithmetic import ArithmeticTask
from tests.conftest import problem_hash
from tests.replay.test_buffer import ANN, BOB, ME, accepted

INDICES = (69, 382, 691, 754, 1641)


def admit(buffer: ReplayBuffer, identity: Identity, *indices: int) -> None:
    for at, index in enumerate(indices):
        changes = {"prompt_ref": PromptRef("arithmetic", "train", index), "problem_hash": problem_hash(index)}
        assert buffer.admit(accepted(identity, 10 + at, **changes), own=identity is ME)


def test_the_indices_have_one_text():
    assert {ArithmeticTask()[index].prompt[-1]["content"] for index in INDICES} == {"45+20="}


@pytest.mark.parametrize("rule", [choose_newest, choose_same_prompts])
def test_other_indices_of_one_text_get_one_place_in_a_step(buffer, rule):
    admit(buffer, ANN, *INDICES)
    assert [group.number for group in buffer.take(1, own=0, foreign=8, rule=rule).groups] == [14]


def test_other_indices_of_one_text_get_two_places_in_the_buffer(buffer):
    admit(buffer, ANN, *INDICES, 5)
    admit(buffer, BOB, *INDICES[:1])
    assert len(buffer.evict_foreign(keep=100)) == len(INDICES) - MAX_PER_PROBLEM
    assert Counter(group.sender for group in buffer._candidates()) == {ANN.peer_id: 3, BOB.peer_id: 1}


def test_answers_to_one_text_are_compared_in_the_horizontal_mode(buffer):
    admit(buffer, ME, 69)
    admit(buffer, ANN, 7, 382)
    taken = buffer.take(1, own=1, foreign=1, rule=choose_same_prompts).groups
    assert [group.prompt_ref.index for group in taken] == [69, 382]
    assert len({train_group(group, share="horizontal").advantage_key for group in taken}) == 1


def test_a_changed_problem_is_damage(path, buffer):
    admit(buffer, ANN, 5)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE groups SET problem = x'00'")
    connection.close()
    assert len(buffer.release_damaged()) == 1
