"""Kernels for the elementwise operations of a decoder layer (`learner.kernels`).

    plain     operation by operation, as transformers writes them
    compile   torch.compile, one decoder layer at a time; packed attention is excluded from compilation
    liger     Triton kernels for RMSNorm and rotary angles, from the package liger-kernel if installed; the
              feed-forward block stays that of `policy.py`, which saves less
    auto      on a GPU the fastest of these, measured; on a CPU plain, because compilation takes half a minute

The chosen kernels must give the log-probs and the gradient of plain kernels, up to rounding (`policy_loading.py`).
Kernels that do not are skipped with a warning that gives the cause.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from ftis_node.errors import ConfigError, first_line
from ftis_node.learner.batch import MicroBatch, batch_of
from ftis_node.learner.messages import LearnerBoot
from ftis_node.learner.model import attention
from ftis_node.learner.model.logprobs import decode
from ftis_node.learner.model.policy import Policy, decoder_layers
from ftis_node.learner.model.policy_loading import difference_from, probe_group, probe_values
from ftis_node.learner.step.oom_retry import one_out_of_memory_error

log = logging.getLogger(__name__)

REPETITIONS = 5
LIMIT_S = 10.0  # after this time no pass is repeated
GAIN = 1.03  # minimum speed-up over plain: less is noise
MORE_MEMORY = 1.02  # largest peak relative to plain's that the memory plan tolerates
PROMPT_TOKENS, COMPLETION_TOKENS, GROUP_SIZE = 128, 384, 12  # of the measured texts


@dataclass(frozen=True, slots=True)
class KernelMeasurement:
    """The cost of a forward and a backward pass of one layer; `peak_bytes` is in addition to the model."""

    seconds: float
    peak_bytes: int


def check_kernels(boot: LearnerBoot) -> None:
    """Raise ConfigError for kernels that this learner does not support."""
    if boot.settings.kernels in ("compile", "liger") and boot.settings.num_ranks > 1:
        raise ConfigError(
            f"learner.kernels = '{boot.settings.kernels}' is for a learner of one process: use 'auto', or leave "
            "learner.gpus and learner.processes out"
        )
    if boot.settings.kernels == "compile" and boot.measures_agreement:
        raise ConfigError(
            "learner.kernels = 'compile' skips the hooks of method.peer_weights = \"agreement\": use 'plain'"
        )


def choose_kernels(policy: Policy, boot: LearnerBoot) -> Policy:
    """Return `policy` with the kernels that `boot` sets, or with the fastest correct ones."""
    if boot.settings.kernels == "plain" or boot.measures_agreement or policy.root is not None:
        return policy
    if boot.settings.kernels != "auto":
        with _switched(policy, boot.settings.kernels) as problem:
            pass
        if problem is not None:
            log.warning("kernels: plain, because %s cannot be used: %s", boot.settings.kernels, problem)
            return policy
        log.info("kernels: %s, as set", boot.settings.kernels)
        return _with_kernels(policy, boot.settings.kernels)
    if policy.causal_lm.device.type == "cpu":
        return policy
    return _fastest(policy, boot)


def _fastest(policy: Policy, boot: LearnerBoot) -> Policy:
    micro_batch = _micro_batch(policy, boot.micro_batch_tokens)
    plain = measure(policy, micro_batch)
    words, best, best_s = [f"plain {1e3 * plain.seconds:.1f} ms"], "plain", plain.seconds / GAIN
    for name in ("compile", *(["liger"] if find_spec("liger_kernel") else [])):
        with _switched(policy, name) as problem:
            if problem is None:
                found = measure(policy, micro_batch)
                if found.peak_bytes > MORE_MEMORY * plain.peak_bytes:
                    problem = f"a layer takes {found.peak_bytes / plain.peak_bytes:.2f} times the memory"
                words.append(f"{name} {1e3 * found.seconds:.1f} ms")
                if problem is None and found.seconds < best_s:
                    best, best_s = name, found.seconds
        if problem is not None:
            log.warning("kernels: %s is skipped: %s", name, problem)
    log.info("kernels: %s; a layer of %d tokens: %s", best, micro_batch.token_ids.numel(), ", ".join(words))
    return policy if best == "plain" else _with_kernels(policy, best)


def _with_kernels(policy: Policy, name: str) -> Policy:
    SWITCHES[name](policy.causal_lm)
    if name == "compile":  # a later shape that cannot be compiled runs uncompiled
        torch._dynamo.config.suppress_errors = True
    return replace(policy, kernels=name)


@contextmanager
def _switched(policy: Policy, name: str) -> Iterator[str | None]:
    """Switch these kernels on inside the block. Yields why they cannot be used, or None."""
    expected = probe_values(policy)
    undo: Callable[[], None] | None = None
    try:
        undo = SWITCHES[name](policy.causal_lm)
        problem = difference_from(expected, probe_values(policy), dtype=policy.compute_dtype)
    except Exception as error:  # a compiler, or another version of a package, may raise anything
        problem = f"{type(error).__name__}: {first_line(error)}"
    try:
        yield problem
    finally:
        if undo is not None:
            undo()


def compile_layers(causal_lm: Any) -> Callable[[], None]:
    """Compile each decoder layer at its first run. Returns the undo function."""
    layers = decoder_layers(causal_lm)
    if not layers:
        raise ValueError("its layers are none of transformers' own")
    # Each micro-batch has another plan: compiled, each would be a separate program.
    attention.register(torch.compiler.disable(attention.attend))  # type: ignore[no-untyped-call]
    for layer in layers:
        layer.compile(dynamic=True)

    def undo() -> None:
        attention.register()
        for layer in layers:
            layer._compiled_call_impl = None

    return undo


def use_liger(causal_lm: Any) -> Callable[[], None]:
    """Compute norms and rotary angles by Liger's kernels. Returns the undo function. Raises ImportError."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    code = sys.modules[type(causal_lm).__module__].__dict__
    names, forwards = dict(code), [(module, module.__dict__.get("forward")) for module in causal_lm.modules()]

    def undo() -> None:
        code.update(names)
        for module, forward in forwards:
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward

    _apply_liger_kernel_to_instance(
        model=causal_lm, rope=True, rms_norm=True, swiglu=False, cross_entropy=False, fused_linear_cross_entropy=False
    )
    return undo


SWITCHES = {"compile": compile_layers, "liger": use_liger}


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
