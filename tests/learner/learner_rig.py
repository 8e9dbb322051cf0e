"""Helpers of the learner's tests: boots, groups of given or sampled tokens, short steps, and checkpoints."""

import dataclasses
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bench.stubs.random_models import pack_train_group
from ftis_node.config.step import MethodSection, OptimizerSection
from ftis_node.config.workers import LearnerSection, LoraSection
from ftis_node.generation.engines.base import GenerateRequest
from ftis_node.learner.batch import make_micro_batches
from ftis_node.learner.groups import UnpackedGroup, unpack_train_group
from ftis_node.learner.messages import CheckpointInProgress, LearnerBoot, TrainGroup
from ftis_node.learner.model.logprobs import completion_logprobs
from ftis_node.learner.step.train_step import Passes
from ftis_node.records.group import FinishReason, SamplingSettings
from ftis_node.records.token_batch import NO_LOGPROBS, TokenBatch
from ftis_node.workers.weight_store import PublishedWeights, WeightProof

PROMPT = (5, 80, 3)
SMALL = {"num_groups": 2, "group_size": 3, "max_length": 6}  # of `random_groups`
LORA = LoraSection(rank=4, alpha=8)
LENGTHS = {"num_completions": 4, "max_tokens": 12, "eos_ids": frozenset()}
REQUEST = GenerateRequest(prompt_ids=(3, 1, 4, 1, 5), sampling=SamplingSettings(), seed=7, **LENGTHS)
SETTINGS = {*LearnerSection.model_fields} - {"micro_batch_tokens", "recompute_activations"}  # fields of a boot


def check_kind(event):
    assert isinstance(event, PublishedWeights | WeightProof | CheckpointInProgress)


@dataclasses.dataclass
class Emit:
    """A stub of the worker's emitter that calls `on_event` with each event."""

    on_event: Callable[[object], object] = check_kind

    def __call__(self, event):
        self.on_event(event)

    def progress(self):
        pass


def make_boot(model_folder, home, **changes):
    """Return a boot. `changes` are its fields or those of its sections. `learning_rate` sets both rates of a run.

    `method` is the name of the section's method.
    """
    method = {name: changes.pop(name) for name in MethodSection.model_fields if name in changes}
    if "method" in changes:
        method["name"] = changes.pop("method")
    optimizer = {name: changes.pop(name) for name in OptimizerSection.model_fields if name in changes}
    rate = optimizer.get("learning_rate", 1e-3)
    if "num_processes" in changes:
        changes["processes"] = changes.pop("num_processes")
    node = {name: changes.pop(name) for name in SETTINGS if name in changes}
    settings = {
        "model": str(model_folder),
        "model_name": "tiny",
        "run_id": "run-a",
        "checkpoints_dir": str(home / "checkpoints"),
        "weights_dir": str(home / "weights"),
        "settings": LearnerSection(**{"checkpoint_every_steps": 1} | node),
        # A copy is not validated, because tests also use values that a manifest refuses.
        "method": MethodSection().model_copy(update=method),
        "optimizer": OptimizerSection().model_copy(
            update=optimizer | {"learning_rate": rate, "lora_learning_rate": rate}
        ),
        "num_threads": 1,
        "device": "cpu",
    }
    return LearnerBoot(**settings | changes)


def int32(ids):
    return np.asarray(ids, "<i4").tobytes()


def float32(values):
    return np.asarray(values, "<f4").tobytes()


def make_group(completions, rewards, **settings):
    """Return a group as the daemon sends it. Its body has the tokens of `unpacked_group`."""
    return pack_train_group(unpacked_group(completions, rewards, **settings))


def unpacked_group(
    completions,
    rewards,
    *,
    number=0,
    own=True,
    key=None,
    version=0,
    newest=None,
    prompt=PROMPT,
    logprobs=None,
    sender="",
    finish_reasons=(),
):
    """Return a group of the given completions (lists of ids). Behaviour log-probs are -5.5 by default."""
    sent = TrainGroup(
        group_id=f"group-{number}",
        advantage_key=key or f"group-{number}",
        own=own,
        body=b"",
        prompt_ids=int32(prompt),
        rewards=tuple(rewards),
        sender=sender,
    )
    tokens = TokenBatch.from_parts(completions, logprobs or [[-5.5] * len(ids) for ids in completions])
    newest = version if newest is None else newest
    return UnpackedGroup(sent, tokens, version, newest, finish_reasons=tuple(map(FinishReason, finish_reasons)))


