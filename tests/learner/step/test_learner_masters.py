"""Updates and gradients below the spacing of bfloat16 add up in float32."""

import pytest
import torch
from learner_rig import make_boot, random_groups
from safetensors.torch import load_file
from torch.nn import Parameter

from ftis_node.learner.core import Learner
from ftis_node.learner.step.optimizer import MasterWeights, make_masters, make_optimizer
from tests.published import published_tensors

# Half of bfloat16's spacing is 3.8e-6 here, which is above one update of 1e-6 and below fifty.
START = 1.5e-3


def weight(value=START, num=32):
    return Parameter(torch.full((num,), value, dtype=torch.bfloat16))


@pytest.mark.parametrize("states", ["float32", "8bit"])
def test_updates_below_the_spacing_of_bfloat16_add_up(tmp_path, states):
    boot = make_boot("tiny", tmp_path, learning_rate=1e-6, optimizer_states=states)
    ours, num = weight(num=8192), 50
    masters = make_masters({"ours": ours}, boot)
    optimizer = make_optimizer(masters, boot)
    plain = weight()
    control = torch.optim.AdamW([plain], lr=1e-6, weight_decay=0.0)
    before = ours.detach().clone()
    for _ in range(num):
        for parameter, updates in ((ours, optimizer), (plain, control)):
            (3.0 * parameter).sum().backward()
            updates.step()
            updates.zero_grad(set_to_none=True)
    moved = before.float() - masters.tensors["ours"].detach()
    assert moved.allclose(torch.tensor(num * 1e-6), rtol=0.01, atol=0)
    assert ours.detach().equal(masters.tensors["ours"].detach().bfloat16())
    assert (before.float() - ours.detach().float()).allclose(torch.tensor(num * 1e-6), rtol=0, atol=4e-6)
    assert plain.detach().equal(weight().detach()), "updates are lost without masters"


def test_gradients_of_micro_batches_add_up_in_float32():
    ours, plain = weight(), weight()
    masters = MasterWeights({"ours": ours})
    for factor in (1.0, 2.0**-9, 2.0**-9):
        for parameter in (ours, plain):
            (factor * parameter).sum().backward()
    assert masters.tensors["ours"].grad.equal(torch.full((32,), 1 + 2.0**-8))
    assert plain.grad.equal(torch.ones(32, dtype=torch.bfloat16)), "bfloat16 loses small gradients"
    assert ours.grad is None


def test_a_float32_weight_is_its_own_master():
    ours = Parameter(torch.ones(3))
    masters = MasterWeights({"ours": ours})
    assert masters.tensors["ours"] is ours
    ours.sum().backward()
    masters.write_back()
    assert ours.grad is not None


def test_checkpoints_are_float32_and_published_weights_are_rounded(model_folder, tmp_path):
    boot = make_boot(model_folder, tmp_path, dtype="bfloat16", learning_rate=1e-4)
    learner = Learner(boot)
    for step in (1, 2):
        learner.train(random_groups(seed=step), step=step)
    saved = load_file(tmp_path / "checkpoints" / "step-00000002" / "weights.safetensors")
    published = published_tensors(tmp_path / "weights", 2)
    assert {value.dtype for value in saved.values()} == {torch.float32}
    assert any(not value.equal(value.bfloat16().float()) for value in saved.values())
    for name, value in saved.items():
        assert published[name].equal(value.bfloat16())
