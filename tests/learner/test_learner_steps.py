"""The learner in this process: training, counters, reports, checkpoints, published weights, exports, and audits."""

import json
import math
import shutil
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from learner_rig import PROMPT, make_boot, make_group, one_by_one_logprobs, random_groups, sample_group
from safetensors.torch import load_file

from ftis_node.algorithms.methods import method_parameters
from ftis_node.config.manifest import SamplingSection
from ftis_node.config.workers import LoraSection
from ftis_node.errors import ConfigError, FtisError, MachineError
from ftis_node.learner.checkpoint import checkpoint, checkpoint_manager
from ftis_node.learner.checkpoint.export import export_newest, export_policy
from ftis_node.learner.learner import Learner
from ftis_node.learner.messages import AuditReply
from ftis_node.models import load_causal_lm, resolve_model
from ftis_node.workers.weight_store import file_checksums, probe_logprobs
from tests.published import newest_version

LORA = LoraSection(rank=8, alpha=16)


def test_report_by_hand(model_folder, tmp_path):
    learner = Learner(make_boot(model_folder, tmp_path, method="nois"))
    model = learner.policy.causal_lm
    completions = [[1, 2, 3], [4, 5]]
    exact = [one_by_one_logprobs(model, PROMPT, ids).tolist() for ids in completions]
    shifted = [[value + 0.25 for value in row] for row in exact]
    groups = [
        make_group(completions, [1.0, 0.0], number=0, logprobs=shifted),
        make_group(completions, [0.0, 0.5], number=1, version=7, logprobs=exact),  # sampled by another version
        make_group(completions, [1.0, 1.0], number=2, own=False, logprobs=exact),
    ]
    report = learner.train(groups, step=1).report
    assert (report.step, report.policy_version, report.num_updates) == (1, 1, 1)
    assert (report.own_groups, report.foreign_groups, report.num_tokens) == (2, 1, 15)
    assert (report.own_reward_mean, report.foreign_reward_mean) == (0.375, 1.0)
    assert report.reward_mean == pytest.approx(3.5 / 6)
    assert report.mismatch_kl == pytest.approx(math.expm1(-0.25) + 0.25, abs=1e-5)  # of the first group only
    assert (report.mismatch_share, report.mismatch_tokens, report.mismatch_version) == (1.0, 5, 0)
    assert report.loss == pytest.approx(0, abs=1e-6)  # advantages of a group sum to 0 if every ratio is 1
    assert report.kept_fraction == 1
    assert report.grad_norm > 0
    assert report.tokens_per_s == pytest.approx(15 / report.duration_s)
    assert (report.skipped, report.refused, report.repeated) == (None, None, False)


def test_a_step_without_signal_advances_the_step_and_not_the_version(model_folder, tmp_path):
    learner = Learner(make_boot(model_folder, tmp_path))
    for step, groups, reason in ((1, [make_group([[1], [2]], [1.0, 1.0])], "no signal"), (2, [], "no groups")):
        reply = learner.train(groups, step=step)
        assert (reply.report.skipped, reply.report.policy_version, reply.report.num_updates) == (reason, 0, 0)
        assert (reply.weights, reply.proof) == (None, None)
    assert (learner.state().step, learner.state().policy_version) == (2, 0)
    assert learner.train(random_groups(), step=3).report.policy_version == 3


def test_a_later_update_without_a_gradient_does_not_undo_the_earlier_ones(model_folder, tmp_path):
    """GSPO clips each sequence as soon as an update has moved it far enough."""
    boot = make_boot(model_folder, tmp_path, method="gspo", updates_per_batch=4, learning_rate=1e-2)
    learner = Learner(boot)
    completions = [[1, 2, 3], [4, 5]]
    exact = [one_by_one_logprobs(learner.policy.causal_lm, PROMPT, ids).tolist() for ids in completions]
    report = learner.train([make_group(completions, [1.0, 0.0], logprobs=exact)], step=1).report
    assert 0 < report.num_updates < 4
    assert (report.policy_version, report.skipped, report.refused, report.unfinished) == (1, None, None, "no signal")


def test_a_failed_checkpoint_is_written_again_at_the_end(model_folder, tmp_path, monkeypatch):
    write, failures = checkpoint_manager.write_checkpoint, [OSError(28, "No space left on device")]

    def fail_once(*arguments, **options):
        if failures:
            raise failures.pop()
        return write(*arguments, **options)

    monkeypatch.setattr(checkpoint_manager, "write_checkpoint", fail_once)
    learner = Learner(make_boot(model_folder, tmp_path, checkpoint_every_steps=None))
    learner.train(random_groups(), step=1)
    learner.checkpoints.save_if_behind()
    assert not failures
    assert Learner(make_boot(model_folder, tmp_path)).state().step == 1


