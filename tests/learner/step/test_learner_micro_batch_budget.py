"""Half after a failure, a quarter more after a while, back to what was good when that was too much."""

from __future__ import annotations

from ftis_node.learner.step.oom_retry import FIRST_GROWTH_INTERVAL, LONGEST_GROWTH_INTERVAL, MicroBatchBudget

WHOLE = 100_000


def after_good_steps(budget, num):
    for _ in range(num):
        budget = budget.after_good_step(whole=WHOLE)
    return budget


def test_half_of_what_was_in_use():
    budget = MicroBatchBudget.of(16_000)
    assert budget.after_out_of_memory(whole=WHOLE, longest=500).max_tokens == 8_000
    assert budget.after_out_of_memory(whole=3_000, longest=500).max_tokens == 1_500, "more was never in use"
    assert budget.after_out_of_memory(whole=WHOLE, longest=9_000).max_tokens == 9_000, "a sequence is not cut"


def test_one_sequence_at_a_time_is_the_end():
    assert MicroBatchBudget.of(16_000).after_out_of_memory(whole=WHOLE, longest=16_000) is None
    assert MicroBatchBudget.of(16_000).after_out_of_memory(whole=700, longest=700) is None
    assert MicroBatchBudget.of(300).after_out_of_memory(whole=WHOLE, longest=700) is None


def test_more_is_tried_after_a_while_up_to_the_setting():
    budget = MicroBatchBudget.of(16_000).after_out_of_memory(whole=WHOLE, longest=500)
    assert after_good_steps(budget, FIRST_GROWTH_INTERVAL - 1).max_tokens == 8_000
    assert after_good_steps(budget, FIRST_GROWTH_INTERVAL).max_tokens == 10_001
    assert after_good_steps(budget, 10 * FIRST_GROWTH_INTERVAL).max_tokens == 16_000


def test_a_trial_that_fails_goes_back_and_is_made_half_as_often():
    budget = MicroBatchBudget.of(16_000).after_out_of_memory(whole=WHOLE, longest=500)
    budget = after_good_steps(budget, FIRST_GROWTH_INTERVAL).after_out_of_memory(whole=WHOLE, longest=500)
    assert (budget.max_tokens, budget.growth_interval) == (8_000, 2 * FIRST_GROWTH_INTERVAL)
    assert after_good_steps(budget, 2 * FIRST_GROWTH_INTERVAL - 1).max_tokens == 8_000
    again = budget.after_out_of_memory(whole=WHOLE, longest=500)
    assert again.max_tokens == 4_000, "what was good before is so no longer"
    for _ in range(20):
        budget = after_good_steps(budget, budget.growth_interval).after_out_of_memory(whole=WHOLE, longest=500)
    assert (budget.max_tokens, budget.growth_interval) == (8_000, LONGEST_GROWTH_INTERVAL)


def test_a_batch_that_fits_at_once_proves_nothing():
    budget = MicroBatchBudget.of(16_000).after_out_of_memory(whole=WHOLE, longest=500)
    for _ in range(2 * FIRST_GROWTH_INTERVAL):
        budget = budget.after_good_step(whole=7_000)
    assert budget.max_tokens == 8_000
