"""Compiled layers compute the same step. Kernels that fail or are wrong are skipped, and the fastest are used."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from learner_rig import make_boot, random_groups

from ftis_node.errors import ConfigError
from ftis_node.learner.learner import Learner
from ftis_node.learner.model import kernels
from ftis_node.learner.model.kernels import KernelMeasurement, choose_kernels, measure
from ftis_node.learner.model.policy_loading import kept_choices, load_policy


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
    assert {name: learner.state().kernels for name, learner in learners.items()} == {name: name for name in learners}
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


def test_measuring_a_layer_does_not_change_the_model(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "COMPLETION_TOKENS", 30)
    policy = load_policy(make_boot(model_folder, tmp_path))
    micro_batch = kernels._micro_batch(policy, 600)
    assert 400 < micro_batch.token_ids.numel() <= 600
    found = measure(policy, micro_batch)
    assert 0 < found.seconds < 60
    assert len(policy.causal_lm.get_decoder().layers) == 2
    assert all(value.grad is None for value in policy.trainable().values())


@pytest.mark.parametrize(
    ("plain_ms", "compiled_ms", "compiled_bytes", "problem", "chosen", "line"),
    [
        (10.0, 8.0, 100, None, "compile", "kernels: compile; a layer of "),
        (10.0, 9.9, 100, None, "plain", "kernels: plain; a layer of "),  # within noise
        (10.0, 2.0, 150, None, "plain", "compile 2.0 ms and 1.50 times the memory"),
        (10.0, 8.0, 100, "no such architecture", "plain", "compile is skipped: RuntimeError: no such architecture"),
        (10.0, None, 100, "at this size", "plain", "compile is skipped: RuntimeError: at this size"),
        (10.0, 8.0, sys.maxsize, None, "plain", "compile is skipped: a layer ran out of memory"),
    ],
)
def test_on_a_gpu_the_faster_correct_kernels_are_used_and_measured_once(
    model_folder, tmp_path, monkeypatch, caplog, plain_ms, compiled_ms, compiled_bytes, problem, chosen, line
):
    """Stubs replace the GPU, the compiler and the measured times. A failure is no result, so the next start tries."""
    caplog.set_level(logging.INFO)
    policy = load_policy(make_boot(model_folder, tmp_path))
    times = ((plain_ms, 100), (compiled_ms or 0.0, compiled_bytes))
    measured = iter([KernelMeasurement(1e-3 * ms, num_bytes) for ms, num_bytes in times])

    def compile_layers(causal_lm):
        if problem and compiled_ms:
            raise RuntimeError(problem)
        return lambda: None

    def next_measurement(*_):
        found = next(measured)
        if not found.seconds:
            raise RuntimeError(problem)
        return found

    monkeypatch.setattr(kernels, "compile_layers", compile_layers)
    monkeypatch.setattr(kernels, "measure", next_measurement)
    monkeypatch.setattr(type(policy.causal_lm), "device", SimpleNamespace(type="cuda"), raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(kernels, "probe_values", lambda policy: (torch.zeros(3), torch.zeros(3)))
    boot = make_boot(model_folder, tmp_path, micro_batch_tokens=600)
    assert choose_kernels(policy, boot).kernels == chosen
    assert line in caplog.text
    if "skipped" in line:
        assert kept_choices(boot).get(kernels._case(policy, boot)) is None
        return
    assert choose_kernels(policy, boot).kernels == chosen
    with pytest.raises(StopIteration):  # another case is measured
        choose_kernels(policy, msgspec.structs.replace(boot, micro_batch_tokens=700))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_processes": 2}, "'compile' is for a learner of one process"),
        ({"peer_weights": "agreement"}, "skips the hooks of method.peer_weights"),
    ],
)
def test_compile_is_refused_where_it_cannot_work(model_folder, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        Learner(make_boot(model_folder, tmp_path, kernels="compile", **changes))


PROGRAM = Path(__file__).parent / "head_kernels_program.py"


def test_the_fused_kernels_equal_the_operations():
    """Triton's interpreter is set by the environment before the import, so another process runs it on the CPU."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, PROGRAM], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found["cases"]) == 4
    for case in found["cases"]:
        assert case["chosen"] == case["wrong_zeros"] == case["wrong_signs"] == case["dtype"] == 0
        assert case["log_prob"] < 1e-6
    *exact, rounded, large = [case["gradient"] for case in found["cases"]]
    assert max(*exact, large) < 1e-6
    assert rounded <= 2**-7, "one unit in the last place of bfloat16"
    assert 0 < found["head"] < 1e-5
    right, wrong = found["trials"]
    assert right == "" and "they are off by " in wrong
