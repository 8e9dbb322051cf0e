"""An audit compares a peer's log-probs with those of the current weights, and changes no state of the learner."""

import msgspec
import pytest
from learner_rig import make_boot, random_groups, sample_group

from ftis_node.learner.core import Learner
from ftis_node.learner.messages import AuditReply
from ftis_node.models import load_causal_lm, resolve_model


@pytest.fixture
def learner(model_folder, tmp_path):
    return Learner(make_boot(model_folder, tmp_path))


def from_model(model_folder, *, version):
    """Return a peer's group, sampled by the initial model, with the version that the peer claims."""
    model = load_causal_lm(resolve_model(str(model_folder)))
    group = sample_group(model, group_size=4, length=6, reward=lambda ids: float(ids[0] % 2), version=version)
    return msgspec.structs.replace(group, own=False)


@pytest.fixture
def honest(model_folder):
    return from_model(model_folder, version=0)


def test_honest_log_probs_agree_and_random_ones_do_not(learner, honest):
    found = learner.audit(honest)
    assert found.kl < 1e-8
    assert found.num_tokens == 24
    random = random_groups(num_groups=1, distance=2.0)[0]
    assert learner.audit(random).kl > 0.5


def test_only_the_current_version_is_audited(learner, honest, model_folder):
    later = from_model(model_folder, version=1)
    assert learner.audit(later) == AuditReply()
    before = learner.train(random_groups(num_groups=2), step=1).report
    assert before.policy_version == 1
    assert learner.audit(honest) == AuditReply()
    assert learner.audit(later).kl > 1e-8, "other weights sampled it"


def test_reports_of_steps_do_not_contain_audits(learner, honest):
    learner.audit(honest)
    groups = [msgspec.structs.replace(group, own=False) for group in random_groups(num_groups=2)]
    assert learner.train(groups, step=1).report.mismatch_kl is None
