"""An independent reference: every loss and its gradient in plain Python floats and loops, from the formulas.

It shares no code with `ftis_node.algorithms`. The derivatives with respect to each log-prob are written by hand. So a
gradient is compared with mathematics, not with another use of autograd.

`objective` returns, for one token, the maximized value and its derivative with respect to that token's log-prob.
Quantities of a group or batch are stored in each `Row` first.
"""

import math
import struct
from dataclasses import dataclass, field
from typing import Any

KL_ESTIMATORS = ("author_k3", "k1_fwd", "k3_fwd", "rkl_iw")

DEFAULTS: dict[str, Any] = {
    "cap": 2.0, "kl_estimator": "author_k3", "kl_threshold": 50.0, "eps_low": 0.2, "eps_high": 0.2,
    "denominator": "all", "agg": "seq_mean", "max_completion_length": None, "clip": True, "alpha": 0.0,
    "k3_beta": 0.0, "mis_low": 0.5, "mis_high": 2.0, "m2_threshold": 0.04, "mis_level": "token",
    "topr_level": "seq_mean", "tau_pos": 1.0, "tau_neg": 1.05, "old_logprobs": "engine", "foreign_clip": 0.2,
    "ratio_power": 1.0, "floor": 0.0, "filter": "kl", "keep_share": 0.3, "rank_own": False, "obrs_lambda": 1.0,
    "first_pass_logprobs": None, "sender_ids": None,
}  # fmt: skip

METHOD_DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {}, "dr_grpo": {"agg": "max_len"}, "dapo": {"eps_high": 0.28, "agg": "token_mean"}, "nois": {}, "vis": {},
    "tis": {}, "ftis": {}, "f-nois": {}, "f-vis": {}, "gspo": {"eps_low": 3e-4, "eps_high": 4e-4},
    "gspo_token": {"eps_low": 3e-4, "eps_high": 4e-4}, "gepo": {}, "topr": {},
    "cispo": {"cap": 5.0, "agg": "token_mean"}, "mis": {}, "m2po": {"agg": "token_mean"},
    "swarm_sapo": {"eps_high": 0.28}, "hacpo": {"eps_low": 3e-4, "eps_high": 4e-4, "old_logprobs": "learner"},
    "dppo": {"cap": 20.0, "agg": "token_mean"}, "soft_adaptive": {}, "accepted": {"filter": "positives"},
}  # fmt: skip

FILTERED = ("ftis", "f-nois", "f-vis", "accepted")


@dataclass
class Row:
    """A completion without its padding: the log-probs of its tokens, and `columns`, their columns in the batch.

    `lp0` is `lp` at the first pass over the batch.
    """

    lp: list[float]
    lg: list[float]
    lp0: list[float]
    columns: list[int]
    advantage: float
    group: int
    is_own: bool
    rejected: set[int] = field(default_factory=set)  # obrs
    denominator: float = 1.0  # gepo: (1 - alpha) E_q + alpha p0
    trusted: list[bool] = field(default_factory=list)  # m2po

    @property
    def length(self) -> int:
        return len(self.lp)

    def mean_difference(self, old_logprobs: str = "engine") -> float:
        """Return log s, for own completions relative to `lp0` if `old_logprobs` is "learner"."""
        old = self.lp0 if self.is_own and old_logprobs == "learner" else self.lg
        return sum(a - b for a, b in zip(self.lp, old, strict=True)) / self.length


@dataclass
class Result:
    """A loss, its gradient and its metrics.

    `gradient` has N lists of T values, with respect to the learner's log-probs. `magnitude` is the sum of the absolute
    terms of the loss; a rounding error is proportional to it.
    """

    loss: float
    magnitude: float
    gradient: list[list[float]]
    kept_fraction: float
    truncated_fraction: float
    mean_kl: float


def average(values: list[float]) -> float:
    return sum(values) / len(values)


def rho_and_slope(lp: float, lg: float) -> tuple[float, float]:
    """Return exp of the clamped difference, and its derivative by lp, which is 0 beyond the clamp."""
    difference = lp - lg
    rho = math.exp(max(-20.0, min(20.0, difference)))
    return rho, rho if -20 <= difference <= 20 else 0.0