def with_tokens(group, **changes):
    """Return the group, packed again with other values of its `TokenBatch`."""
    unpacked = unpack_train_group(group)
    return pack_train_group(dataclasses.replace(unpacked, tokens=dataclasses.replace(unpacked.tokens, **changes)))


def as_text(group, means):
    """Return the group as a peer with another tokenizer sends it: with one mean log-prob per completion."""
    unpacked = unpack_train_group(group)
    tokens = dataclasses.replace(unpacked.tokens, logprobs=NO_LOGPROBS)
    return pack_train_group(dataclasses.replace(unpacked, tokens=tokens, mean_logprobs=tuple(means)))


def random_groups(num_groups=4, group_size=4, *, seed=0, max_length=12, prompt_lengths=(3, 5, 9), distance=0.3):
    """Return ragged groups of random tokens, with rewards 0 or 1 and nearly uniform behaviour log-probs."""
    random = np.random.default_rng(seed)
    groups = []
    for number in range(num_groups):
        lengths = random.integers(1, max_length + 1, group_size)
        completions = [random.integers(0, 300, length).tolist() for length in lengths]
        logprobs = [(-5.7 + distance * random.standard_normal(length)).tolist() for length in lengths]
        rewards = [0.0, 1.0, *random.integers(0, 2, group_size - 2).astype(float).tolist()]
        prompt = random.integers(0, 300, prompt_lengths[number % len(prompt_lengths)]).tolist()
        groups.append(
            make_group(completions, rewards, number=number, own=number % 2 == 0, prompt=prompt, logprobs=logprobs)
        )
    return groups


def one_by_one_logprobs(model, prompt, completion, temperature=1.0):
    """Return the log-probs of a single completion: the reference of packed and padded rows."""
    logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0].float() / temperature
    predicting = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    return predicting.gather(-1, torch.tensor(list(completion))[:, None]).squeeze(-1)


def logprobs_by_row(model, batch, temperature=1.0):
    """Return the log-probs `[N, T]` of single completions; 0 after their ends."""
    pairs = zip(batch.prompts, batch.completions, strict=True)
    rows = [one_by_one_logprobs(model, prompt.tolist(), ids.tolist(), temperature) for prompt, ids in pairs]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def flat_gradient(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def check_gradient(model, batch, objective, **given):
    """Compare loss and gradient by micro-batches of any size with those of one graph; return the metrics."""
    logprobs = logprobs_by_row(model, batch)
    loss, _ = objective.loss(logprobs, batch, objective.advantages(batch), **{"first_pass": None} | given)
    exact = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])
    assert exact.norm() > 1e-3
    for max_tokens in (10_000, 60, 1):
        model.zero_grad()
        micro_batches = make_micro_batches(batch, max_tokens=max_tokens)
        assert (len(micro_batches) == 1) == (max_tokens == 10_000)
        found = Passes(partial(completion_logprobs, model), batch, micro_batches).gradients(objective, **given)
        assert found.refused is None
        assert found.loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
        assert (flat_gradient(model) - exact).norm() < 3e-6 * exact.norm()
    return found.metrics


@torch.no_grad()
def sample_group(model, *, group_size, length, reward, number=0, version=0, seed=0):
    """Sample completions from `model` at temperature 1, and score each with `reward(ids)`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(PROMPT)] * group_size)
    logprobs = []
    for _ in range(length):
        distribution = torch.log_softmax(model(input_ids=tokens).logits[:, -1].float(), dim=-1)
        chosen = torch.multinomial(distribution.exp(), 1, generator=generator)
        logprobs.append(distribution.gather(-1, chosen))
        tokens = torch.cat([tokens, chosen], dim=1)
    completions = tokens[:, len(PROMPT) :].tolist()
    rewards, sampled = [reward(ids) for ids in completions], torch.cat(logprobs, dim=1).tolist()
    return make_group(completions, rewards, number=number, version=version, logprobs=sampled)


def train_steps(learner, *steps):
    """Train small steps of these numbers, and return the learner."""
    for step in steps:
        learner.train(random_groups(seed=step, **SMALL), step=step)
    return learner


def without_times(report):
    """Return a report without the fields that depend on the clock."""
    return msgspec.structs.replace(report, duration_s=0.0, tokens_per_s=0.0)


def checkpoint_tensors(home, *, step):
    """Return all tensors of a checkpoint, by file and name."""
    folder = home / "checkpoints" / f"step-{step:08d}"
    return {
        f"{file}.{name}": value
        for file in ("weights", "optimizer")
        for name, value in load_file(folder / f"{file}.safetensors").items()
    }
