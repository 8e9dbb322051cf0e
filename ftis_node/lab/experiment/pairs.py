"""Pairings of an experiment: the models that share completions, made here or given as folders.

docs/research/experiments.md describes them. In the F-TIS paper's experiments `size` and `sums` are Qwen2.5 1.5B and 3B.
`expertise` is Qwen2.5 and Qwen2.5-Coder; `peft` is full training and LoRA of one model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ftis_node.config.delay import Delay
from ftis_node.errors import UsageError
from ftis_node.lab.experiment.byzantine import Lie
from ftis_node.lab.experiment.pool import call_in_processes, report
from ftis_node.lab.tiny import make_tiny
from ftis_node.lab.tiny_sums import RECIPES
from ftis_node.telemetry.log import OnProgress

LORA_MARK = ":lora"
SEED_MARK = "{seed}"  # in the path of a given model, for --model-seeds
COPY_MARK = "~"  # s, m, s~2, m~2: marks the second node with a model
LATE_MARK = "@late"  # s, m, s~2, m@late: marks the only node with delayed weights
MISTAKES = {"add": 10, "sub": 1}
TINY_PAIRS = {  # the task of each pairing whose models are made here
    **dict.fromkeys(("size", "expertise", "peft", "blind"), "arithmetic"),
    **dict.fromkeys(("sums", "sums-large"), "sums"),
    "guess": "guess",
}
SUMS_PAIRS = {"sums": ("s", "m"), "sums-large": ("m", "l")}
GUESS = "guess"
HDEE = "hdee"
GRADED_MISTAKE = 10  # the same for all sizes, so that experts differ in fewer ways


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
    specs: dict[str, dict[str, Any]] = {}
    if "size" in pairs:
        specs["s"] = {"size": "s"}
    if "size" in pairs or "peft" in pairs:
        specs["m"] = {"size": "m"}
    if "expertise" in pairs:
        for kind, mistake in MISTAKES.items():
            specs[kind] = {"size": "s", "expert_in": kind, "mistake": mistake}
    if "blind" in pairs:
        for kind, mistake in MISTAKES.items():
            specs[f"blind-{kind}"] = {"size": "s", "expert_in": kind, "mistake": mistake, "blind": True}
    for pair, sizes in SUMS_PAIRS.items():
        if pair in pairs:
            specs |= {f"sums-{size}": {"size": size, "task": "sums"} for size in sizes}
    if GUESS in pairs:
        specs |= {f"guess-{size}": {"size": size, "task": "guess"} for size in ("s", "m")}
    if HDEE in pairs:
        for size in RECIPES:
            specs[f"graded-{size}"] = {"size": size, "graded": True, "mistake": GRADED_MISTAKE}
    return {f"{name}-{seed}": arguments | {"seed": seed} for name, arguments in specs.items()}


def resolve_pair(name: str, models: Path, *, seed: int) -> Pair:
    """Return the pairing of that name. `models` is the folder of tiny models. Raises UsageError if unknown.

    In a given folder's path `{seed}` becomes the seed.
    """

    def tiny(member: str, model: str | None = None, *, lora: bool = False) -> TrialMember:
        return TrialMember(member, str(models / f"{model or member}-{seed}"), lora=lora)

    built_in = {
        "size": (tiny("s"), tiny("m")),
        "expertise": (tiny("add"), tiny("sub")),
        "peft": (tiny("full", "m"), tiny("lora", "m", lora=True)),
        "blind": (tiny("add", "blind-add"), tiny("sub", "blind-sub")),
        **{pair: tuple(tiny(size, f"sums-{size}") for size in sizes) for pair, sizes in SUMS_PAIRS.items()},
        GUESS: (tiny("s", "guess-s"), tiny("m", "guess-m")),
    }
    if name in built_in:
        return Pair(name, built_in[name], seed)
    given = [part for part in name.split(",") if part]
    if not given or (len(given) == 1 and "/" not in name):
        known = ", ".join(built_in)
        raise UsageError(f"no pairing {name!r}: use {known}, or folders with models, DIR,DIR")
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
    make_tiny(arguments.pop("size"), temporary, progress=lambda fraction, _: report(name, fraction), **arguments)
    temporary.rename(target)
