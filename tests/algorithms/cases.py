"""Ragged and extreme inputs, and the comparison of `policy_loss` with the reference on them.

Hypothesis chooses the shape of a case and a seed. The numbers come from the seed, so no case is exactly on a bound,
where rounding of the last digit would decide.
"""

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from ftis_node.algorithms import policy_loss
from ftis_node.algorithms.methods import method_parameters
from ftis_node.algorithms.settings import TENSORS

from .reference import FILTERED, KL_ESTIMATORS, reference_loss

LOG_RATIO_REGIMES = ("same", "near", "far", "mixed", "beyond_clamp")
PADDING = (0.0, 5.0, -1e30, math.nan, math.inf, -math.inf)


@dataclass(frozen=True)
class Case:
    """Inputs as plain lists, with values of `PADDING` outside the mask."""

    lp: list[list[float]]
    lg: list[list[float]]
    mask: list[list[bool]]
    advantages: list[float]
    group_ids: list[int]
    first_pass: list[list[float]]
    sender_ids: list[int]

    def tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {
            "learner_logprobs": torch.tensor(self.lp, dtype=dtype).requires_grad_(),
            "behaviour_logprobs": torch.tensor(self.lg, dtype=dtype),
            "mask": torch.tensor(self.mask, dtype=torch.bool),
            "advantages": torch.tensor(self.advantages, dtype=dtype),
            "group_ids": torch.tensor(self.group_ids),
        }


def log_ratio(generator: random.Random, regime: str) -> float:
    if regime == "mixed":
        regime = generator.choice(("same", "near", "far", "far"))
    if regime == "same":
        return 0.0
    if regime == "beyond_clamp":
        return generator.choice((-1, 1)) * generator.uniform(15, 40)
    return generator.uniform(-0.4, 0.4) if regime == "near" else generator.uniform(-12, 12)


