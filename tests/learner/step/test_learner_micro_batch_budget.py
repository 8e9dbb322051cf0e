"""The budget of tokens is halved when memory runs out, and later grows by a quarter unless that fails."""

from __future__ import annotations

from ftis_node.learner.step.oom_retry import FIRST_GROWTH_INTERVAL, LONGEST_GROWTH_INTERVAL, MicroBatchBudget

WHOLE = 100_000


def after_steps(budget, num):
    for _ in range(num):
        budget = budget.after_good_step(whole=WHOLE)
    return budget


def test_the_budget_is_halved_from_the_tokens_in_use():
    budget = MicroBatchBudget.of(16_000)
    assert budget.after_out_of_memory(whole=WHOLE, longest=500).max_tokens == 8_000
    assert budget.after_out_of_memory(whole=3_000, longest=500).max_tokens == 1_500, "no more was in use"
    assert budget.after_out_of_memory(whole=WHOLE, longest=9_000).max_tokens == 9_000, "it holds the longest sequence"


def test_a_budget_of_one_sequence_is_not_halved():
    assert MicroBatchBudget.of(16_000).after_out_of_memory(whole=WHOLE, longest=16_000) is None
    assert MicroBatchBudget.of(16_000).after_out_of_memory(whole=700, longest=700) is None
    assert MicroBatchBudget.of(300).after_out_of_memory(whole=WHOLE, longest=700) is None


def test_the_budget_grows_after_an_interval_up_to_the_setting():
    budget = MicroBatchBudget.of(16_000).after_out_of_memory(whole=WHOLE, longest=500)
    assert after_steps(budget, FIRST_GROWTH_INTERVAL - 1).max_tokens == 8_000
    assert after_steps(budget, FIRST_GROWTH_INTERVAL).max_tokens == 10_001
    assert after_steps(budget, 10 * FIRST_GROWTH_INTERVAL).max_tokens == 16_000


def test_a_failed_growth_is_undone_and_doubles_its_interval():
    budget = MicroBatchBudget.of(16_000).after_out_of_memory(whole=WHOLE, longest=500)
    budget = after_steps(budget, FIRST_GROWTH_INTERVAL).after_out_of_memory(whole=WHOLE, longest=500)
    assert (budget.max_tokens, budget.growth_interval) == (8_000, 2 * FIRST_GROWTH_INTERVAL)
    assert after_steps(budget, 2 * FIRST_GROWTH_INTERVAL - 1).max_tokens == 8_000
    again = budget.after_out_of_memory(whole=WHOLE, longest=500)
    assert again.max_tokens == 4_000, "a second failure at the same budget halves it"
    for _ in range(20):
        budget = after_steps(budget, budget.growth_interval).after_out_of_memory(whole=WHOLE, longest=500)
    assert (budget.max_tokens, budget.growth_interval) == (8_000, LONGEST_GROWTH_INTERVAL)


def test_a_batch_below_the_budget_does_not_count_for_growth():
    budget = MicroBatchBudget.of(16_000).after_out_of_memory(whole=WHOLE, longest=500)
    for _ in range(2 * FIRST_GROWTH_INTERVAL):
        budget = budget.after_good_step(whole=7_000)
    assert budget.max_tokens == 8_000
