"""A step that runs out of memory is repeated with smaller micro-batches, with the same result."""

import re

import pytest
import torch
from learner_rig import make_boot, random_groups

from ftis_node.errors import MachineError, OutOfMemoryError
from ftis_node.learner.learner import Learner
from ftis_node.learner.step.train_step import OomRetry, one_out_of_memory_error
from ftis_node.learner.worker import _open


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


def test_a_model_that_does_not_fit_at_the_start_is_an_error_of_the_machine(model_folder, tmp_path, monkeypatch):
    """A first start that fails by it is not repeated."""

    def no_memory(causal_lm, boot):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("ftis_node.learner.learner.make_masters", no_memory)
    with pytest.raises(OutOfMemoryError, match=r"^tiny does not fit into memory for training \(CUDA out of memory"):
        _open(make_boot(model_folder, tmp_path), None, lambda event: None)


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


@pytest.mark.parametrize(
    ("whole", "longest", "expected"),
    [(100_000, 500, 8_000), (3_000, 500, 1_500), (100_000, 9_000, 9_000), (100_000, 16_000, None), (700, 700, None)],
)
def test_the_budget_is_halved_from_the_tokens_in_use(whole, longest, expected):
    retry = OomRetry(16_000)
    assert retry.note_out_of_memory(step=1, whole=whole, longest=longest) == (expected is not None)
    assert retry.max_tokens == (expected or 16_000)


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
    with pytest.raises(MachineError, match="one sequence of 250 tokens: set learner.recompute"):
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
    assert (report.refused, report.unfinished) == (None, "update 2 of 3 was not done: CUDA out of memory")
    report = learner.train(random_groups(seed=1), step=2).report
    assert (report.num_updates, report.micro_batch_tokens, report.out_of_memory) == (3, 50, 0)