def kl_token(estimator: str, lp: float, lg: float) -> float:
    rho, _ = rho_and_slope(lp, lg)
    if estimator == "author_k3":
        return 1 / rho + math.log(rho) - 1
    if estimator == "k1_fwd":
        return lg - lp
    if estimator == "k3_fwd":
        return rho - math.log(rho) - 1
    if estimator == "rkl_iw":
        return rho * math.log(rho) - rho + 1
    raise AssertionError(estimator)


def surrogate(ratio: float, slope: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """Return min(r A, clip(r, low, high) A) and its derivative. `slope` is the derivative of r."""
    clipped = max(low, min(high, ratio))
    if ratio * advantage <= clipped * advantage:
        return ratio * advantage, slope * advantage
    return clipped * advantage, 0.0


def objective(method: str, row: Row, t: int, p: dict[str, Any]) -> tuple[float, float]:
    """Return the value at token t and its derivative by lp_t; for gspo and gepo 1/L of a sequence's derivative."""
    lp, lg, advantage = row.lp[t], row.lg[t], row.advantage
    rho, rho_slope = rho_and_slope(lp, lg)
    rho0, _ = rho_and_slope(row.lp0[t], lg)
    low, high = 1 - p["eps_low"], 1 + p["eps_high"]
    step, step_slope = rho_and_slope(lp, row.lp0[t])
    if method in ("nois", "f-nois", "swarm_sapo", "accepted"):
        return surrogate(step, step_slope, advantage, low, high)
    if method in ("vis", "f-vis", "grpo", "dr_grpo", "dapo"):
        return surrogate(rho, rho_slope, advantage, low, high)
    if method in ("tis", "ftis", "mis"):
        weight = min(rho0, p["cap"])
        if method == "mis":
            total = sum(row.lp0) - sum(row.lg)
            rho0 = {"token": rho0, "seq_mean": math.exp(total / row.length), "seq_sum": math.exp(min(80.0, total))}[
                p["mis_level"]
            ]
            weight = rho0 if p["mis_low"] <= rho0 <= p["mis_high"] else 0.0
        elif advantage > 0:
            weight = max(weight, p["floor"])
        value, slope = surrogate(step, step_slope, advantage, low, high)
        return weight * value, weight * slope
    if method in ("gspo", "gspo_token"):
        ratio = math.exp(row.mean_difference(p["old_logprobs"]))
        return surrogate(ratio, ratio, advantage, low, high)
    if method == "hacpo":
        ratio = math.exp(row.mean_difference(p["old_logprobs"]))
        if row.is_own:
            return surrogate(ratio, ratio, advantage, low, high)
        bounded = max(1 - p["foreign_clip"], min(1.0, ratio))
        weight = bounded ** p["ratio_power"] * advantage
        return weight * bounded, weight * ratio if bounded == ratio else 0.0
    if method == "soft_adaptive":
        tau = p["tau_pos"] if advantage > 0 else p["tau_neg"]
        gate = 1 / (1 + math.exp(min(700.0, -tau * (rho - 1))))
        return 4 / tau * gate * advantage, 4 * gate * (1 - gate) * rho_slope * advantage
    if method == "dppo":
        moved = math.exp(min(0.0, lp)) - math.exp(min(0.0, lg))
        is_near = moved <= p["eps_high"] if advantage > 0 else moved >= -p["eps_low"]
        weight = min(rho, p["cap"]) * advantage if is_near else 0.0
        return weight * lp, weight
    if method == "gepo":
        weight = math.exp(average(row.lp)) / row.denominator
        value, slope = weight * advantage, weight * advantage
        if p["clip"]:
            value, slope = surrogate(weight, weight, advantage, low, high)
        k3_slope = 1 - 1 / rho if rho_slope else 0.0
        return value - p["k3_beta"] * kl_token("author_k3", lp, lg), slope - p["k3_beta"] * k3_slope
    if method == "topr":
        weight = 1.0
        if advantage < 0:
            mean = row.mean_difference()
            taper = {"seq_mean": mean, "seq_sum": mean * row.length, "token": math.log(rho)}[p["topr_level"]]
            weight = math.exp(min(0.0, taper))
        return weight * advantage * lp, weight * advantage
    if method == "cispo":
        weight = min(rho, p["cap"])
        return weight * advantage * lp, weight * advantage
    if method == "m2po":
        return (rho * advantage, rho_slope * advantage) if row.trusted[t] else (0.0, 0.0)
    raise AssertionError(method)


def set_group_denominators(rows: list[Row], alpha: float) -> None:
    for row in rows:
        members = [other for other in rows if other.group == row.group and other.length]
        q = [math.exp(average(other.lg)) for other in members]
        if row.length:
            expected = sum(value * value for value in q) / sum(q)
            row.denominator = (1 - alpha) * expected + alpha * math.exp(average(row.lp0))


def set_trusted_tokens(rows: list[Row], threshold: float) -> None:
    """Set `trusted`: drop the largest square until the mean of the rest is below the threshold."""
    tokens = [((row.lp[t] - row.lg[t]) ** 2, i, t) for i, row in enumerate(rows) for t in range(row.length)]
    tokens.sort()
    while tokens and sum(square for square, _, _ in tokens) / len(tokens) >= threshold:
        tokens.pop()
    kept = {(i, t) for _, i, t in tokens}
    for i, row in enumerate(rows):
        row.trusted = [(i, t) in kept for t in range(row.length)]


def effective_share(rows: list[Row]) -> float:
    log_ratios = [average(row.lp0) - average(row.lg) if row.length else 0.0 for row in rows]
    weights = [min(1.0, math.exp(max(-80.0, log_ratio))) for log_ratio in log_ratios]
    kish = sum(weights) ** 2 / sum(weight**2 for weight in weights)
    return kish / len(rows) * (sum(weights) / len(rows))


def dropped_rows(rows: list[Row], senders: list[int], kl: list[float], p: dict[str, Any]) -> set[int]:
    """Return the rows that the quantile and ess filters drop: negatives beyond a sender's nearest share."""
    dropped = set()
    for sender in set(senders):
        here = [i for i, other in enumerate(senders) if other == sender]
        is_own = p["sender_ids"] is not None and sender == 0 and not p["rank_own"]
        negatives = sorted((kl[i], i) for i in here if rows[i].advantage < 0 and not is_own)
        share = effective_share([rows[i] for i in here]) if p["filter"] == "ess" else p["keep_share"]
        num_kept = math.floor(share * len(negatives) + 0.5)
        cut = negatives[num_kept - 1][0] if num_kept else -math.inf
        dropped |= {i for value, i in negatives if value > cut}
    return dropped


def reject_tokens(rows: list[Row], threshold: float) -> None:
    """Set `rejected`, and in `lg` the accepted tokens' log-prob under the sender after the rejection, but for Z."""
    for i, row in enumerate(rows):
        place = sum(other.group == row.group for other in rows[:i])
        shares = [acceptance(a, b, threshold) for a, b in zip(row.lp0, row.lg, strict=True)]
        numbers = [uniform_number(row.group, place, c, lg) for c, lg in zip(row.columns, row.lg, strict=True)]
        row.rejected = {t for t in range(row.length) if numbers[t] >= shares[t]}
        row.lg = [lg + math.log(share) for lg, share in zip(row.lg, shares, strict=True)]


def read_rows(
    lp: list[list[float]],
    lg: list[list[float]],
    mask: list[list[bool]],
    advantages: list[float],
    group_ids: list[int],
    first_pass: list[list[float]] | None,
    senders: list[int] | None,
) -> list[Row]:
    rows = []
    for i, marks in enumerate(mask):
        columns = [t for t, inside in enumerate(marks) if inside]
        rows.append(
            Row(
                lp=[lp[i][t] for t in columns],
                lg=[lg[i][t] for t in columns],
                lp0=[(first_pass or lp)[i][t] for t in columns],
                columns=columns,
                advantage=advantages[i],
                group=group_ids[i],
                is_own=senders is not None and senders[i] == 0,
            )
        )
    return rows


def reference_loss(
    method: str,
    lp: list[list[float]],
    lg: list[list[float]],
    mask: list[list[bool]],
    advantages: list[float],
    group_ids: list[int],
    **params: Any,
) -> Result:
    p = {**DEFAULTS, **METHOD_DEFAULTS[method], **params}
    rows = read_rows(lp, lg, mask, advantages, group_ids, p["first_pass_logprobs"], p["sender_ids"])
    set_group_denominators(rows, p["alpha"])
    set_trusted_tokens(rows, p["m2_threshold"])

    kl, keep = [], []
    for row in rows:
        values = [kl_token(p["kl_estimator"], a, b) for a, b in zip(row.lp0, row.lg, strict=True)]
        kl.append(sum(values) / len(values) if values else 0.0)
        keep.append(method not in FILTERED or row.advantage > 0 or kl[-1] < p["kl_threshold"])
    num_truncated = sum(rho_and_slope(a, b)[0] > p["cap"] for row in rows for a, b in zip(row.lp0, row.lg, strict=True))
    if method in FILTERED and p["filter"] == "obrs":
        reject_tokens(rows, p["obrs_lambda"])
        keep = [True] * len(rows)
    elif method in FILTERED and p["filter"] == "positives":
        keep = [row.is_own or row.advantage >= 0 for row in rows]
    elif method in FILTERED and p["filter"] != "kl":
        keep = [i not in dropped_rows(rows, p["sender_ids"] or group_ids, kl, p) for i in range(len(rows))]

    counted = [row for row, kept in zip(rows, keep, strict=True) if kept or p["denominator"] == "all"]
    counted_tokens = sum(row.length for row in counted)
    total, magnitude = 0.0, 0.0
    gradient = [[0.0] * len(marks) for marks in mask]
    for i, row in enumerate(rows):
        if not keep[i]:
            continue
        share = {
            "seq_mean": lambda row: 1 / (len(counted) * row.length),
            "token_mean": lambda row: 1 / counted_tokens,
            "max_len": lambda row: 1 / (len(counted) * p["max_completion_length"]),
        }[p["agg"]]
        for t, column in enumerate(row.columns):
            if t in row.rejected:
                continue
            value, slope = objective(method, row, t, p)
            total += share(row) * value
            magnitude += abs(share(row) * value)
            gradient[i][column] -= share(row) * slope

    num_tokens = sum(row.length for row in rows)
    with_tokens = [value for row, value in zip(rows, kl, strict=True) if row.length]
    return Result(
        loss=-total,
        magnitude=magnitude,
        gradient=gradient,
        kept_fraction=sum(keep) / len(rows),
        truncated_fraction=num_truncated / num_tokens if num_tokens else 0.0,
        mean_kl=sum(with_tokens) / len(with_tokens) if with_tokens else 0.0,
    )


WORD = 2**32


def mixed(value: int) -> int:
    """Return the finalizer of MurmurHash3 of a 32-bit word."""
    value ^= value >> 16
    value = value * 0x85EBCA6B % WORD
    value ^= value >> 13
    value = value * 0xC2B2AE35 % WORD
    return value ^ value >> 16


def uniform_number(group_id: int, place: int, column: int, behaviour_logprob: float) -> float:
    """Return the hash of low and high half of the id, the place, the column, and both halves of the log-prob."""
    (bits,) = struct.unpack("<Q", struct.pack("<d", behaviour_logprob))
    id_bits = group_id % 2**64
    state = 0
    for word in (id_bits % WORD, id_bits // WORD, place, column, bits % WORD, bits // WORD):
        state = mixed(state ^ word)
    return (state + 0.5) / WORD


def acceptance(lp0: float, lg: float, threshold: float) -> float:
    """Return min(1, pi / (lambda mu)), with the log-ratio within +-20."""
    return min(1.0, math.exp(max(-20.0, min(20.0, lp0 - lg))) / threshold)
