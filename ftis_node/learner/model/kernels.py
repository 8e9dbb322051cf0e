"""Kernels for the elementwise operations of a decoder layer (`learner.kernels`).

    plain     operation by operation, as transformers writes them
    compile   torch.compile, one decoder layer at a time: norms, rotary embeddings and gated blocks become few kernels
    auto      on a GPU the faster of these, measured once; on a CPU plain, because compilation takes half a minute

With attention by one kernel (`varlen.py`) a layer is one graph. Attention in buckets is excluded from compilation, and
divides the layer. `auto` keeps its choice in the home, for each model, card and version of code and torch. A start that
measures takes a minute more, and needs memory while the engine reserves its own.

Compiled layers must give the log-probs and the gradient of plain ones, up to rounding (`policy_loading.py`). If they do
not, they are skipped with a warning that gives the cause.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ftis_node.errors import ConfigError, first_line
from ftis_node.learner.batch import MicroBatch, batch_of
from ftis_node.learner.messages import LearnerBoot
from ftis_node.learner.model import attention, varlen
from ftis_node.learner.model.activations import decoder_layers
from ftis_node.learner.model.logprobs import decode
from ftis_node.learner.model.policy import Policy
from ftis_node.learner.model.policy_loading import (
    case_of,
    choices_path,
    difference_from,
    keep_choice,
    kept_choices,
    probe_group,
    probe_values,
)
from ftis_node.learner.step.train_step import one_out_of_memory_error

log = logging.getLogger(__name__)

REPETITIONS = 5
LIMIT_S = 10.0  # after this time no pass is repeated
GAIN = 1.03  # minimum speed-up over plain: less is noise
MORE_MEMORY = 1.02  # largest peak relative to plain's that the memory plan tolerates
PROMPT_TOKENS, COMPLETION_TOKENS, GROUP_SIZE = 128, 384, 12  # of the measured texts


class KernelMeasurement(NamedTuple):
    """The cost of a forward and a backward pass of one layer; `peak_bytes` is in addition to the model."""

    seconds: float
    peak_bytes: int


def check_kernels(boot: LearnerBoot) -> None:
    """Raise ConfigError for kernels that this learner does not support."""
    if boot.settings.kernels != "compile":
        return
    if boot.settings.num_ranks > 1:
        raise ConfigError(
            "learner.kernels = 'compile' is for a learner of one process: use 'auto', or leave learner.gpus and "
            "learner.processes out"
        )
    if boot.measures_agreement:
        raise ConfigError("learner.kernels = 'compile' skips the hooks of method.peer_weights: use 'plain'")


def choose_kernels(policy: Policy, boot: LearnerBoot) -> Policy:
    """Return `policy` with the kernels that `boot` sets, or with the faster correct ones."""
    if boot.settings.kernels == "plain" or boot.measures_agreement or policy.root is not None:
        return policy
    is_set = boot.settings.kernels == "compile"
    if not is_set and policy.causal_lm.device.type == "cpu":
        return policy
    kept = "compile" if is_set else kept_choices(boot).get(_case(policy, boot))
    reason = "as set" if is_set else f"as measured: {choices_path(boot)}"
    if kept not in ("plain", "compile"):
        if not _is_faster(policy, boot):
            return policy
    elif kept == "plain":
        log.info("kernels: plain, %s", reason)
        return policy
    else:
        with _compiled(policy) as problem:
            pass
        if problem is not None:
            log.warning("kernels: plain, because compile cannot be used: %s", problem)
            return policy
        log.info("kernels: compile, %s", reason)
    compile_layers(policy.causal_lm)
    torch._dynamo.config.suppress_errors = True  # a later shape that cannot be compiled runs uncompiled
    return replace(policy, kernels="compile")


def _case(policy: Policy, boot: LearnerBoot) -> str:
    """Return a name of all that a layer's speed depends on: the case, the card and the size of a micro-batch."""
    card = torch.cuda.get_device_name(policy.causal_lm.device)
    return f"kernels, {case_of(policy, boot)}, {card}, {boot.micro_batch_tokens} positions"


