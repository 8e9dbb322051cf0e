"""Write `golden.json`: a fixed batch, and each method's loss, gradient norm and metrics on it.

The numbers come from the plain Python reference, not from the code under test. Run it again only after an intended
change of a formula, and read the difference:

    python -m tests.algorithms.make_golden
"""

import json
import math
from pathlib import Path
from typing import Any

from .reference import METHOD_DEFAULTS, reference_loss

GOLDEN = Path(__file__).with_name("golden.json")

# Two groups of three completions. The second is foreign and far; its last completion has one token.
BATCH: dict[str, Any] = {
    "lp": [
        [-0.11, -1.32, -0.05, -2.4],
        [-0.62, -0.9, -3.1, 0.0],
        [-0.33, -0.01, -0.75, -0.48],
        [-2.9, -7.5, -0.2, -6.1],
        [-1.4, -0.8, -5.2, -3.3],
        [-4.6, 0.0, 0.0, 0.0],
    ],
    "lg": [
        [-0.1, -1.5, -0.05, -2.1],
        [-0.7, -0.85, -3.0, 0.0],
        [-0.3, -0.02, -0.7, -0.5],
        [-0.4, -0.3, -0.9, -0.1],
        [-0.2, -2.6, -0.1, -1.0],
        [-0.6, 0.0, 0.0, 0.0],
    ],
    "mask": [[True] * 4, [True] * 3 + [False], [True] * 4, [True] * 4, [True] * 4, [True] + [False] * 3],
    "advantages": [0.9, -1.1, 0.4, -0.6, 1.4, -0.55],
    "group_ids": [4, 4, 4, 9, 9, 9],
}

# The learner at the first pass. The log-probs have moved by up to 0.9 since then. Entries that use it hold `True`.
FIRST_PASS = [
    [-0.21, -1.32, -0.06, -2.2],
    [-0.52, -1.0, -3.5, 0.0],
    [-0.33, -0.02, -0.65, -0.5],
    [-2.8, -7.4, -0.9, -6.2],
    [-1.2, -1.7, -5.1, -3.4],
    [-4.9, 0.0, 0.0, 0.0],
]

SENDERS = [0, 0, 0, 7, 7, 7]  # of entries whose `sender_ids` is `True`

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "tis": [{"floor": 0.5}],
    "ftis": [
        {"kl_estimator": "rkl_iw", "kl_threshold": 0.1, "denominator": "kept"},
        {"kl_threshold": 5.0},
        {"filter": "quantile", "keep_share": 0.5, "floor": 0.25},
        {"filter": "ess"},
        {"filter": "obrs", "obrs_lambda": 1.5},
    ],
    "accepted": [{"sender_ids": True}],
    "dr_grpo": [{"max_completion_length": 12}],
    "gspo": [{"eps_low": 0.2, "eps_high": 0.28}, {"old_logprobs": "learner", "sender_ids": True}],
    "mis": [{"mis_level": "seq_mean"}, {"mis_level": "seq_sum"}],
    "hacpo": [{"sender_ids": True}, {"sender_ids": True, "foreign_clip": 1.0, "ratio_power": 2.0}],
    "soft_adaptive": [{"tau_pos": 2.0, "tau_neg": 3.0}],
    "gepo": [{"clip": False, "alpha": 0.1, "k3_beta": 0.005}],
    "topr": [{"topr_level": "seq_sum"}, {"topr_level": "token"}],
    "m2po": [{"m2_threshold": 1.0}],
}


def entries() -> list[dict[str, Any]]:
    made = []
    for method in METHOD_DEFAULTS:
        variants = VARIANTS.get(method, [])
        first, *others = variants if method == "dr_grpo" else [{}, *variants]
        for params in [first, *others, first | {"first_pass_logprobs": True}]:
            tensors = {"first_pass_logprobs": FIRST_PASS, "sender_ids": SENDERS}
            given = {name: tensors.get(name, value) for name, value in params.items()}
            result = reference_loss(method, **BATCH, **given)
            norm = math.sqrt(sum(slope * slope for row in result.gradient for slope in row))
            metrics = {name: getattr(result, name) for name in ("kept_fraction", "truncated_fraction", "mean_kl")}
            made.append({"method": method, "params": params, "loss": result.loss, "gradient_norm": norm, **metrics})
    return made


if __name__ == "__main__":
    GOLDEN.write_text(
        json.dumps({"batch": BATCH, "first_pass": FIRST_PASS, "senders": SENDERS, "entries": entries()}, indent=1)
        + "\n"
    )
