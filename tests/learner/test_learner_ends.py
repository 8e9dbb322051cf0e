"""The end of an answer is an event: a learner with other end ids than the sender scores its own end in that place."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from learner_rig import make_boot, make_group, random_groups

from ftis_node.algorithms import policy_loss
from ftis_node.learner.batch import make_batch
from ftis_node.learner.core import Learner
from ftis_node.learner.messages import TrainGroup
from ftis_node.records.codec import hash_prompt, pack_group, unpack_group
from ftis_node.records.group import FinishReason, Group

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
OUR_END, THEIR_END, SECOND_END = 2, 0, 7


def _ended(group: TrainGroup, reasons: tuple[FinishReason, ...], *, theirs: tuple[int, ...], ours: tuple[int, ...]):
    """Return the group with these finish reasons and end ids in its body, for a learner with its own end ids."""
    body: Group = replace(unpack_group(group.body), finish_reasons=reasons, end_ids=theirs)
    return msgspec.structs.replace(group, body=pack_group(body), end_ids=ours)


def test_ends_by_hand_with_two_end_lists():
    sent = make_group(
        [[10, 11, THEIR_END], [12, OUR_END, 13, THEIR_END], [14, SECOND_END], [15, 16], [THEIR_END]], [0, 1, 0, 1, 0]
    )
    reasons = (STOP, STOP, STOP, LENGTH, STOP)
    batch = make_batch([_ended(sent, reasons, theirs=(THEIR_END, SECOND_END), ours=(OUR_END, SECOND_END))])
    assert [ids.tolist() for ids in batch.completions] == [
        [10, 11, OUR_END],
        [12, OUR_END, 13, OUR_END],  # an end token of this model inside a text is a token like another
        [14, SECOND_END],  # both models end with it
        [15, 16],
        [OUR_END],
    ]
    assert torch.equal(batch.behaviour_logprobs, make_batch([sent]).behaviour_logprobs)
    alike = make_batch([_ended(sent, reasons, theirs=(THEIR_END, SECOND_END), ours=(THEIR_END, SECOND_END))])
    assert [ids.tolist() for ids in alike.completions] == [ids.tolist() for ids in make_batch([sent]).completions]


@pytest.mark.parametrize("method", ["ftis", "gspo", "gepo", "topr"])
def test_every_method_weighs_the_end_as_the_own_end(method, model_folder, tmp_path):
    """The step on a sibling's group equals the step on the same group with this model's end token."""
    reasons = (STOP,) * 3
    groups = []
    for last in (THEIR_END, OUR_END):
        sent = make_group([[10, 11, last], [12, last], [13, 14, 15, last]], [0.0, 1.0, 1.0], own=False, sender="peer")
        groups.append(_ended(sent, reasons, theirs=(last,), ours=(OUR_END,)))
    reports = []
    for number, group in enumerate(groups):
        learner = Learner(make_boot(model_folder, tmp_path / str(number), method=method))
        reports.append(learner.train([*random_groups(num_groups=1), group], step=1).report)
    first, second = reports
    assert (first.loss, first.mean_kl, first.grad_norm) == (second.loss, second.mean_kl, second.grad_norm)
    assert first.grad_norm > 0


def test_weights_by_the_own_end_never_exceed_those_by_the_event():
    """Exact expectation over all answers of at most two tokens. The sampler ends with `a`, the learner with `b` or `c`.

    By the event, `log sum p(e)` over the learner's ends, the weighted answers of the sampler sum to the learner's
    probability of each text. By the own id they sum to a part of it, the share of the preferred end. So a learner with
    one end id is weighed exactly, and any other one conservatively. An end id that both have keeps its own
    probability: with the event in its place, an own sample would have a ratio above 1.
    """
    generator = np.random.default_rng(0)
    texts = [text for length in (0, 1, 2) for text in itertools.product("xy", repeat=length)]
    for ends in (["b"], ["b", "c"]):
        q, p = ({t: _distribution(generator, ["x", "y", *e]) for t in texts} for e in (["a"], ends))
        for text in texts:
            reach_q = np.prod([q[text[:at]][token] for at, token in enumerate(text)])
            reach_p = np.prod([p[text[:at]][token] for at, token in enumerate(text)])
            sampled = reach_q * q[text]["a"]
            by_event = reach_p * sum(p[text][end] for end in ends) / sampled
            by_own_end = reach_p * p[text]["b"] / sampled
            event = reach_p * sum(p[text][end] for end in ends)
            assert sampled * by_event == pytest.approx(event)
            assert sampled * by_own_end <= event * (1 + 1e-12)
            assert (by_own_end == pytest.approx(by_event)) == (ends == ["b"])


def _distribution(generator: np.random.Generator, tokens: list[str]) -> dict[str, float]:
    return dict(zip(tokens, generator.dirichlet(np.ones(len(tokens))), strict=True))


def test_the_ratio_of_a_sequence_contains_the_end():
    """By hand: q = (-1, -1), p = (-1, -3) with the own end. The sequence ratio of GSPO is exp(-1)."""
    learner = torch.tensor([[-1.0, -3.0]], dtype=torch.float64, requires_grad=True)
    sampled = torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
    mask, advantages, ids = torch.ones(1, 2, dtype=torch.bool), torch.tensor([1.0]), torch.zeros(1, dtype=torch.int64)
    loss, _ = policy_loss("gspo", learner, sampled, mask, advantages, ids, eps_low=1.0, eps_high=9.0)
    assert loss.item() == pytest.approx(-np.exp(-1.0))


def test_a_body_of_another_rendering_is_not_of_own_weights():
    group = msgspec.structs.replace(make_group([[1, 2], [3]], [0.0, 1.0], own=False), of_own_weights=True)
    assert make_batch([group]).of_own_weights.all()
    body = replace(unpack_group(group.body), prompt_hash=hash_prompt([9]))
    assert not make_batch([msgspec.structs.replace(group, body=pack_group(body))]).of_own_weights.any()