def _is_faster(policy: Policy, boot: LearnerBoot) -> bool:
    """Measure plain and compiled kernels. Return whether compiled ones are correct, faster, and in the memory plan.

    Keeps the choice, unless compiled ones fail or are wrong, or memory runs out: that may change.
    """
    micro_batch = _micro_batch(policy, boot.micro_batch_tokens)
    plain = measure(policy, micro_batch)
    compiled = plain
    with _compiled(policy) as problem:
        if problem is None:
            try:
                compiled = measure(policy, micro_batch)
            except Exception as error:  # a compiler may fail at this size alone
                problem = f"{type(error).__name__}: {first_line(error)}"
    if problem is None and sys.maxsize in (plain.peak_bytes, compiled.peak_bytes):
        problem = "a layer ran out of memory"
    if problem is not None:
        log.warning("kernels: compile is skipped: %s", problem)
        return False
    more = compiled.peak_bytes / max(1, plain.peak_bytes)
    is_faster = compiled.seconds * GAIN < plain.seconds and more <= MORE_MEMORY
    chosen = "compile" if is_faster else "plain"
    keep_choice(boot, _case(policy, boot), chosen)
    log.info(
        "kernels: %s; a layer of %d tokens: plain %.1f ms, compile %.1f ms and %.2f times the memory",
        chosen,
        micro_batch.token_ids.numel(),
        1e3 * plain.seconds,
        1e3 * compiled.seconds,
        more,
    )
    return is_faster


@contextmanager
def _compiled(policy: Policy) -> Iterator[str | None]:
    """Compile the layers inside the block. Yields why they cannot be used, or None."""
    expected = probe_values(policy)
    undo: Callable[[], None] | None = None
    try:
        undo = compile_layers(policy.causal_lm)
        problem = difference_from(expected, probe_values(policy), dtype=policy.compute_dtype)
    except Exception as error:  # a compiler, or another version of a package, may raise anything
        problem = f"{type(error).__name__}: {first_line(error)}"
    try:
        yield problem
    finally:
        if undo is not None:
            undo()


def compile_layers(causal_lm: Any, *, backend: str = "inductor") -> Callable[[], None]:
    """Compile each decoder layer at its first run. Returns the undo function."""
    layers = decoder_layers(causal_lm)
    if not layers:
        raise ValueError("its layers are none of transformers' own")
    if not _is_one_graph(causal_lm):
        # Each micro-batch has other buckets: compiled, each would be a separate program.
        attention.register(torch.compiler.disable(attention.attend))  # type: ignore[no-untyped-call]
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)

    def undo() -> None:
        attention.register()
        for layer in layers:
            layer._compiled_call_impl = None

    return undo


def _is_one_graph(causal_lm: Any) -> bool:
    """Return whether attention is one operation of a layer's graph."""
    config = causal_lm.config.get_text_config(decoder=True)
    is_capped = getattr(config, "attn_logit_softcapping", None) is not None
    return varlen.is_available(causal_lm.device) and causal_lm.dtype in varlen.DTYPES and not is_capped


def measure(policy: Policy, micro_batch: MicroBatch) -> KernelMeasurement:
    """Measure a forward and backward pass of the first layer: the median of a few passes after one warm-up.

    The peak memory is that of a GPU; 0 on a CPU.
    """
    decoder = policy.causal_lm.get_decoder()
    all_layers, on_gpu = decoder.layers, policy.causal_lm.device.type == "cuda"
    decoder.layers = all_layers[:1]
    trainable = [value for value in decoder.layers.parameters() if value.requires_grad]

    def once() -> None:
        with torch.enable_grad():
            hidden = decode(policy.causal_lm, micro_batch)
            torch.autograd.grad(hidden.float().square().mean(), trainable)

    before = 0
    try:
        with one_out_of_memory_error():
            once()
            gc.collect()
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            seconds: list[float] = []
            while len(seconds) < REPETITIONS and sum(seconds) < LIMIT_S:
                began = time.perf_counter()
                once()
                if on_gpu:
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
    except torch.OutOfMemoryError:
        return KernelMeasurement(float("inf"), sys.maxsize)
    finally:
        decoder.layers = all_layers
    return KernelMeasurement(float(np.median(seconds)), torch.cuda.max_memory_allocated() - before if on_gpu else 0)


def _micro_batch(policy: Policy, num_tokens: int) -> MicroBatch:
    """Return a micro-batch in the policy's layout, with about as many positions as the memory plan allows."""
    ids = np.random.default_rng(0).integers(0, policy.tokenizer.vocab_size, PROMPT_TOKENS + COMPLETION_TOKENS)
    num_groups = max(1, round(num_tokens / (PROMPT_TOKENS + GROUP_SIZE * COMPLETION_TOKENS)))
    groups = [
        probe_group(str(number), ids.astype("<i4"), PROMPT_TOKENS, (COMPLETION_TOKENS,) * GROUP_SIZE)
        for number in range(num_groups)
    ]
    return max(policy.micro_batches(batch_of(groups), num_tokens), key=lambda made: made.token_ids.numel())
