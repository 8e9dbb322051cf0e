"""Compiled layers compute the same step. Kernels that fail or are wrong are skipped, and the fastest are used."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from learner_rig import make_boot, random_groups

from ftis_node.errors import ConfigError
from ftis_node.learner.core import Learner
from ftis_node.learner.model import kernels
from ftis_node.learner.model.kernels import KernelMeasurement, choose_kernels, measure
from ftis_node.learner.model.policy_loading import load_policy


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # torch's own code has deprecated calls
def test_compiled_layers_give_the_same_step(model_folder, tmp_path, caplog):
    """The test uses torch.compile with its C++ backend. The micro-batches of three steps have different shapes."""
    pytest.importorskip("torch._inductor")
    caplog.set_level(logging.INFO)
    learners = {
        name: Learner(make_boot(model_folder, tmp_path / name, kernels=name, micro_batch_tokens=120))
        for name in ("plain", "compile")
    }
    assert {name: learner.state().kernels for name, learner in learners.items()} == {
        "plain": "plain",
        "compile": "compile",
    }
    assert "kernels: compile, as set" in caplog.text
    for step in (1, 2, 3):
        plain, compiled = (learner.train(random_groups(seed=step), step=step) for learner in learners.values())
        assert compiled.report.loss == pytest.approx(plain.report.loss, abs=1e-5)
        assert compiled.report.grad_norm == pytest.approx(plain.report.grad_norm, rel=1e-4)
        assert compiled.proof.logprobs == pytest.approx(plain.proof.logprobs, abs=1e-3)
    frames = torch._dynamo.utils.counters["frames"]
    assert frames["ok"] == frames["total"] > 0
    seen = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    learners["compile"].train(random_groups(seed=4, max_length=30), step=4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == seen, "another shape needs no compilation"


def test_a_failing_compiler_leaves_plain_kernels_and_logs_the_reason(model_folder, tmp_path, monkeypatch, caplog):
    def fail(layer, **options):
        layer._compiled_call_impl = broken

    def broken(*arguments, **options):
        raise RuntimeError("\nNo working C++ compiler found in list\nand more")

    monkeypatch.setattr(torch.nn.Module, "compile", fail)
    boot = make_boot(model_folder, tmp_path, kernels="compile")
    learner = Learner(boot)
    assert learner.state().kernels == "plain"
    (warning,) = [record for record in caplog.records if "kernels" in record.message]
    assert warning.levelname == "WARNING"
    assert warning.message == (
        "kernels: plain, because compile cannot be used: RuntimeError: No working C++ compiler found in list"
    )
    assert learner.train(random_groups(), step=1).report.num_updates == 1


@pytest.mark.parametrize("is_wrong", [False, True])
def test_liger_is_used_if_it_is_correct_and_undone_otherwise(model_folder, tmp_path, monkeypatch, caplog, is_wrong):
    """A stub replaces the package, which needs a GPU. It patches norms and a function of the model's module."""
    code = sys.modules["transformers.models.qwen2.modeling_qwen2"]
    rotate = code.apply_rotary_pos_emb

    def patch(model, *, rope, rms_norm, swiglu, cross_entropy, fused_linear_cross_entropy):
        assert (rope, rms_norm, swiglu, cross_entropy, fused_linear_cross_entropy) == (True, True, False, False, False)
        code.apply_rotary_pos_emb = lambda *arguments, **more: rotate(*arguments, **more)
        for module in model.modules():
            if type(module).__name__ == "Qwen2RMSNorm":
                module.forward = lambda hidden, of=module: (2 if is_wrong else 1) * type(of).forward(of, hidden)

    package = ModuleType("liger_kernel.transformers.monkey_patch")
    package._apply_liger_kernel_to_instance = patch
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    policy = load_policy(make_boot(model_folder, tmp_path))
    chosen = choose_kernels(policy, make_boot(model_folder, tmp_path, kernels="liger"))
    patched = [module for module in policy.causal_lm.modules() if "lambda" in repr(module.__dict__.get("forward"))]
    assert (chosen.kernels, len(patched) > 0) == (("plain", False) if is_wrong else ("liger", True))
    assert (code.apply_rotary_pos_emb is rotate) is is_wrong
    assert ("log-probs are off by" in caplog.text) is is_wrong
    code.apply_rotary_pos_emb = rotate


