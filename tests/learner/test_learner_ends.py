"""The end of an answer is an event: a learner with other end ids than the sender scores its own end in that place."""

from dataclasses import replace

import msgspec
import pytest
import torch
from learner_rig import make_boot, make_group, random_groups

from ftis_node.learner.batch import make_batch
from ftis_node.learner.learner import Learner
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


@pytest.mark.parametrize("method", ["ftis", "gepo"])
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


def test_a_body_of_another_rendering_is_not_of_own_weights():
    group = msgspec.structs.replace(make_group([[1, 2], [3]], [0.0, 1.0], own=False), of_own_weights=True)
    assert make_batch([group]).of_own_weights.all()
    body = replace(unpack_group(group.body), prompt_hash=hash_prompt([9]))
    assert not make_batch([msgspec.structs.replace(group, body=pack_group(body))]).of_own_weights.any()
