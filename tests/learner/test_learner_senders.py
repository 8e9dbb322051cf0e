"""Figures by sender: from a step of a tiny model, and sums computed by hand."""

import math

import msgspec
import pytest
from learner_rig import PROMPT, as_text, make_boot, make_group, one_by_one_logprobs, without_times
from msgspec.structs import replace

from ftis_node.learner.learner import Learner
from ftis_node.learner.messages import StepReport
from ftis_node.learner.senders import MAX_SENDERS, SenderStats, add_up, largest_senders

COMPLETIONS = [[1, 2, 3], [4, 5]]


@pytest.fixture
def learner(model_folder, tmp_path):
    return Learner(make_boot(model_folder, tmp_path, method="ftis", kl_threshold=10.0))


def groups_of(learner, *, far=4.5):
    """Return an own group, a near one and one without a signal of ann, and one of bob with a far negative."""
    model = learner.policy.causal_lm
    exact = [one_by_one_logprobs(model, PROMPT, ids).tolist() for ids in COMPLETIONS]
    shifted = [[value - 0.25 for value in row] for row in exact]  # rho e^0.25
    distant = [exact[0], [value + far for value in exact[1]]]  # rho e^-4.5: KL 84.5
    parts = (
        ("me", True, [1.0, 0.0], exact), ("ann", False, [1.0, 0.0], shifted), ("ann", False, [0.5, 0.5], shifted),
        ("bob", False, [1.0, 0.0], distant),
    )  # fmt: skip
    return [
        replace(make_group(COMPLETIONS, rewards, number=number, own=own, logprobs=logprobs), sender=sender)
        for number, (sender, own, rewards, logprobs) in enumerate(parts)
    ]


def test_the_figures_of_a_step_by_hand(learner):
    report = learner.train(groups_of(learner), step=1).report
    me, ann, bob = report.by_sender
    assert [(each.sender, each.own) for each in report.by_sender] == [("me", True), ("ann", False), ("bob", False)]
    assert (me.groups, me.completions, me.negatives, me.kept, me.trained, me.tokens) == (1, 2, 1, 2, 2, 5)
    assert (me.weight_sum, me.kl_sum) == pytest.approx((2.0, 0.0), abs=1e-5)
    assert (ann.groups, ann.groups_with_signal, ann.completions, ann.trained) == (2, 1, 4, 2)
    assert ann.weight_sum == pytest.approx(2 * math.exp(0.25), rel=1e-4)
    assert ann.log_ratio_sum == pytest.approx(2.5, rel=1e-3)
    assert (bob.kept, bob.kept_negatives, bob.trained) == (1, 0, 1)
    assert bob.kl_sum == pytest.approx(math.exp(4.5) - 4.5 - 1, rel=1e-3)
    assert bob.shares()["kept_negatives"] == 0
    assert bob.ess_share == pytest.approx(0.5)
    total = sum(each.kept for each in report.by_sender) / sum(each.completions for each in report.by_sender)
    assert report.kept_fraction == pytest.approx(total)
    kl = sum(each.kl_sum for each in report.by_sender) / sum(each.measured for each in report.by_sender)
    assert report.mean_kl == pytest.approx(kl, rel=1e-9)


def test_groups_of_a_trusted_generator_train_as_own_ones(model_folder, tmp_path):
    """The quantile filter ranks each peer's negatives, and keeps all those of the node's own weights."""

    def report_of(name, **sender):
        settings = {"method": "ftis", "filter": "quantile", "keep_share": 0.1, "advantage_shift": 0.1}
        learner = Learner(make_boot(model_folder, tmp_path / name, **settings))
        groups = [
            make_group([[1, 2], [3, first], [5], [first, 6]], [1.0, 0.0, 0.0, 0.0], number=first, own="own" in sender)
            for first in (7, 8)
        ]
        return learner.train([replace(group, **sender) for group in groups], step=1).report

    own = report_of("own", own=True, sender="me")
    trusted = report_of("trusted", of_own_weights=True, sender="ann")
    other = report_of("other", sender="ann")
    assert (own.by_sender[0].kept_negatives, other.by_sender[0].kept_negatives) == (6, 1)
    assert trusted.by_sender == (replace(own.by_sender[0], sender="ann", own=False),)
    assert (trusted.loss, trusted.grad_norm, trusted.foreign_groups) == (own.loss, own.grad_norm, 2)


