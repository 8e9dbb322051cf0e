"""A step that runs out of memory is repeated with smaller micro-batches, with the same result."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from learner_rig import make_boot, random_groups
from memory_limited_learner import SHAPE
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile

from ftis_node.errors import MachineError
from ftis_node.learner.core import Learner
from ftis_node.learner.messages import StepReport
from ftis_node.learner.step.oom_retry import OomRetry, one_out_of_memory_error
from ftis_node.learner.worker import _open

BUDGET = 16_000
HERE = Path(__file__).parent


def saved_weights(home):
    return load_file(home / "checkpoints" / "step-00000001" / "weights.safetensors")


def measured(boot):
    """Return the peak memory of the tensors of one step, in bytes."""
    learner = Learner(boot)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        learner.train(random_groups(**SHAPE), step=1)
    held = peak = 0
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.timeout(180)
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of the process's data, and /proc")
def test_a_step_out_of_memory_equals_a_step_with_half_the_budget(model_folder, tmp_path):
    needs = [
        measured(make_boot(model_folder, tmp_path / str(tokens), micro_batch_tokens=tokens))
        for tokens in (BUDGET, BUDGET // 2)
    ]
    # Large tensors have a separate mapping, so that their memory is returned when they are freed.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    folders = (HERE.parents[2], HERE.parent, HERE, HERE.parents[1] / "models")
    environment["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    arguments = [str(model_folder), str(tmp_path / "limited"), str(BUDGET), str(sum(needs) // 2)]
    limited = subprocess.run(
        [sys.executable, str(HERE / "memory_limited_learner.py"), *arguments],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert limited.returncode == 0, limited.stderr
    report = msgspec.json.decode(limited.stdout, type=StepReport)
    assert (report.out_of_memory, report.micro_batch_tokens, report.num_updates) == (1, BUDGET // 2, 1)
    assert f"ran out of memory with micro-batches of {BUDGET} tokens: {BUDGET // 2} from now on" in limited.stderr
    expected, found = saved_weights(tmp_path / str(BUDGET // 2)), saved_weights(tmp_path / "limited")
    assert all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("could not create a memory object"),
        MemoryError(),
    ],
)
def test_errors_of_allocators_and_libraries_become_out_of_memory(error):
    first_line = re.escape(str(error).partition("\n")[0] or "out of memory")
    with pytest.raises(torch.OutOfMemoryError, match=first_line), one_out_of_memory_error():
        raise error


def test_an_error_of_the_cpus_allocator_becomes_out_of_memory_and_others_do_not():
    with pytest.raises(torch.OutOfMemoryError), one_out_of_memory_error():
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught, one_out_of_memory_error():
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    with pytest.raises(torch.AcceleratorError), one_out_of_memory_error():
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_a_learner_limits_itself_to_its_share_of_a_gpu(monkeypatch, model_folder, tmp_path):
    kept = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", kept.append)
    for share in (None, 0.625):
        boot = make_boot(model_folder, tmp_path / str(share), memory_share=share)
        _open(boot, None, lambda event: None).close()
    assert kept == [0.625]


def test_a_failed_attempt_frees_its_memory_before_the_next():
    fitting, held = OomRetry(1000), []

    class Big:
        pass

    def attempt():
        import weakref

        assert [reference() for reference in held] == [None] * len(held)
        held.append(weakref.ref(big := Big()))
        if len(held) < 3:
            raise torch.OutOfMemoryError(f"no memory for {big}")
        return fitting.max_tokens

    assert fitting.run(attempt, step=1, whole=5000, longest=10) == 250
    assert fitting.num_out_of_memory == 2
    with pytest.raises(MachineError, match="one sequence of 250 tokens:"):
        fitting.run(lambda: torch.empty(1 << 60, dtype=torch.uint8), step=2, whole=5000, longest=250)


def test_activations_are_recomputed_before_micro_batches_get_smaller(model_folder, tmp_path, monkeypatch, caplog):
    """A pass fails while a layer keeps its activations, and once more. Only the second failure halves the budget."""
    reports = {}
    for name, may in (("plain", False), ("may", True)):
        learner = Learner(make_boot(model_folder, tmp_path / name, may_recompute=may, micro_batch_tokens=100))
        layer, failures = learner.policy.causal_lm.get_decoder().layers[0], []

        def logprobs(micro_batch, layer=layer, failures=failures, policy=learner.policy):
            if not layer.gradient_checkpointing or len(failures) < 2:
                failures.append(layer.gradient_checkpointing)
                raise torch.OutOfMemoryError("CUDA out of memory")
            return type(policy).logprobs(policy, micro_batch)

        if may:
            learner.policy = _PolicyWithLogprobs(learner.policy, logprobs)
        reports[name] = learner.train(random_groups(), step=1).report
        assert failures == ([False, True] if may else [])
    assert (reports["may"].out_of_memory, reports["may"].micro_batch_tokens) == (2, 50)
    assert "ran out of memory: activations are recomputed from now on" in caplog.text
    assert reports["may"].loss == pytest.approx(reports["plain"].loss, abs=1e-6)
    assert reports["may"].grad_norm == pytest.approx(reports["plain"].grad_norm, rel=1e-5)


class _PolicyWithLogprobs:
    """A policy with another function for its log-probs."""

    def __init__(self, policy, logprobs):
        self._policy, self.logprobs = policy, logprobs

    def __getattr__(self, name):
        return getattr(self._policy, name)


def test_out_of_memory_in_a_later_update_halves_the_budget_of_the_next_step(model_folder, tmp_path, monkeypatch):
    boot = make_boot(model_folder, tmp_path, updates_per_batch=3, micro_batch_tokens=100)
    learner = Learner(boot)
    whole_step, updates = learner._optimizer.step, []

    def step_then_fail(*arguments):
        updates.append(None)
        if len(updates) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole_step(*arguments)

    monkeypatch.setattr(learner._optimizer, "step", step_then_fail)
    report = learner.train(random_groups(), step=1).report
    assert (report.num_updates, report.micro_batch_tokens, report.out_of_memory) == (1, 100, 1)
    assert report.refused == "update 2 of 3 was not done: CUDA out of memory"
    report = learner.train(random_groups(seed=1), step=2).report
    assert (report.num_updates, report.micro_batch_tokens, report.out_of_memory) == (3, 50, 0)
