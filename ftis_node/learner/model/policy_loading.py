"""Loads a policy, checks its log-probs, and chooses its layout; on several ranks, shards it with FSDP2.

Every decoder layer is one FSDP unit: its weights are gathered for its pass and freed after it. Embedding, last norm and
output head belong to the root unit. The head runs outside the model's own forward (`logprobs.py`), so the root unit
wraps the whole model. All work that needs weights runs inside `Policy.compute`.

Each rank starts with a model on the meta device (`models/loading.py`). Rank 0 reads it and broadcasts its tensors
one by one, and each rank keeps its rows. Trained weights are sharded in float32. With bfloat16 they are cast before
they are gathered, and gradients are summed in float32. They are summed, not averaged, because each rank's loss is its
part of one loss.

The KL term needs the frozen starting model. Under a LoRA adapter it is the same weights with the adapter off, or with
its first weights if training began with an adapter. In full training it is a copy in the compute dtype from the model's
folder, never from a checkpoint.

The home keeps what the learner's first start measured, its kernels and its layout, so that later starts do not measure
again. A choice belongs to a case: a text that names all that it depends on.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ftis_node.config.manifest import SamplingSection
from ftis_node.errors import FileError, first_line
from ftis_node.files import read_object, replace_file
from ftis_node.learner.batch import MicroBatch, batch_of
from ftis_node.learner.distributed.ranks import ALONE, RankGroup, Ranks
from ftis_node.learner.distributed.sharded_tensors import copy_from_rank_0, gradient_of
from ftis_node.learner.groups import UnpackedGroup
from ftis_node.learner.messages import LearnerBoot, TrainGroup
from ftis_node.learner.model import attention
from ftis_node.learner.model.activations import decoder_layers
from ftis_node.learner.model.lora import first_adapter
from ftis_node.learner.model.policy import Policy, build_policy, check_logits, find_source, load_unchecked
from ftis_node.learner.step.train_step import Forward
from ftis_node.models import load_causal_lm
from ftis_node.models.loading import empty_causal_lm, is_recurrent, own_tensors
from ftis_node.records.token_batch import TokenBatch
from ftis_node.workers.weight_store import probe_token_ids

log = logging.getLogger(__name__)

MAX_PROBE_TOKENS = 1000
CHOICES_FILE = "learner-choices.json"
PACKED = "packed rows"
# Root mean square of differences between two layouts, in nats, and relative for gradients. In bfloat16 a trainer
# differs from itself at another chunk size by 0.055 (standard deviation) and by up to 0.656 among 3,916 tokens
# (https://github.com/huggingface/trl/issues/6789).
PACKED_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.25}
WINDOWS = ("sliding_window", "attention_chunk_size")  # as transformers' configurations and layers name them
PROBE_WINDOW = 16  # tokens; most of the probe's texts are longer
LARGEST = 6  # largest single difference, in multiples of the tolerance: 1.5 nats in bfloat16


def choices_path(boot: LearnerBoot) -> Path:
    return Path(boot.checkpoints_dir).parent / CHOICES_FILE


def kept_choices(boot: LearnerBoot) -> Mapping[str, Any]:
    """Return the choices that earlier starts kept, by case."""
    try:
        return read_object(choices_path(boot))
    except (OSError, FileError):  # missing, or damaged: it is measured again
        return {}


def keep_choice(boot: LearnerBoot, case: str, chosen: str) -> None:
    """Keep a choice. A home that cannot be written gives a warning, and the next start measures again."""
    try:
        data = json.dumps({**kept_choices(boot), case: chosen}, indent=1).encode()
        replace_file(choices_path(boot), data, mode=0o600)
    except OSError as error:
        log.warning("what the learner measured is not kept: %s", error)


def load_reference(policy: Policy, boot: LearnerBoot, ranks: Ranks = ALONE) -> Forward:
    """Return a function of a micro-batch: the starting model's log-probs `[M]` of its completion tokens.

    A copy is sharded over `ranks` as `policy` is. Raises ModelError or MachineError if it cannot be loaded.
    """
    if (adapted := policy.adapted) is not None:
        starting = adapted.disable_adapter if policy.source.adapter is None else first_adapter(policy.trainable())

        @torch.no_grad()
        def logprobs(micro_batch: MicroBatch) -> Tensor:
            with starting():
                return policy.logprobs(micro_batch)

        return logprobs
    if isinstance(ranks, RankGroup):
        untrained = msgspec.structs.replace(boot, recompute_activations=False)
        frozen = load_sharded_policy(untrained, ranks, trains=False)
    else:
        causal_lm = load_causal_lm(policy.source, dtype=boot.dtype, device=boot.device)
        frozen = replace(policy, causal_lm=causal_lm)
    frozen.causal_lm.requires_grad_(False)
    attention = policy.causal_lm.config._attn_implementation
    if frozen.causal_lm.config._attn_implementation != attention:  # because it receives the learner's micro-batches
        frozen.causal_lm.set_attn_implementation(attention)
    return torch.no_grad()(frozen.logprobs)


def load_policy(boot: LearnerBoot, ranks: Ranks = ALONE) -> Policy:
    """Return the policy that `boot` describes, untrained, with its log-probs checked and its layout chosen.

    It is sharded if `ranks` are several. Raises ModelError, ConfigError, MachineError or NetworkError, on all ranks.
    """
    spread = partial(load_sharded_policy, boot, ranks) if isinstance(ranks, RankGroup) else None
    policy = load_unchecked(boot) if spread is None else spread()
    with ranks.agreed():
        check_logits(policy)
    case = f"layout, {case_of(policy, boot)}"
    if spread is None and kept_choices(boot).get(case) == PACKED:
        _use_packed_attention(policy)
        return replace(policy, packs=True)
    policy = choose_layout(policy, boot.sampling, ranks=ranks, open_again=spread)
    if spread is None and policy.packs:  # padded rows are tried again: another release may support packed ones
        keep_choice(boot, case, PACKED)
    return policy


def case_of(policy: Policy, boot: LearnerBoot) -> str:
    """Return a name of all that packed rows depend on: the model's configuration, what is trained, and the code."""
    code = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    config = policy.causal_lm.config.to_json_string(use_diff=False).encode()
    digests = [hashlib.sha256(data).hexdigest()[:16] for data in (config, code, str(boot.lora).encode())]
    how = f"{boot.dtype}, {boot.quantize}, {boot.sampling.max_total_tokens} tokens, {policy.causal_lm.device.type}"
    return ", ".join([*digests, how, f"torch {torch.__version__}", f"transformers {transformers.__version__}"])


