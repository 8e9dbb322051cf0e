"""Pairings of an experiment: the models that share completions, made here or given as folders.

docs/research/experiments.md describes them. In the F-TIS paper's experiments `size` and `sums` are Qwen2.5 1.5B and 3B.
`expertise` is Qwen2.5 and Qwen2.5-Coder; `peft` is full training and LoRA of one model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from ftis_node.config.roles import Delay
from ftis_node.errors import UsageError
from ftis_node.lab.experiment.byzantine import Lie
from ftis_node.lab.experiment.pool import call_in_processes, report
from ftis_node.lab.tiny import make_tiny
from ftis_node.lab.tiny_curricula import RECIPES
from ftis_node.telemetry.log import OnProgress

LORA_MARK = ":lora"
SEED_MARK = "{seed}"  # in the path of a given model, for --model-seeds
COPY_MARK = "~"  # s, m, s~2, m~2: marks the second node with a model
LATE_MARK = "@late"  # s, m, s~2, m@late: marks the only node with delayed weights
HDEE = "hdee"
MODELS: Final[dict[str, dict[str, Any]]] = {  # the arguments of `make_tiny`
    "s": {"size": "s"},
    "m": {"size": "m"},
    "add": {"size": "s", "expert_in": "add", "mistake": 10},
    "sub": {"size": "s", "expert_in": "sub", "mistake": 1},
    "blind-add": {"size": "s", "expert_in": "add", "mistake": 10, "blind": True},
    "blind-sub": {"size": "s", "expert_in": "sub", "mistake": 1, "blind": True},
    **{f"sums-{size}": {"size": size, "task": "sums"} for size in ("s", "m", "l")},
    # as m, with other pairs of digits known and another mistake
    "sums-other": {"size": "m", "task": "sums", "mistake": 2, "seed": 1000},
    **{f"guess-{size}": {"size": size, "task": "guess"} for size in ("s", "m")},
    # the same mistake for all sizes, so that experts differ in fewer ways
    **{f"graded-{size}": {"size": size, "graded": True, "mistake": 10} for size in RECIPES},
}
PAIRS: Final[dict[str, dict[str, str]]] = {  # by pairing: each node and its model
    "size": {"s": "s", "m": "m"},
    "expertise": {"add": "add", "sub": "sub"},
    "peft": {"full": "m", "lora": "m"},
    "blind": {"add": "blind-add", "sub": "blind-sub"},
    "sums": {"s": "sums-s", "m": "sums-m"},
    "sums-large": {"m": "sums-m", "l": "sums-l"},
    "unlike": {"s": "sums-s", "m": "sums-m", "l": "sums-l", "lora": "sums-other"},
    "guess": {"s": "guess-s", "m": "guess-m"},
}
TINY_PAIRS: Final = {
    name: MODELS[next(iter(nodes.values()))].get("task", "arithmetic") for name, nodes in PAIRS.items()
}
"""The task of each pairing whose models are made here."""


@dataclass(frozen=True, slots=True)
class TrialMember:
    """One node of a swarm. `name` appears in the results; a node with a `lie` is malicious.

    `domain` is the SPEC of the parts that it generates for; None means the whole task. `steps` is its last step; None
    means that of the trial. `delay` is the delay of new weights at its generator; None means that of the trial.
    """

    name: str
    model: str
    lora: bool = False
    lie: Lie | None = None
    domain: str | None = None
    steps: int | None = None
    delay: Delay | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A pairing. `name` is as given on the command line; `model_seed` is the seed of models that are made here."""

    name: str
    members: tuple[TrialMember, ...]
    model_seed: int = 0

    def swarm(self, num_nodes: int) -> list[TrialMember]:
        """Return the nodes, which take turns through the models. Copies of a model have a number in their name."""
        nodes = []
        for position in range(num_nodes):
            lap, index = divmod(position, len(self.members))
            member = self.members[index]
            name = member.name if lap == 0 else f"{member.name}{COPY_MARK}{lap + 1}"
            nodes.append(replace(member, name=name))
        return nodes


def tiny_models(pairs: tuple[str, ...], *, seed: int) -> dict[str, dict[str, Any]]:
    """Return the arguments of `make_tiny` for the models of these pairings, by model name."""
    used = [model for pair in pairs for model in PAIRS.get(pair, {}).values()]
    used += [model for model in MODELS if HDEE in pairs and model.startswith("graded-")]
    return {f"{model}-{seed}": MODELS[model] | {"seed": seed + MODELS[model].get("seed", 0)} for model in used}


def resolve_pairs(names: Iterable[str], models: Path, *, seed: int) -> Iterator[Pair]:
    """Yield each pairing once. If several have one name, the others get a number: `s,m` and `s,m#2`."""
    taken: Counter[str] = Counter()
    for given in dict.fromkeys(names):
        pair = resolve_pair(given, models, seed=seed)
        taken[pair.name] += 1
        yield replace(pair, name=f"{pair.name}#{taken[pair.name]}") if taken[pair.name] > 1 else pair


def resolve_pair(name: str, models: Path, *, seed: int) -> Pair:
    """Return the pairing of that name. `models` is the folder of tiny models. Raises UsageError if unknown.

    In a given folder's path `{seed}` becomes the seed.
    """
    if name in PAIRS:
        nodes = PAIRS[name].items()
        made = (TrialMember(node, str(models / f"{model}-{seed}"), lora=node == "lora") for node, model in nodes)
        return Pair(name, tuple(made), seed)
    given = [part for part in name.split(",") if part]
    if not given or (len(given) == 1 and "/" not in name):
        raise UsageError(f"no pairing {name!r}: use {', '.join(PAIRS)}, or folders with models, DIR,DIR[,...]")
    members: list[TrialMember] = []
    for part in given:
        model = part.removesuffix(LORA_MARK)
        base = model.replace(f"-{SEED_MARK}", "").rstrip("/").rsplit("/", 1)[-1] + ("-lora" if part != model else "")
        taken = sum(member.name.split("#")[0] == base for member in members)
        members.append(
            TrialMember(
                f"{base}#{taken + 1}" if taken else base, model.replace(SEED_MARK, str(seed)), lora=part != model
            )
        )
    return Pair(",".join(member.name for member in members), tuple(members), seed if SEED_MARK in name else 0)


def make_models(
    models: Mapping[str, Mapping[str, Any]], folder: Path, *, watch: OnProgress, jobs: int | None = None
) -> None:
    """Make the models that are missing in `folder`, `jobs` at a time. Raises FtisError if making one fails."""
    missing = {name: arguments for name, arguments in models.items() if not (folder / name / "config.json").exists()}
    if not missing:
        return

    def show(fractions: Mapping[str, float], num_left: int) -> None:
        under_way = ", ".join(f"{name} {done:.0%}" for name, done in fractions.items() if 0 < done < 1)
        watch(fmean(fractions.values()), f"making tiny models: {under_way}")

    calls = {name: (name, folder / name, dict(arguments)) for name, arguments in missing.items()}
    call_in_processes(_make, calls, jobs=jobs or len(calls), watch=show, failure="making a tiny model failed")


def _make(name: str, target: Path, arguments: dict[str, Any]) -> None:
    """Make one model in a process of the pool. Its folder `target` appears only when it is complete."""
    temporary = target.with_name(target.name + ".making")
    make_tiny(arguments.pop("size"), temporary, progress=lambda fraction, _: report(name, fraction or 0.0), **arguments)
    temporary.rename(target)
