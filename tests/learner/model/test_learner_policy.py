"""The trained parameters: the whole model, or an adapter, which can be merged. Gated blocks save half the memory."""

import json
import re
import subprocess
import sys

import pytest
import torch
from learner_rig import LORA, make_boot
from tiny_models import make_model, save_tiny
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention

from ftis_node.config.workers import LoraSection
from ftis_node.errors import ConfigError, ModelError
from ftis_node.learner.checkpoint.publication import gathering_of
from ftis_node.learner.model import attention, policy_loading
from ftis_node.learner.model import policy as policies
from ftis_node.learner.model.activations import recompute_activations, replace_gated_blocks
from ftis_node.learner.model.attention import ATTENTION
from ftis_node.learner.model.logprobs import completion_logprobs
from ftis_node.learner.model.lora import lora_layers
from ftis_node.learner.model.policy import check_logits
from ftis_node.learner.model.policy_loading import choices_path, difference_from, load_policy


def randomized_adapter(policy):
    """Add noise to the adapter, because peft initializes it without an effect."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return policy


def test_full_training_trains_every_weight(model_folder, tmp_path):
    policy = load_policy(make_boot(model_folder, tmp_path))
    assert policy.num_trainable_parameters == policy.num_parameters == make_model().num_parameters()
    assert "model.embed_tokens.weight" in policy.trainable()


def test_lora_trains_only_the_adapter(model_folder, tmp_path, micro_batch):
    policy = load_policy(make_boot(model_folder, tmp_path, lora=LORA))
    assert policy.num_parameters == make_model().num_parameters()
    # 7 linear layers of 2 decoder layers, each rank x (inputs + outputs)
    assert policy.num_trainable_parameters == 2 * 4 * (128 + 96 + 96 + 128 + 192 + 192 + 192)
    randomized_adapter(policy).logprobs(micro_batch).sum().backward()
    with_gradient = {name for name, value in policy.causal_lm.named_parameters() if value.grad is not None}
    assert with_gradient == set(policy.trainable())
    assert all(".lora_" in name for name in with_gradient)


def merged_weights(policy):
    with gathering_of(policy) as gathering:
        return {name: gathering.take(name, tensor) for name, tensor in gathering.tensors.items()}


@pytest.mark.parametrize("tied", [True, False])
def test_merged_weights_equal_the_adapter_and_do_not_change_it(tmp_path, micro_batch, tied):
    folder = save_tiny(tmp_path / "m", tied=tied)
    policy = randomized_adapter(load_policy(make_boot(folder, tmp_path, lora=LORA)))
    with torch.no_grad():
        unmerged = policy.logprobs(micro_batch)
    merged = merged_weights(policy)
    plain = make_model(tied=tied)
    without_adapter = policies.completion_logprobs(plain, micro_batch)
    missing, unexpected = plain.load_state_dict(merged, strict=False)
    assert (set(missing), unexpected) == ({"lm_head.weight"} if tied else set(), [])
    with torch.no_grad():
        assert (policies.completion_logprobs(plain, micro_batch) - unmerged).abs().max() < 1e-5
        assert (without_adapter - unmerged).abs().max() > 0.1
        assert torch.equal(policy.logprobs(micro_batch), unmerged)


def test_bfloat16_stores_and_computes_in_bfloat16(model_folder, tmp_path, micro_batch):
    exact = load_policy(make_boot(model_folder, tmp_path))
    rough = load_policy(make_boot(model_folder, tmp_path, dtype="bfloat16"))
    with torch.no_grad():
        difference = (exact.logprobs(micro_batch) - rough.logprobs(micro_batch)).abs().max()
    assert 1e-4 < difference < 0.2
    assert {value.dtype for value in rough.trainable().values()} == {torch.bfloat16}
    assert {value.dtype for value in merged_weights(rough).values()} == {torch.bfloat16}


@pytest.mark.parametrize("lora", [None, LORA])
def test_recomputed_activations_give_the_same_gradient(model_folder, tmp_path, micro_batch, lora, monkeypatch):
    gradients = []
    for recompute, kept, order in ((False, 0, [0, 1]), (True, 0, [0, 1, 1, 0]), (True, 1, [0, 1, 0])):
        boot = make_boot(model_folder, tmp_path, lora=lora, recompute_activations=recompute, layers_kept=kept)
        policy = randomized_adapter(load_policy(boot))
        runs = []
        for number, layer in enumerate(policy.causal_lm.model.layers):
            layer.self_attn.register_forward_hook(lambda *_, runs=runs, number=number: runs.append(number))
        policy.logprobs(micro_batch).sum().backward()
        assert runs == order
        gradients.append(torch.cat([value.grad.flatten() for value in policy.trainable().values()]))
        assert torch.equal(gradients[0], gradients[-1])
    assert recompute_activations(policy.causal_lm), "out of memory: the last layer recomputes, too"
    assert not recompute_activations(policy.causal_lm)


def test_an_adapter_is_the_same_in_every_dtype(model_folder, tmp_path):
    """It is initialized on the CPU in float32, so a GPU and a rank with an empty model have the same one."""
    weights = {
        dtype: load_policy(make_boot(model_folder, tmp_path, lora=LORA, dtype=dtype)).trainable()
        for dtype in ("float32", "bfloat16")
    }
    assert any(value.any() for name, value in weights["float32"].items() if ".lora_A" in name)
    for name, value in weights["float32"].items():
        assert torch.equal(value.bfloat16(), weights["bfloat16"][name]), name


def test_adapter_for_no_layer_is_refused(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("ftis_node.learner.model.lora.ADAPTED_LAYERS", ["nowhere"])
    with pytest.raises(ConfigError, match="does not fit the model"):
        load_policy(make_boot(model_folder, tmp_path, lora=LoraSection(rank=4)))


def test_a_model_that_changes_its_logits_is_refused(model_folder, tmp_path):
    """With a scale or a soft cap, log-probs from the output head would be wrong."""
    policy = load_policy(make_boot(model_folder, tmp_path))
    head = policy.causal_lm.forward

    def scaled(**inputs):
        answer = head(**inputs)
        answer.logits = 3 * answer.logits
        return answer

    check_logits(policy)
    policy.causal_lm.forward = scaled
    with pytest.raises(ModelError, match="tiny changes its logits after the output head in an unknown way"):
        check_logits(policy)


def test_sequences_are_packed(model_folder, tmp_path):
    policy = load_policy(make_boot(model_folder, tmp_path, lora=LORA, dtype="bfloat16"))
    assert policy.packs
    assert policy.layout == "packed rows"
    assert policy.causal_lm.config._attn_implementation == ATTENTION


@pytest.mark.parametrize(
    ("window", "is_passed", "layout"),
    [(512, True, "packed rows"), (512, False, "padded rows"), (760, False, "packed rows")],
)
def test_sliding_windows_are_packed_if_attention_gets_them_or_no_text_crosses_them(
    tmp_path, monkeypatch, caplog, window, is_passed, layout
):
    """Texts have 760 tokens at most. Some models apply a window only by a mask, which packed attention does not get."""
    plain = attention.attend

    def attend(*tensors, sliding_window=None, **more):
        return plain(*tensors, sliding_window=sliding_window if is_passed else None, **more)

    register = attention.register
    monkeypatch.setattr(attention, "register", lambda: register(attend))
    folder = save_tiny(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    layer_types = ["full_attention", "sliding_attention"]
    config |= {"use_sliding_window": True, "sliding_window": window, "layer_types": layer_types}
    (folder / "config.json").write_text(json.dumps(config))
    with caplog.at_level("WARNING"):
        policy = load_policy(make_boot(folder, tmp_path))
    assert (policy.layout, policy.causal_lm.config.sliding_window) == (layout, window)
    if layout == "padded rows":
        assert policy.causal_lm.config._attn_implementation == "sdpa"
        assert re.search(
            r"tiny cannot be packed \(in packed rows log-probs are off by .*\): each completion repeats its prompt\. "
            r"That is 2\.6 times the positions of packed rows at this run's limits",
            caplog.text,
        )


def test_only_differences_beyond_rounding_refuse_packed_rows():
    """Rounding of bfloat16 has a deviation of 0.05 nats, and one of 1,000 values is beyond 0.25."""
    torch.manual_seed(0)
    for _ in range(100):
        logprobs, gradient = 3 * torch.randn(121) - 11, torch.randn(64)
        tails = torch.randn(121).sign() * (0.25 - 0.15 * torch.rand(121).log())
        noise = torch.where(torch.rand(121) < 0.001, tails, 0.05 * torch.randn(121))
        leaking = noise.clone()
        leaking[72:103] += torch.randn(31)  # the second completion attends to the first
        rounded, one_wrong = gradient + 0.05 * torch.randn(64), noise.clone()
        one_wrong[72] += 2.4  # its first token is predicted from a wrong token
        cases = (
            (noise, rounded, False),
            (leaking, rounded, True),
            (one_wrong, rounded, True),
            (noise, 2 * rounded, True),
        )
        for error, found, is_refused in cases:
            problem = difference_from((logprobs, gradient), (logprobs + error, found), dtype=torch.bfloat16)
            assert (problem is not None) == is_refused


class WrongGradient(torch.autograd.Function):
    """The identity, with twice its gradient."""

    @staticmethod
    def forward(ctx, output):
        return output.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@pytest.mark.parametrize("broken", ["forward", "backward"])
def test_wrong_packed_attention_is_not_used(model_folder, tmp_path, monkeypatch, caplog, broken):
    """Another version of torch may have such a fault, in the forward or the backward pass."""

    def attend(query, key, value, **options):
        wrong = {"forward": lambda output: output.roll(1, dims=2), "backward": WrongGradient.apply}[broken]
        return wrong(scaled_dot_product_attention(query, key, value, **options))

    monkeypatch.setattr("ftis_node.learner.model.attention.scaled_dot_product_attention", attend)
    with caplog.at_level("INFO"):
        for _ in range(2):  # the first start keeps no choice
            assert not load_policy(make_boot(model_folder, tmp_path)).packs
    assert "off by" in caplog.text


def test_a_later_start_of_the_same_model_and_code_does_not_measure_packed_rows_again(
    model_folder, tmp_path, monkeypatch, caplog
):
    boot = make_boot(model_folder, tmp_path)
    assert load_policy(boot).packs

    def refuse(policy, sampling):
        raise ValueError("measured")

    monkeypatch.setattr(policy_loading, "_why_not_packed", refuse)
    again = load_policy(boot)
    assert again.packs and again.causal_lm.config._attn_implementation == ATTENTION
    assert not load_policy(make_boot(model_folder, tmp_path, lora=LORA)).packs, "another case"
    choices_path(boot).write_text("{")
    assert not load_policy(boot).packs and "cannot be packed (measured)" in caplog.text


WIDE = 128  # the tiny models' feed-forward width


def values_and_gradients(run, model):
    """Return the log-probs of `run`, and the gradient of their sum to each trained tensor."""
    values = run()
    trained = [value for value in model.parameters() if value.requires_grad]
    return values, torch.autograd.grad(values.sum(), trained)


def check_equal(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=0)
    for one, other in zip(found[1], expected[1], strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


def num_wide_kept(run, num_positions):
    """Return the number of feed-forward activations that `run` saves for the backward pass."""
    kept = set()

    def keep(tensor):
        if tensor.shape[-1:] == (WIDE,) and tensor.numel() == WIDE * num_positions:
            kept.add(tensor.data_ptr())
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    assert result.requires_grad
    return len(kept)


def test_values_and_gradients_are_the_same(micro_batch):
    plain, saving = make_model(), make_model()
    assert replace_gated_blocks(saving) == 2
    results = []
    for model, num_kept in ((plain, 4), (saving, 2)):

        def run(model=model):
            return completion_logprobs(model, micro_batch)

        assert num_wide_kept(run, micro_batch.token_ids.numel()) == 2 * num_kept
        results.append(values_and_gradients(run, model))
    check_equal(*results)


@pytest.mark.parametrize("quantize", ["none", "4bit"])
def test_values_and_gradients_are_the_same_with_an_adapter(model_folder, tmp_path, micro_batch, quantize):
    """Also those of the adapter, whose layers add their output as part of a product."""
    policy = load_policy(make_boot(model_folder, tmp_path, lora=LoraSection(rank=4, alpha=8), quantize=quantize))
    assert all("forward" in vars(layer) for layer in lora_layers(policy.causal_lm).values())
    randomized_adapter(policy)
    ours = values_and_gradients(lambda: policy.logprobs(micro_batch), policy.causal_lm)
    for module in policy.causal_lm.modules():
        module.__dict__.pop("forward", None)  # restores the method of the class
    check_equal(ours, values_and_gradients(lambda: policy.logprobs(micro_batch), policy.causal_lm), tolerance=1e-4)


def test_experts_whose_weights_are_parameters_are_not_changed():
    experts = torch.nn.Module()
    experts.gate_proj = experts.up_proj = experts.down_proj = torch.nn.Parameter(torch.ones(2, 4, 4))
    experts.act_fn = torch.nn.SiLU()
    assert replace_gated_blocks(experts) == 0


def test_another_activation_is_not_changed():
    model = make_model()
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    assert replace_gated_blocks(model) == 0


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("formula", ["factor", "limit", "learned factor", "the same"])
def test_a_block_with_another_formula_is_not_changed(formula, on_meta):
    class Block(type(make_model().model.layers[0].mlp)):
        def forward(self, hidden):
            gate, up = self.act_fn(self.gate_proj(hidden)), self.up_proj(hidden)
            product = gate.clamp(max=7.0) * up if formula == "limit" else gate * up
            return self.down_proj(product) * (0.9 if formula == "factor" else getattr(self, "scale", 1.0))

    model = make_model()
    for layer in model.model.layers:
        layer.mlp.__class__ = Block
        if formula == "learned factor":
            layer.mlp.scale = torch.nn.Parameter(torch.ones(1))
    assert replace_gated_blocks(model.to("meta") if on_meta else model) == (2 if formula == "the same" else 0)


def test_a_model_without_an_adapter_loads_no_peft():
    call = "assert lora_layers(torch.nn.Linear(2, 2)) == {} and 'peft' not in sys.modules"
    code = f"import sys, torch; from ftis_node.learner.model.lora import lora_layers; {call}"
    subprocess.run([sys.executable, "-c", code], check=True)