def _use_packed_attention(policy: Policy) -> None:
    attention.register()
    policy.causal_lm.set_attn_implementation(attention.ATTENTION)


def load_sharded_policy(boot: LearnerBoot, ranks: RankGroup, *, trains: bool = True) -> Policy:
    """Return the policy over `ranks`. Without `trains` it is a frozen copy. Raises as `load_policy` does."""
    with ranks.agreed():
        assert boot.quantize == "none", "refused before"
        source, tokenizer = find_source(boot)
        start = source if boot.lora is None else source.base
        whole = load_causal_lm(start, dtype=boot.dtype, device="cpu").state_dict() if ranks.rank == 0 else {}
        causal_lm = empty_causal_lm(start, dtype=getattr(torch, boot.dtype))
        policy = build_policy(boot, source, tokenizer, causal_lm)
        if not trains:
            causal_lm.requires_grad_(False)
    policy = shard(policy, ranks)
    copy_from_rank_0(own_tensors(policy.causal_lm), whole, ranks)
    return policy


class _Root(nn.Module):
    """The FSDP root unit, with all weights outside of the layers. Its forward runs any work with the model."""

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(self, work: Callable[[Any], Any]) -> Any:
        return work(self.causal_lm)


def shard(policy: Policy, ranks: RankGroup) -> Policy:
    """Return `policy` sharded over the ranks' devices. Parameters on the meta device get memory without values."""
    for parameter in policy.trainable().values():  # whatever its loaded dtype
        parameter.data = parameter.data.float()
    root, mesh = _Root(policy.causal_lm), ranks.mesh()
    precision = MixedPrecisionPolicy()
    if policy.compute_dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=policy.compute_dtype, reduce_dtype=torch.float32)
    for unit in (*decoder_layers(policy.causal_lm), root):
        sharded = fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo supports no other
    names: dict[int, list[str]] = {}
    for name, value in policy.causal_lm.named_parameters(remove_duplicate=False):
        names.setdefault(id(value), []).append(name)
    device = torch.device(mesh.device_type)
    root._apply(  # type: ignore[no-untyped-call]
        lambda value: torch.empty_like(value, device=device) if value.device.type == "meta" else value
    )
    for first, *others in names.values():  # `_apply` unties them
        for other in others:
            module, _, own_name = other.rpartition(".")
            tied = policy.causal_lm.get_parameter(first)
            policy.causal_lm.get_submodule(module)._parameters[own_name] = tied
    return replace(policy, root=root)


