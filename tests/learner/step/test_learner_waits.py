"""The passes over a batch read no value of a GPU. The results are those of the CPU, which reads each at no cost."""

import pytest
import torch
from learner_rig import make_group, random_groups
from tiny_models import make_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ftis_node.learner.batch import make_batch, make_packed_micro_batches
from ftis_node.learner.model import attention, logprobs
from ftis_node.learner.model.logprobs import completion_logprobs
from ftis_node.learner.step import train_step
from ftis_node.learner.step.objective import Objective
from ftis_node.learner.step.train_step import Passes

READS = ("_local_scalar_dense", "nonzero", "_unique2", "masked_select", "equal")


class Reads(TorchDispatchMode):
    """A recorder of reads of values that follow from `begin`'s tensors, which a GPU would compute."""

    def __init__(self) -> None:
        super().__init__()
        self.events = []
        self._kept, self._memory = [], set()

    def begin(self, tensor):
        self._kept.append(tensor)
        self._memory.add(tensor.untyped_storage().data_ptr())
        return tensor

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        is_on_gpu = any(each.untyped_storage().data_ptr() in self._memory for each in tensors)
        result = function(*args, **(kwargs or {}))
        if not is_on_gpu:
            return result
        name = function.overloadpacket.__name__
        is_mask = name in ("index", "index_put_") and any(each.dtype == torch.bool for each in tensors[1:])
        if name in READS or is_mask:
            self.events.append(name)
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self.begin(each)
        return result


@pytest.fixture
def model():
    attention.register()
    made = make_model(seed=1)
    made.set_attn_implementation(attention.ATTENTION)
    return made


def gradients_of(model, batch, objective, reads=None):
    def forward(micro_batch):
        output = completion_logprobs(model, micro_batch)
        return output if reads is None else reads.begin(output)

    model.zero_grad()
    micro_batches = make_packed_micro_batches(batch, max_tokens=60)
    assert len(micro_batches) > 2
    between = (lambda: None) if reads is None else lambda: reads.events.append("pass")
    found = Passes(forward, batch, micro_batches, between=between).gradients(objective)
    return found, [None if each.grad is None else each.grad.clone() for each in model.parameters()]


@pytest.mark.parametrize(
    ("method", "kl"),
    [("ftis", 0.0), ("gepo", 0.0), ("grpo", 0.1), ("tis", 0.0), ("f-vis", 0.1), ("hacpo", 0.0), ("dppo", 0.0)],
)
def test_the_host_reads_nothing_until_the_passes_are_done(model, monkeypatch, method, kl):
    batch = make_batch([*random_groups(num_groups=5), make_group([[1, 2], [3]], [1.0, 1.0], number=9)])
    params = {"gepo": {"k3_beta": 0.01}, "f-vis": {"filter": "obrs"}}.get(method, {})
    objective = Objective(method, params, kl_to_start=kl)
    expected, its_gradient = gradients_of(model, batch, objective)
    copy = torch.Tensor.cpu
    for module in (train_step, logprobs):
        monkeypatch.setattr(module, "is_free_to_read", lambda device: False)
    with Reads() as reads:
        monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: reads.events.append("cpu") or copy(tensor))
        found, gradient = gradients_of(model, batch, objective, reads)
    last = len(reads.events) - reads.events[::-1].index("pass")
    assert set(reads.events[:last]) == {"pass"}
    assert "cpu" in reads.events[last:] and "_local_scalar_dense" in reads.events[last:]
    assert torch.equal(found.learner_logprobs, expected.learner_logprobs)
    assert (found.loss, found.metrics, found.skipped) == (expected.loss, expected.metrics, None)
    for one, other in zip(gradient, its_gradient, strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()


@pytest.mark.parametrize("rewards", [[1.0, 1.0], [0.0, 1.0]], ids=["no-advantage", "all-masked"])
def test_a_step_without_a_gradient_is_skipped_whether_or_not_the_host_knows_it_before(model, monkeypatch, rewards):
    """Equal rewards give no advantage. Otherwise the method's mask takes all tokens, which only log-probs show."""
    batch = make_batch(
        [make_group([[1, 2] * 10, [3] * 20], rewards, number=number, logprobs=[[-0.1] * 20] * 2) for number in range(4)]
    )
    objective = Objective("mis", {})
    for module in (train_step, logprobs):
        monkeypatch.setattr(module, "is_free_to_read", lambda device: False)
    found, _ = gradients_of(model, batch, objective)
    assert (found.skipped, found.refused) == ("no signal", None)