def make_case(seed: int, num_completions: int, num_columns: int, regime: str) -> Case:
    """Return a case. Rows without tokens, masks with holes, scattered group ids and zero advantages occur."""
    generator = random.Random(seed)
    density = generator.choice((0.2, 0.7, 1.0))
    ids = [generator.randrange(-9, 10**6) for _ in range(max(1, num_completions // 2))]
    mask = [[generator.random() < density for _ in range(num_columns)] for _ in range(num_completions)]
    lp, lg, first_pass = [], [], []
    for marks in mask:
        behaviour = [generator.uniform(-8, 0) for _ in marks]
        learner = [value + log_ratio(generator, regime) for value in behaviour]
        reach = 30.0 if regime == "beyond_clamp" else 0.5
        first = [value + generator.choice((0.0, generator.uniform(-reach, reach))) for value in learner]
        for values, rows in ((learner, lp), (behaviour, lg), (first, first_pass)):
            padded = [v if inside else generator.choice(PADDING) for v, inside in zip(values, marks, strict=True)]
            rows.append(padded)
    advantages = [generator.choice((0.0, generator.gauss(0, 1), generator.gauss(0, 1))) for _ in mask]
    group_ids = [generator.choice(ids) for _ in mask]
    senders = [0, *(generator.randrange(-9, 10**6) for _ in range(max(1, num_completions // 3)))]
    return Case(lp, lg, mask, advantages, group_ids, first_pass, [generator.choice(senders) for _ in mask])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return make_case(
        seed=draw(st.integers(0, 2**32)),
        num_completions=draw(st.integers(1, 7)),
        num_columns=draw(st.integers(0, 6)),
        regime=draw(st.sampled_from(LOG_RATIO_REGIMES)),
    )


CHOICES: dict[str, tuple[Any, ...]] = {
    "cap": (0.7, 1.3, 5.0, math.inf), "kl_estimator": KL_ESTIMATORS, "eps_low": (0.003, 0.11, 1.0),
    "eps_high": (0.003, 0.37, math.inf), "denominator": ("all", "kept"), "agg": ("seq_mean", "token_mean", "max_len"),
}  # fmt: skip

FLOORS = (0.1, 0.7)
METHOD_CHOICES: dict[str, dict[str, tuple[Any, ...]]] = {
    "gepo": {"clip": (True, False), "alpha": (0.1, 0.5, 1.0), "k3_beta": (0.005, 1.0)},
    "mis": {"mis_low": (0.0, 0.9), "mis_high": (1.1, math.inf), "mis_level": ("token", "seq_mean", "seq_sum")},
    "gspo": {"old_logprobs": ("engine", "learner")},
    "gspo_token": {"old_logprobs": ("engine", "learner")},
    "hacpo": {"old_logprobs": ("engine", "learner"), "foreign_clip": (0.0, 0.61, 1.0), "ratio_power": (0.0, 0.5, 3.0)},
    "soft_adaptive": {"tau_pos": (0.3, 4.0), "tau_neg": (0.7, 9.0)},
    "m2po": {"m2_threshold": (0.001, 5.1, math.inf)},
    "topr": {"topr_level": ("seq_mean", "seq_sum", "token")},
    "tis": {"floor": FLOORS},
    **{
        method: {
            "kl_threshold": (0.0, 0.003, 0.31, 4.9, math.inf),
            "filter": ("quantile", "ess", "obrs", "positives"),
            "obrs_lambda": (0.3, 2.7),
            "keep_share": (0.0, 0.29, 0.61, 1.0),
            "rank_own": (True, False),
        }
        | ({"floor": FLOORS} if method == "ftis" else {})
        for method in FILTERED
        if method != "accepted"
    },
}


def make_parameters(seed: int, method: str) -> dict[str, Any]:
    """Return parameters of a method, each with probability 1/2. A tensor is `True`, which `check_case` replaces."""
    generator = random.Random(seed)
    given: dict[str, Any] = {"max_completion_length": generator.randint(1, 9)}
    for name, values in (CHOICES | METHOD_CHOICES.get(method, {})).items():
        if generator.random() < 0.5:
            given[name] = generator.choice(values)
    for name in TENSORS:
        if name in method_parameters(method) and generator.random() < 0.5:
            given[name] = True
    return given


def check_case(method: str, case: Case, dtype: torch.dtype, params: dict[str, Any]) -> None:
    """Check that value, gradient and metrics equal those of the reference, and that padding has zero gradient."""
    tensors = case.tensors(dtype)
    reference_params = dict(params)
    if params.get("sender_ids"):
        params = params | {"sender_ids": torch.tensor(case.sender_ids)}
        reference_params["sender_ids"] = case.sender_ids
    if params.get("first_pass_logprobs"):
        first_pass = torch.tensor(case.first_pass, dtype=dtype)
        params = params | {"first_pass_logprobs": first_pass}
        reference_params["first_pass_logprobs"] = first_pass.double().tolist()
    # The reference reads the numbers back from the tensors, so both see the same rounding to float32.
    as_lists = {name: value.detach().double().tolist() for name, value in tensors.items() if value.is_floating_point()}
    expected = reference_loss(
        method,
        as_lists["learner_logprobs"],
        as_lists["behaviour_logprobs"],
        case.mask,
        as_lists["advantages"],
        case.group_ids,
        **reference_params,
    )
    loss, metrics = policy_loss(method, **tensors, **params)
    loss.backward()

    digits = 1e-10 if dtype == torch.float64 else 1e-6
    assert loss.shape == () and loss.dtype == dtype
    assert math.isclose(loss.item(), expected.loss, rel_tol=digits, abs_tol=digits * expected.magnitude)
    gradient = tensors["learner_logprobs"].grad
    assert gradient is not None
    expected_gradient = torch.tensor(expected.gradient, dtype=dtype)
    torch.testing.assert_close(gradient, expected_gradient, rtol=digits, atol=0)
    assert torch.all(gradient[~tensors["mask"]] == 0)
    assert metrics.keys() == {"kept_fraction", "truncated_fraction", "mean_kl"}
    for name, value in metrics.items():
        assert isinstance(value, float)
        assert math.isclose(value, getattr(expected, name), rel_tol=1e-9, abs_tol=1e-9), name
