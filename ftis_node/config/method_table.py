"""Table of the built-in methods, filters, KL estimators, advantages and choices of groups: all their names.

It is plain data, so the manifest can check a name without PyTorch. `ftis_node/algorithms/methods.py` has the functions
that `objective` names. Other packages add all but estimators by entry points (`ftis_node/plugins.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import PydanticCustomError

from ftis_node.config.section import UNKNOWN_NAME
from ftis_node.errors import ConfigError
from ftis_node.plugins import ADVANTAGE_GROUP, CHOICE_GROUP, FILTER_GROUP, METHOD_GROUP, describe, find_entry


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodTraits:
    """What is known of a method beside its function.

    `defaults` are the parameters that differ from `Settings`, `takes` the parameters beyond the common ones.
    `filtered` enables the F-TIS filter, and `advantage_scale` is the `scale` for `group_advantages`. A method that is
    not `weighted` reads no log-prob of a generator, so completions of unknown log-probs count fully.
    """

    source: str
    filtered: bool = False
    weighted: bool = True
    separable: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
    takes: tuple[str, ...] = ()
    advantage_scale: str = "std"


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRow(MethodTraits):
    """Row of one built-in method. `objective` names a function of `ftis_node/algorithms/methods.py`."""

    objective: str


KlEstimator = Literal["author_k3", "k1_fwd", "k3_fwd", "rkl_iw"]  # formulas in ftis_node/algorithms/filters.py
FILTERS = ("kl", "quantile", "ess", "obrs", "positives")  # formulas there, too
SCALES = ("std", "mean", "success", "capability")  # formulas in ftis_node/algorithms/advantages.py
CHOICES = ("newest", "sapo")  # rules in ftis_node/replay/group_choice.py
FTIS_PAPER = "arXiv 2605.22537"
FLOOR = ("floor",)
FILTER = ("filter", "keep_share", "rank_own", "obrs_lambda", "sender_ids")
OLD_LOGPROBS = ("old_logprobs", "sender_ids")
GSPO_CLIP = {"eps_low": 3e-4, "eps_high": 4e-4}
CLIP_HIGHER = {"eps_low": 0.2, "eps_high": 0.28}
TOKEN_MEAN = {"agg": "token_mean"}

METHODS: Mapping[str, MethodRow] = {
    "nois": MethodRow(objective="unweighted", source=FTIS_PAPER),
    "vis": MethodRow(objective="ratio_clipped", source=FTIS_PAPER),
    "tis": MethodRow(objective="truncated_weight", takes=FLOOR, source=FTIS_PAPER),
    "f-nois": MethodRow(objective="unweighted", filtered=True, takes=FILTER, source=FTIS_PAPER),
    "f-vis": MethodRow(objective="ratio_clipped", filtered=True, takes=FILTER, source=FTIS_PAPER),
    "ftis": MethodRow(objective="truncated_weight", filtered=True, takes=FLOOR + FILTER, source=FTIS_PAPER),
    "accepted": MethodRow(
        objective="unweighted",
        filtered=True,
        weighted=False,
        defaults={"filter": "positives"},
        takes=("sender_ids",),
        source="this project",
    ),
    "grpo": MethodRow(objective="ratio_clipped", source="arXiv 2402.03300"),
    "dr_grpo": MethodRow(
        objective="ratio_clipped", defaults={"agg": "max_len"}, advantage_scale="mean", source="arXiv 2503.20783"
    ),
    "dapo": MethodRow(objective="ratio_clipped", defaults=CLIP_HIGHER | TOKEN_MEAN, source="arXiv 2503.14476"),
    "gspo": MethodRow(objective="sequence_clipped", defaults=GSPO_CLIP, takes=OLD_LOGPROBS, source="arXiv 2507.18071"),
    "gspo_token": MethodRow(
        objective="sequence_clipped_token", defaults=GSPO_CLIP, takes=OLD_LOGPROBS, source="arXiv 2507.18071"
    ),
    "hacpo": MethodRow(
        objective="capability_clipped",
        defaults=GSPO_CLIP | {"old_logprobs": "learner"},
        takes=(*OLD_LOGPROBS, "foreign_clip", "ratio_power"),
        advantage_scale="capability",
        source="arXiv 2603.02604",
    ),
    "gepo": MethodRow(
        objective="group_expectation",
        takes=("clip", "alpha", "k3_beta"),
        advantage_scale="mean",
        source="arXiv 2508.17850",
    ),
    "swarm_sapo": MethodRow(objective="unweighted", defaults=CLIP_HIGHER, source="arXiv 2509.08721"),
    "topr": MethodRow(objective="tapered", takes=("topr_level",), source="arXiv 2503.14286"),
    "cispo": MethodRow(objective="truncated_logprob", defaults={"cap": 5.0} | TOKEN_MEAN, source="arXiv 2510.13786"),
    "dppo": MethodRow(objective="divergence_masked", defaults={"cap": 20.0} | TOKEN_MEAN, source="arXiv 2602.04879"),
    "soft_adaptive": MethodRow(objective="soft_gate", takes=("tau_pos", "tau_neg"), source="arXiv 2511.20347"),
    "mis": MethodRow(objective="masked_weight", takes=("mis_low", "mis_high", "mis_level"), source="IcePop, masked IS"),
    "m2po": MethodRow(
        objective="second_moment",
        separable=False,
        defaults=TOKEN_MEAN,
        takes=("m2_threshold",),
        source="arXiv 2510.01161",
    ),
}


KINDS: Mapping[str, tuple[Iterable[str], str]] = {  # the built-in names, and the group of the installed ones
    "method": (METHODS, METHOD_GROUP),
    "filter": (FILTERS, FILTER_GROUP),
    "advantage": (SCALES, ADVANTAGE_GROUP),
    "choice": (CHOICES, CHOICE_GROUP),
}


def known_name(kind: str, name: str, package: str | None = None) -> str:
    """Return the name of a built-in or installed method, filter, scale of advantages or choice of groups.

    For a validator: raises PydanticCustomError if there is none, or if `package` does not provide it.
    """
    try:
        _require(kind, name, package)
    except ValueError as error:
        raise PydanticCustomError(UNKNOWN_NAME, "{line}", {"line": str(error)}) from None
    return name


def _require(kind: str, name: str, package: str | None) -> None:
    known, group = KINDS[kind]
    if name in known:
        if package is not None:
            raise ValueError(f"package = {package!r} has no effect, because {kind} {name!r} is built in: remove it")
        return
    try:
        entry = find_entry(group, name, error=ConfigError)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if entry is None:
        source = f"a package adds it by the entry point {group}" if package is None else _wish(package)
        names = ", ".join(f"'{one}'" for one in known)
        raise ValueError(f"no {kind} {name[:64]!r} is installed: {source}; built in are {names}")
    if package is not None and _normalized(describe(entry).package) != _normalized(package):
        raise ValueError(f"{describe(entry)} is installed, but {_wish(package)}")


def _wish(package: str) -> str:
    """Return whose wish a package is, because a manifest may come from anyone."""
    return (
        f"the author of the manifest wants the Python package {package}. Its code runs with all your rights. "
        "Check where it comes from before you install it"
    )


def _normalized(package: str) -> str:
    return package.lower().replace("_", "-").replace(".", "-")