def test_steps_are_done_once_and_in_order(model_folder, tmp_path):
    learner = Learner(make_boot(model_folder, tmp_path))
    first = learner.train(random_groups(), step=1)
    weights = learner.policy.trainable()["model.norm.weight"].detach().clone()
    again = learner.train(random_groups(seed=8), step=1)
    assert again.report.repeated
    assert (again.weights, again.proof) == (first.weights, first.proof)
    assert torch.equal(learner.policy.trainable()["model.norm.weight"], weights)
    for wrong in (0, 3, 9):
        with pytest.raises(FtisError, match=f"is at step 1 and cannot do step {wrong}"):
            learner.train(random_groups(), step=wrong)


def test_an_adapter_is_published_in_the_format_of_peft(model_folder, tmp_path):
    from peft import PeftModel

    boot = make_boot(model_folder, tmp_path, lora=LORA, learning_rate=1e-2, publish_as="adapter", transfer="ipc")
    learner = Learner(boot)
    assert learner.state().weights is None
    for step in (1, 2, 3):
        reply = learner.train(random_groups(seed=step), step=step)
    path = Path(reply.weights.path)
    assert path == tmp_path / "weights" / "weights-00000003" / "adapter_model.safetensors"
    assert sorted(entry.name for entry in (tmp_path / "weights").iterdir()) == ["weights-00000002", "weights-00000003"]
    assert reply.weights.num_bytes == path.stat().st_size < (model_folder / "model.safetensors").stat().st_size / 2

    learner.policy.adapted.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    published, saved = load_file(path), load_file(tmp_path / "peft" / path.name)
    assert published.keys() == saved.keys()
    assert all(torch.equal(published[name], saved[name]) for name in saved)
    config, saved_config = (
        json.loads((folder / "adapter_config.json").read_text()) for folder in (path.parent, tmp_path / "peft")
    )
    assert config.pop("base_model_name_or_path") == "tiny", "the path of the folder is not published"
    saved_config.pop("base_model_name_or_path")
    assert config == saved_config | {"target_modules": sorted(saved_config["target_modules"])}

    served = PeftModel.from_pretrained(load_causal_lm(resolve_model(str(model_folder))), path.parent)
    assert reply.proof.rms_difference(probe_logprobs(served, reply.proof.probe_ids)) < 1e-5
    assert Path(Learner(boot).state().weights.path).read_bytes() == path.read_bytes()


def test_a_checkpoint_written_during_a_step_has_the_state_before_its_update(model_folder, tmp_path, monkeypatch):
    made = [tmp_path / name / "checkpoints" / "step-00000001" for name in ("foreground", "background")]
    Learner(make_boot(model_folder, tmp_path / "foreground")).train(random_groups(), step=1)
    begun, may_write, write = threading.Event(), threading.Event(), checkpoint.write_tensors

    def slow(*arguments):
        begun.set()
        assert may_write.wait(60)
        write(*arguments)

    monkeypatch.setattr(checkpoint, "write_tensors", slow)
    learner = Learner(make_boot(model_folder, tmp_path / "background", checkpoint_every_steps=None))
    assert learner.train(random_groups(), step=1).saved_step == 0
    assert begun.wait(60)
    threading.Timer(0.7, may_write.set).start()  # a step of the tiny model takes a tenth of it
    assert learner.train(random_groups(seed=2), step=2).saved_step == 1
    for file in checkpoint.WEIGHTS_FILE, checkpoint.OPTIMIZER_FILE:
        at_once, behind = (load_file(folder / file) for folder in made)
        assert at_once.keys() == behind.keys()
        assert all(torch.equal(at_once[name], behind[name]) for name in at_once)
    learner.checkpoints.save_if_behind()
    assert Learner(make_boot(model_folder, tmp_path / "background")).state().step == 2


def test_a_failed_write_in_the_background_is_raised_by_the_next_step(model_folder, tmp_path, monkeypatch):
    learner = Learner(make_boot(model_folder, tmp_path, checkpoint_every_steps=None))
    with monkeypatch.context() as disk:

        def full(*arguments, **more):
            raise OSError(28, "No space left on device")

        disk.setattr(checkpoint, "write_tensors", full)
        learner.train(random_groups(), step=1)
        with pytest.raises(MachineError, match="checkpoint of step 1 cannot be written.*No space left"):
            learner.train(random_groups(seed=2), step=2)
    assert learner.train(random_groups(seed=2), step=2).report.repeated
    learner.checkpoints.save_if_behind()
    assert Learner(make_boot(model_folder, tmp_path)).state().step == 2