def test_missing_liger_is_one_warning(model_folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    policy = load_policy(make_boot(model_folder, tmp_path))
    assert choose_kernels(policy, make_boot(model_folder, tmp_path, kernels="liger")).kernels == "plain"
    assert "liger cannot be used: ModuleNotFoundError: " in caplog.text


@pytest.mark.parametrize(
    ("figures", "problem", "chosen"),
    [
        ((10.0, 8.0, 9.0), None, "compile"),
        ((10.0, 9.0, 8.0), None, "liger"),
        ((10.0, 9.9, 9.8), None, "plain"),  # within noise
        ((10.0, 8.0, 9.0), "compile", "liger"),
        ((10.0, 12.0, 11.0), None, "plain"),
    ],
)
def test_the_fastest_correct_kernels_are_used(model_folder, tmp_path, monkeypatch, caplog, figures, problem, chosen):
    """Stubs replace the GPU, the kernels and their measured times."""
    caplog.set_level(logging.INFO)
    policy, on = load_policy(make_boot(model_folder, tmp_path)), []

    def switch(name):
        def turn_on(causal_lm):
            on.append(name)
            if name == problem:
                raise RuntimeError("no such architecture")
            return lambda: on.remove(name)

        return turn_on

    by_name = dict(zip(((), ("compile",), ("liger",)), figures, strict=True))
    monkeypatch.setattr(kernels, "SWITCHES", {name: switch(name) for name in ("compile", "liger")})
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())
    monkeypatch.setattr(kernels, "measure", lambda *_: KernelMeasurement(1e-3 * by_name[tuple(on[-1:])], 100))
    monkeypatch.setattr(type(policy.causal_lm), "device", SimpleNamespace(type="cuda"), raising=False)
    monkeypatch.setattr(kernels, "probe_values", lambda policy: (torch.zeros(3), torch.zeros(3)))
    found = choose_kernels(policy, make_boot(model_folder, tmp_path, micro_batch_tokens=600))
    assert found.kernels == chosen
    line = next(record.message for record in caplog.records if record.message.startswith(f"kernels: {chosen};"))
    assert "plain 10.0 ms" in line
    assert ("compile is skipped: RuntimeError: no such architecture" in caplog.text) is (problem is not None)


def test_kernels_that_take_more_memory_than_planned_are_skipped(model_folder, tmp_path, monkeypatch, caplog):
    policy = load_policy(make_boot(model_folder, tmp_path))
    measured = iter([KernelMeasurement(0.010, 100), KernelMeasurement(0.002, 150)])
    monkeypatch.setattr(kernels, "SWITCHES", {"compile": lambda causal_lm: lambda: None})
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    monkeypatch.setattr(kernels, "measure", lambda *_: next(measured))
    monkeypatch.setattr(type(policy.causal_lm), "device", SimpleNamespace(type="cuda"), raising=False)
    monkeypatch.setattr(kernels, "probe_values", lambda policy: (torch.zeros(3), torch.zeros(3)))
    assert choose_kernels(policy, make_boot(model_folder, tmp_path)).kernels == "plain"
    assert "compile is skipped: a layer takes 1.50 times the memory" in caplog.text


def test_measuring_a_layer_does_not_change_the_model(model_folder, tmp_path):
    policy = load_policy(make_boot(model_folder, tmp_path))
    micro_batch = kernels._micro_batch(policy, 6000)
    assert 4000 < micro_batch.token_ids.numel() <= 6000
    found = measure(policy, micro_batch)
    assert 0 < found.seconds < 60
    assert len(policy.causal_lm.get_decoder().layers) == 2
    assert all(value.grad is None for value in policy.trainable().values())


def test_on_a_cpu_nothing_is_measured_by_default(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "measure", None)
    monkeypatch.setattr(kernels, "SWITCHES", {})
    assert Learner(make_boot(model_folder, tmp_path)).state().kernels == "plain"


def test_kernels_are_refused_with_several_processes(model_folder, tmp_path):
    boot = make_boot(model_folder, tmp_path, kernels="compile", num_processes=2)
    with pytest.raises(ConfigError, match=r"learner.kernels = 'compile' is for a learner of one process") as refused:
        Learner(boot)
    assert refused.value.exit_code == 2


def test_compile_is_refused_with_agreement_weights(model_folder, tmp_path, monkeypatch):
    boot = make_boot(model_folder, tmp_path, kernels="compile", peer_weights="agreement")
    with pytest.raises(ConfigError, match=r"skips the hooks of method.peer_weights"):
        Learner(boot)
    monkeypatch.setattr(kernels, "SWITCHES", {})
    assert (
        Learner(make_boot(model_folder, tmp_path, kernels="liger", peer_weights="agreement")).state().kernels == "plain"
    )