def choose_layout(
    policy: Policy, sampling: SamplingSection, *, ranks: Ranks = ALONE, open_again: Callable[[], Policy] | None = None
) -> Policy:
    """Return `policy` with packed rows if they give the results of padded rows, else with padded rows.

    Packed rows fail for a model that is recurrent, has special attention, or ignores positions. All of `ranks` take the
    same decision. After an error in a pass a sharded policy cannot be used, so `open_again` loads it again.
    """
    before = policy.causal_lm.config._attn_implementation
    try:
        problem = _why_not_packed(policy, sampling)
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        problem = first_line(error)
        if open_again is not None:
            policy = open_again()
    if not ranks.any_rank(problem is not None):
        return replace(policy, packs=True)
    log.warning(
        "%s cannot be packed (%s): each completion repeats its prompt. That is %.1f times the positions of packed "
        "rows at this run's limits",
        policy.source.name,
        problem or "another rank reports so",
        padded_share(sampling),
    )
    policy.causal_lm.set_attn_implementation(before)
    return policy


def _why_not_packed(policy: Policy, sampling: SamplingSection) -> str | None:
    """Switch to packed attention. Return how packed rows differ from padded ones, None if they do not. Raises too."""
    if is_recurrent(policy.causal_lm):
        return "it is a recurrent model"
    with short_windows(policy.causal_lm, below=sampling.max_total_tokens):
        expected = probe_values(policy)
        _use_packed_attention(policy)
        found = probe_values(replace(policy, packs=True))
    difference = difference_from(expected, found, dtype=policy.compute_dtype)
    return None if difference is None else f"in packed rows {difference}"


def padded_share(sampling: SamplingSection) -> float:
    """Return the positions of padded rows relative to packed ones, for a group with texts of the largest size."""
    prompt, total, size = sampling.max_prompt_tokens, sampling.max_total_tokens, sampling.group_size
    return size * total / (prompt + size * (total - prompt))


@contextmanager
def short_windows(causal_lm: Any, *, below: int) -> Iterator[None]:
    """Shorten attention windows of less than `below` tokens, which texts of the run cross, so that the probe does."""
    holders = (causal_lm.config.get_text_config(decoder=True), *causal_lm.modules())
    values = [(holder, name, getattr(holder, name, None)) for holder in holders for name in WINDOWS]
    found = [(holder, name, value) for holder, name, value in values if isinstance(value, int) and value < below]
    for holder, name, value in found:
        setattr(holder, name, min(value, PROBE_WINDOW))
    try:
        yield
    finally:
        for holder, name, value in found:
            setattr(holder, name, value)


def difference_from(expected: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor], *, dtype: torch.dtype) -> str | None:
    """Return in words how log-probs `[M]` and a gradient differ by more than rounding; None if they do not."""
    tolerance = PACKED_TOLERANCES[dtype]
    scales = (1.0, 1.0 + float(expected[1].square().mean().sqrt()))
    for what, one, other, scale in zip(("log-probs", "gradient"), found, expected, scales, strict=True):
        errors = (one - other) / scale
        rms, largest = float(errors.square().mean().sqrt()), float(errors.abs().max())
        if not (rms < tolerance and largest < LARGEST * tolerance):
            return f"{what} are off by {rms:.2g} (RMS), {largest:.2g} at most"
    return None


def probe_group(name: str, tokens: NDArray[np.int32], num_prompt: int, lengths: Sequence[int]) -> UnpackedGroup:
    """Return a group whose prompt and completions, of these lengths, consist of `tokens`, with log-probs of 0."""
    answers = [np.resize(np.roll(tokens, length), length) for length in lengths]
    batch = TokenBatch.from_parts(answers, [np.zeros(length) for length in lengths])
    prompt_ids = np.resize(tokens, num_prompt).astype("<i4").tobytes()
    rewards = (0.0,) * len(lengths)
    return UnpackedGroup(TrainGroup(name, name, own=True, body=b"", prompt_ids=prompt_ids, rewards=rewards), batch)


def probe_values(policy: Policy) -> tuple[Tensor, Tensor]:
    """Return log-probs `[M]` of fixed tokens, and the gradient of their mean to the smallest trained tensor.

    That is a norm, a bias or an adapter's matrix, mostly of the first layer, so its gradient depends on all attention.
    """
    ids = np.asarray(probe_token_ids(policy.tokenizer.vocab_size), dtype="<i4")
    # Short and long texts, which fill several buckets, with shared prompts.
    batch = batch_of([probe_group("long", ids, 40, (72, 31)), probe_group("short", ids, 6, (6, 12))])
    (micro_batch,) = policy.micro_batches(batch, MAX_PROBE_TOKENS)
    smallest = min(policy.trainable().values(), key=lambda parameter: parameter.numel())
    logprobs = policy.logprobs(micro_batch)
    if policy.root is None:
        (gradient,) = torch.autograd.grad(logprobs.mean(), smallest)
    else:
        gradient = gradient_of(logprobs.mean(), smallest, policy.trainable().values())
    order = micro_batch.cell_index.argsort()
    return logprobs.detach().float().cpu()[order], gradient.float().cpu()