def test_a_resume_deletes_versions_newer_than_the_checkpoint(model_folder, tmp_path):
    """Step 3 was published without a checkpoint. After the resume its number means other weights."""
    boot = make_boot(model_folder, tmp_path, checkpoint_every_steps=2)
    learner = Learner(boot)
    for step in (1, 2, 3):
        learner.train(random_groups(seed=step), step=step)
    proofs = {2: None, 3: learner.state().proof}
    assert newest_version(tmp_path / "weights") == 3
    resumed = Learner(boot)
    assert (resumed.state().step, resumed.state().weights.version) == (2, 2)
    assert newest_version(tmp_path / "weights") == 2
    assert resumed.train(random_groups(seed=3), step=3).proof == proofs[3]


def test_a_resume_publishes_missing_weights_again(model_folder, tmp_path):
    boot = make_boot(model_folder, tmp_path)
    proof = Learner(boot).train(random_groups(), step=1).proof
    shutil.rmtree(tmp_path / "weights")
    state = Learner(boot).state()
    assert (state.weights.version, state.proof) == (1, proof)
    assert newest_version(tmp_path / "weights") == 1
    assert file_checksums(Path(state.weights.path)) == state.weights.checksums


def test_the_loss_gets_the_settings_and_the_completion_limit(model_folder, tmp_path):
    boot = make_boot(model_folder, tmp_path, kl_estimator="k1_fwd", kl_threshold=0.5)
    boot = msgspec.structs.replace(boot, sampling=SamplingSection(max_completion_tokens=300), rejection_key=7)
    learner = Learner(boot)
    given = {"kl_estimator": "k1_fwd", "kl_threshold": 0.5, "max_completion_length": 300}
    assert learner._objective.params == method_parameters("ftis") | given
    assert (learner._objective.scale, learner._objective.rejection_key) == ("std", 7)


@pytest.mark.parametrize("name", ["tiny", "org/tiny"])
def test_an_exported_adapter_names_its_base_model(model_folder, tmp_path, name):
    from peft import PeftModel

    learner = Learner(make_boot(model_folder, tmp_path, model_name=name, lora=LORA, learning_rate=1e-2))
    for step in (1, 2):
        proof = learner.train(random_groups(seed=step), step=step).proof
    export_policy(learner.policy, tmp_path / "out", merge=False)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    base = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == (str(model_folder) if name == "tiny" else name)
    adapted = PeftModel.from_pretrained(load_causal_lm(resolve_model(str(model_folder))), tmp_path / "out")
    assert proof.rms_difference(probe_logprobs(adapted, proof.probe_ids)) < 1e-5


def test_an_export_does_not_change_the_home(model_folder, tmp_path):
    """Another process may write there, so incomplete and damaged folders remain."""
    boot = make_boot(model_folder, tmp_path / "home")
    with pytest.raises(ConfigError, match="nothing to export yet"):
        export_newest(boot, tmp_path / "early", merge=True)
    learner = Learner(boot)
    proofs = {step: learner.train(random_groups(seed=step), step=step).proof for step in (1, 2)}
    checkpoints = tmp_path / "home" / "checkpoints"
    (checkpoints / ".step-00000003.incomplete-1234").mkdir()
    (checkpoints / "step-00000002" / "state.json").write_text("{")
    before = sorted(tmp_path.glob("home/**/*"))
    assert export_newest(boot, tmp_path / "out", merge=True) == 1
    assert sorted(tmp_path.glob("home/**/*")) == before
    exported = load_causal_lm(resolve_model(str(tmp_path / "out")))
    assert proofs[1].rms_difference(probe_logprobs(exported, proofs[1].probe_ids)) < 1e-5


def test_an_unreadable_body_is_excluded_and_reported(model_folder, tmp_path, caplog):
    own, foreign, *rest = random_groups()
    unreadable = msgspec.structs.replace(foreign, body=b"\xff\xff")
    report = Learner(make_boot(model_folder, tmp_path / "a")).train([own, unreadable, *rest], step=1).report
    without = Learner(make_boot(model_folder, tmp_path / "b")).train([own, *rest], step=1).report
    assert report.unreadable == (foreign.group_id,)
    assert (report.num_updates, report.loss, report.grad_norm) == (1, without.loss, without.grad_norm)
    assert (report.own_groups, report.foreign_groups) == (without.own_groups, without.foreign_groups)
    assert foreign.group_id in caplog.text


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
    assert (before.policy_version, learner.audit(honest)) == (1, AuditReply())
    assert learner.audit(later).kl > 1e-8, "other weights sampled it"


def test_reports_of_steps_do_not_contain_audits(learner, honest):
    learner.audit(honest)
    groups = [msgspec.structs.replace(group, own=False) for group in random_groups(num_groups=2)]
    assert learner.train(groups, step=1).report.mismatch_kl is None
