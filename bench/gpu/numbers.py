"""`attention`: the tests of attention over packed texts. `parity`: the numeric differences of the learner's kernels.

They are the differences of log-probs and gradients from each other and from float32, for logits of a real model's size.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ftis_node.config.manifest import load_manifest
from ftis_node.learner.batch import make_batch, make_micro_batches, make_packed_micro_batches
from ftis_node.learner.model import attention
from ftis_node.learner.model.policy import Policy
from ftis_node.learner.model.policy_loading import choose_layout
from gpu.cases import Options
from gpu.device import INITIALIZER_RANGE, load_policy, scale_logits
from learner_sides.batch import even_groups, with_flat_logprobs

ROOT = Path(__file__).parents[2]
ATTENTION_TESTS = "tests/learner/model/test_learner_attention.py"
COMPLETIONS = (20, 40, 90, 150, 200, 260)
SMALL_COMPLETIONS = (6, 12, 20)
PROMPT_TOKENS = 96
VOCABULARY = 5000  # only ids below it
SEEDS, SMALL_SEEDS = 20, 3
FLOAT32 = "float32, rows"


def attention_tests(options: Options) -> dict[str, Any]:
    """Run the tests. On a GPU the test that needs it must run; on the CPU the others run."""
    chosen = "gpu" if options.device == "cuda" else "not gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", ATTENTION_TESTS, "-k", chosen]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    passed = re.search(r"(\d+) passed", done.stdout)
    if done.returncode or passed is None:
        raise RuntimeError(f"pytest ended with code {done.returncode}: {done.stdout[-1500:]}")
    return {"passed": int(passed[1])}


def parity(options: Options, *, shape: str) -> dict[str, Any]:
    """Compare packed rows and padded rows with float32 and with each other."""
    groups = even_groups(
        num_groups=2,
        completion_tokens=SMALL_COMPLETIONS if options.small else COMPLETIONS,
        prompt_tokens=PROMPT_TOKENS,
        vocab_size=VOCABULARY,
    )
    batch = make_batch(with_flat_logprobs(groups, VOCABULARY))
    rows = make_micro_batches(batch, max_tokens=1 << 20)
    packed = make_packed_micro_batches(batch, max_tokens=1 << 20)
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for dtype in ("float32", "bfloat16"):
        policy = _policy(options, shape, dtype)
        found[f"{dtype}, rows"] = _values_and_gradient(policy, rows)
        if dtype == "bfloat16":
            attention.register()
            policy.causal_lm.set_attn_implementation(attention.ATTENTION)
            found["packed"] = _values_and_gradient(replace(policy, packs=True), packed)
        del policy
        if options.device == "cuda":
            torch.cuda.empty_cache()
    pairs = [(name, FLOAT32) for name in found if name != FLOAT32] + [("packed", "bfloat16, rows")]
    compared = {f"{one} / {other}": _compared(found[one], found[other]) for one, other in pairs}
    own = compared["packed / bfloat16, rows"]
    return {
        "probe_max": own["max"],
        "probe_rms": own["rms"],
        "num_tokens": len(found[FLOAT32][0]),
        "pairs": compared,
    }


def layouts(options: Options, *, shape: str) -> dict[str, Any]:
    """Return the layouts that `choose_layout` chooses, with different weights each time."""
    policy = _policy(options, shape, "bfloat16")
    taken: dict[str, int] = {}
    implementation = policy.causal_lm.config._attn_implementation
    for seed in range(SMALL_SEEDS if options.small else SEEDS):
        torch.manual_seed(seed)
        with torch.no_grad():
            for value in policy.causal_lm.parameters():
                if value.dim() > 1:
                    value.normal_(0.0, INITIALIZER_RANGE)
        policy.causal_lm.set_attn_implementation(implementation)
        layout = choose_layout(policy, load_manifest("gsm8k-ftis").sampling).layout
        taken[layout] = taken.get(layout, 0) + 1
    return {"layouts": taken}


def _policy(options: Options, shape: str, dtype: Any) -> Policy:
    policy = load_policy(options, shape, dtype=dtype)
    scale_logits(policy.causal_lm, shape)
    return policy


def _values_and_gradient(policy: Policy, micro_batches: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs in the batch's order, and the gradient of their mean by an early, a late and a wide weight."""
    (micro_batch,) = micro_batches
    names = policy.trainable()
    last = max(int(name.split(".")[2]) for name in names if name.startswith("model.layers."))
    chosen = [
        names[f"model.layers.{number}.{rest}.weight"]
        for number, rest in ((0, "self_attn.q_proj"), (last // 2, "mlp.gate_proj"), (last, "self_attn.o_proj"))
    ]
    logprobs = policy.logprobs(micro_batch)
    gradients = torch.autograd.grad(logprobs.mean(), chosen)
    flat = torch.cat([gradient.flatten().float() for gradient in gradients])
    return logprobs.detach().float().cpu()[micro_batch.cell_index.argsort()], flat.cpu()


def _compared(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    errors = (one[0] - other[0]).abs()
    return {
        "max": round(float(errors.max()), 5),
        "p99": round(float(errors.quantile(0.99)), 5),
        "rms": round(float(errors.square().mean().sqrt()), 5),
        "gradient_cosine": round(float(torch.cosine_similarity(one[1].double(), other[1].double(), dim=0)), 5),
    }
