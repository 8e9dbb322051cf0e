"""The gate of an ensemble, against a case computed by hand and on sums with carries, without labels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from ftis_node.generation.gate import RIDGE, train_gate
from ftis_node.tasks import load_task

if TYPE_CHECKING:
    from ftis_node.tasks.base import ChatMessage

DOMAINS = ("arithmetic:easy", "arithmetic:medium", "arithmetic:hard")


def prompt(text: str) -> tuple[ChatMessage, ...]:
    return ({"role": "system", "content": "Answer."}, {"role": "user", "content": text})


def test_a_gate_of_equal_prompts_has_the_chance_computed_by_hand() -> None:
    """Equal prompts give equal weights, and the gradients of cross-entropy and ridge balance at the chance."""
    (chance,) = train_gate([prompt("é")] * 8, [[True] * 6 + [False] * 2]).chances([prompt("é")])
    # three features (character, word, constant) of weight w: 3 (6 - 8 p) = RIDGE * 3 w, logit p = 3 w
    logit = math.log(chance[0] / (1 - chance[0]))
    assert 6 - 8 * chance[0] == pytest.approx(RIDGE * logit / 3, abs=1e-4)
    assert 0.5 < chance[0] < 0.75


def test_the_gate_learns_the_expert_of_each_word() -> None:
    """Two experts for apples and pears, and one for both. The words are beyond the first 64 characters."""
    lead = "Please count these for me, slowly and with care, and give me the number of all of them: "
    prompts = [prompt(f"{lead}{'Apples' if number % 2 else 'pears'}, {number} times") for number in range(20)]
    of_apples = [bool(number % 2) for number in range(20)]
    gate = train_gate(prompts, [of_apples, [not right for right in of_apples], [True] * 20])
    apples, pears, both = gate.chances([prompt(f"{lead}apples"), prompt(f"{lead}PEARS, unknown word")])
    assert apples[0] > 0.8 > 0.2 > apples[1]
    assert pears[0] < 0.2 < 0.8 < pears[1]
    assert min(both) > 0.9


def test_the_gate_learns_carries_from_rewards() -> None:
    """Each expert is right in its own domain. After 256 prompts, the gate chooses for held-out prompts."""
    training = load_task("+".join(DOMAINS), split="train")
    items = [training[len(training) - 256 + index] for index in range(256)]
    rewards = [[item.ref.task == domain for item in items] for domain in DOMAINS]
    gate = train_gate([item.prompt for item in items], rewards)
    held_out = [task[index] for task in (load_task(d, split="test") for d in DOMAINS) for index in range(len(task))]
    chances = gate.chances([item.prompt for item in held_out])
    chosen = [max(range(3), key=row.__getitem__) for row in zip(*chances, strict=True)]
    right = [DOMAINS[choice] == item.ref.task for choice, item in zip(chosen, held_out, strict=True)]
    assert len(right) == 362
    assert sum(right) / len(right) > 0.95
    again = train_gate([item.prompt for item in items], rewards)
    assert again.chances([item.prompt for item in held_out]) == chances


def test_prompts_of_any_form_have_chances() -> None:
    gate = train_gate([(), prompt(""), prompt("12²x"), prompt("x" * 1000)], [[True, False, True, False]])
    (chances,) = gate.chances([(), prompt("٣"), prompt("0")])
    assert all(0.0 < chance < 1.0 for chance in chances)