def test_figures_are_restored_from_json_and_a_checkpoint(learner, model_folder, tmp_path):
    report = learner.train(groups_of(learner), step=1).report
    assert msgspec.json.decode(msgspec.json.encode(report), type=StepReport) == report
    learner.checkpoints.save_if_behind()
    again = Learner(make_boot(model_folder, tmp_path, method="ftis", kl_threshold=10.0))
    assert without_times(again.state().last_report) == without_times(report)


def test_an_understated_group_has_no_trained_completions(model_folder, tmp_path):
    learner = Learner(make_boot(model_folder, tmp_path, method="tis", max_logprob_gap_nats=16.0))
    *groups, _ = groups_of(learner)
    report = learner.train([*groups, groups_of(learner, far=-40.0)[-1]], step=1).report
    assert report.understated == ("group-3",)
    bob = report.by_sender[-1]
    assert (bob.completions, bob.negatives, bob.trained, bob.groups_with_signal) == (2, 0, 0, 0)


def test_texts_of_a_peer_are_counted_without_ratios(learner):
    group = groups_of(learner)[1]
    ann = learner.train([as_text(group, [-20.0, -20.0])], step=1).report.by_sender[0]
    assert (ann.completions, ann.kept, ann.kept_negatives, ann.trained) == (2, 1, 0, 1)
    assert (ann.weight_sum, ann.measured, ann.tokens) == (pytest.approx(2.0), 0, 5)  # the cap
    assert (ann.shares()["mean_kl"], ann.ess) == (None, 1.0)


def test_a_refused_pass_has_no_figures(learner):
    first, *_ = groups_of(learner)
    report = learner.train([replace(first, rewards=(math.inf,) * len(first.rewards))], step=1).report
    assert (report.refused, report.by_sender) == ("a reward is not finite", ())


def test_shares_by_hand():
    weights = (2.0, 1.0, 0.0)
    figures = SenderStats(
        "ann", False, groups=4, groups_with_signal=3, completions=8, negatives=4, kept=6, kept_negatives=1, trained=3,
        clipped=1, weight_sum=sum(weights), weight_square_sum=5.0, tokens=20, measured=8, measured_tokens=10,
        truncated_tokens=5, log_ratio_sum=-2.0, kl_sum=4.0,
    )  # fmt: skip
    shares = figures.shares()
    assert shares["ess"] == pytest.approx(9 / 15)
    assert shares["effective"] == pytest.approx(3 / 8 * 9 / 15) == pytest.approx(9 / (8 * 5))
    assert shares["weight_variance"] == pytest.approx(2 / 3)
    expected = {"kept": 0.75, "kept_negatives": 0.25, "signal": 0.75, "clipped": 1 / 3, "truncated": 0.5}
    expected |= {"mean_log_ratio": -0.2, "mean_kl": 0.5, "weight_mean": 1.0}
    assert {name: shares[name] for name in expected} == pytest.approx(expected)
    assert set(SenderStats("bob", False).shares().values()) == {None}
    assert SenderStats("bob", False, completions=2, trained=2).ess == 0


def test_entries_add_up_and_are_bounded():
    one = SenderStats("ann", False, kept=2, kl_sum=0.5)
    other = SenderStats("bob", False, kept=1, kl_sum=0.25)
    assert add_up([one, other]) == SenderStats("", False, kept=3, kl_sum=0.75)
    assert add_up([]) == SenderStats("", False)
    many = [SenderStats(f"peer-{number}", False, groups=number) for number in range(2000)]
    most = largest_senders([*many, SenderStats("me", True, groups=1)])
    assert len(most) == MAX_SENDERS
    assert (most[0].sender, most[1].sender, most[-1].sender) == ("me", "peer-1999", "")
    assert sum(each.groups for each in most) == sum(range(2000)) + 1
    assert len(msgspec.json.encode(most)) < 1 << 18
