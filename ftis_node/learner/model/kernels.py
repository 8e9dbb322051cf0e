"""Kernels for the elementwise operations of a decoder layer (`learner.kernels`).

    plain     operation by operation, as transformers writes them
    compile   torch.compile, one decoder layer at a time: norms, rotary embeddings and gated blocks become few kernels
    auto      compile on a GPU; plain on a CPU, because compilation takes half a minute

With attention by one kernel (`varlen.py`) a layer is one graph. Attention in buckets is excluded from compilation, and
divides the layer.

Compiled layers must give the log-probs and the gradient of plain ones, up to rounding (`policy_loading.py`). If they do
not, they are not used, with a warning that gives the cause.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from ftis_node.errors import ConfigError, first_line
from ftis_node.learner.messages import LearnerBoot
from ftis_node.learner.model import attention, varlen
from ftis_node.learner.model.policy import Policy, decoder_layers
from ftis_node.learner.model.policy_loading import difference_from, probe_values

log = logging.getLogger(__name__)


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
    """Return `policy` with the kernels that `boot` sets, or with plain ones if compiled ones fail or are wrong."""
    kernels = boot.settings.kernels
    if kernels == "plain" or boot.measures_agreement or policy.root is not None:
        return policy
    if kernels == "auto" and policy.causal_lm.device.type == "cpu":
        return policy
    if (problem := _why_not_compiled(policy)) is not None:
        undo_compilation(policy.causal_lm)
        log.warning("kernels: plain, because compile cannot be used: %s", problem)
        return policy
    torch._dynamo.config.suppress_errors = True  # a later shape that cannot be compiled runs uncompiled
    log.info("kernels: compile")
    return replace(policy, kernels="compile")


def _why_not_compiled(policy: Policy) -> str | None:
    """Compile the layers. Return why they cannot be used, None if they can."""
    expected = probe_values(policy)
    try:
        compile_layers(policy.causal_lm)
        return difference_from(expected, probe_values(policy), dtype=policy.compute_dtype)
    except Exception as error:  # a compiler, or another version of a package, may raise anything
        return f"{type(error).__name__}: {first_line(error)}"


def compile_layers(causal_lm: Any, *, backend: str = "inductor") -> None:
    """Compile each decoder layer at its first run."""
    layers = decoder_layers(causal_lm)
    if not layers:
        raise ValueError("its layers are none of transformers' own")
    if not _is_one_graph(causal_lm):
        # Each micro-batch has other buckets: compiled, each would be a separate program.
        attention.register(torch.compiler.disable(attention.attend))  # type: ignore[no-untyped-call]
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)


def undo_compilation(causal_lm: Any) -> None:
    attention.register()
    for layer in decoder_layers(causal_lm):
        layer._compiled_call_impl = None


def _is_one_graph(causal_lm: Any) -> bool:
    """Return whether attention is one operation of a layer's graph."""
    config = causal_lm.config.get_text_config(decoder=True)
    is_capped = getattr(config, "attn_logit_softcapping", None) is not None
    return varlen.is_available(causal_lm.device) and causal_lm.dtype in varlen.DTYPES and not is_capped
