"""Domain experts of different size or length of training, at equal total compute (HDEE, arXiv 2502.19385).

The domains are the parts of a mixture, by rising difficulty. Each has an expert, and four arms spend the same compute
on the experts (docs/research/experiments.md). The number of steps is adjusted so that all arms cost the same as
`equal`. The actual compute of a trial is counted from its tokens (`MemberResult.compute`). Experts that have finished
leave, and the others generate more. Excluded domains are only evaluated: no expert trains on them.

HDEE trains its experts on texts and measures perplexity. These experts train by RL and are measured by pass@1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Final

from ftis_node.config.manifest import RunManifest, load_manifest, preset_for_task
from ftis_node.errors import TaskError, UsageError
from ftis_node.evaluation.ensemble import MIXTURES, MODES
from ftis_node.lab.experiment.pairs import HDEE, Pair, TrialMember, resolve_pair
from ftis_node.lab.experiment.runner import options_of
from ftis_node.lab.experiment.specs import ALONE, is_alone
from ftis_node.lab.experiment.trial import FinalEvaluation, Trial
from ftis_node.lab.experiment.trial_matrix import Experiment, TrialSetting
from ftis_node.lab.experiment.trial_result import GENERATED_COST, TRAINED_COST
from ftis_node.lab.tiny_curricula import RECIPES, Size
from ftis_node.models import PromptSettings, load_tokenizer, parameter_count, resolve_model
from ftis_node.tasks import TaskPart, TaskSpec, held_out_spec, load_task, parse_parts, parse_spec
from ftis_node.telemetry.log import OnProgress, unwatched

THREE_PARTS: Final = "arithmetic:no-carry+arithmetic:carry+arithmetic:borrow"  # by rising difficulty
TINY_TASK: Final = "arithmetic"
TINY_PRESET: Final = "arithmetic-hdee"
TINY_SIZES: Final[tuple[Size, ...]] = ("s", "sm", "m")
ONE: Final = "one"
TRIED_PERCENT: Final = range(5, 401)  # percent of the usual steps
MAX_NAME: Final = 48
NUM_COMPARED: Final = 4096  # training problems of a part, to find test problems of other domains
UNSAFE: Final = re.compile(r"[^\w.-]+")  # in the name of a folder


@dataclass(frozen=True, slots=True)
class Domain:
    """A part of the mixture, or an excluded part. `held_out` is the SPEC of its test problems, `task` its name there.

    `spec` is that of an expert's prompts, and `weight` its share of the mixture.
    """

    spec: str
    held_out: str
    task: str
    weight: int = 1

    @property
    def expert(self) -> str:
        """Return the name of the domain's expert."""
        return UNSAFE.sub("-", self.task)[:MAX_NAME]


@dataclass(frozen=True)
class Domains:
    """The parts of a mixture, the easiest first, and the excluded ones."""

    trained: tuple[Domain, ...]
    excluded: tuple[Domain, ...] = ()

    @cached_property
    def mixture(self) -> TaskSpec:
        return parse_spec("+".join(f"{domain.spec}={domain.weight}" for domain in self.trained))

    @property
    def held_out(self) -> tuple[str, ...]:
        return tuple(domain.held_out for domain in (*self.trained, *self.excluded))

    @property
    def is_tiny(self) -> bool:
        """Return whether the models made here know all domains."""
        return all(domain.task.partition(":")[0] == TINY_TASK for domain in (*self.trained, *self.excluded))

    @property
    def preset(self) -> str:
        """Return the preset for this mixture: that of the part with the longest answers."""
        if self.is_tiny:
            return TINY_PRESET
        presets = [preset_for_task(domain.spec) for domain in self.trained]
        return max(presets, key=lambda preset: load_manifest(preset).sampling.max_total_tokens)


def read_domains(task: str, excluded: str | None = None) -> Domains:
    """Return the parts of the SPECs.

    Raises UsageError for one task and for overlapping parts, TaskError for one that cannot be loaded.
    """
    parts = parse_parts(task)
    if len(parts) < 2:
        raise UsageError(f"--task {task} is one domain: join at least two, such as arithmetic:add+arithmetic:sub")
    untrained = parse_parts(excluded) if excluded else []
    if both := {part.name for part in parts} & {part.name for part in untrained}:
        raise UsageError(f"--ood-task {min(both)}: an expert trains on it; name domains that are not in --task")
    domains = Domains(tuple(map(_trained, parts)), tuple(_domain(part, str(_alone(part))) for part in untrained))
    if len({domain.expert for domain in domains.trained}) < len(parts):
        raise UsageError(f"--task {task}: two parts have almost the same name; give their data sets other names")
    _check_overlap(domains)
    return domains


def _check_overlap(domains: Domains) -> None:
    """Raise UsageError if the first training problems of a part contain test problems of another domain."""
    tests = [load_task(domain.held_out, split="test") for domain in (*domains.trained, *domains.excluded)]
    for domain in domains.trained:
        task = load_task(domain.spec)
        shown = {str(task[index].prompt) for index in range(min(len(task), NUM_COMPARED))}
        for test in tests:
            if test.name != domain.task and any(str(test[index].prompt) in shown for index in range(len(test))):
                raise UsageError(
                    f"{domain.task} trains on test problems of {test.name}: name domains without common ones"
                )


def _trained(part: TaskPart) -> Domain:
    held_out = held_out_spec(TaskSpec((_alone(part),)))
    if held_out is None:
        raise UsageError(f"{part.name} has no held-out problems: give a folder with train and test files")
    return _domain(part, str(held_out))


def _domain(part: TaskPart, held_out: str) -> Domain:
    try:
        name = load_task(held_out, split="test").name
    except TaskError as error:
        family, _, argument = part.name.partition(":")
        hint = f"; a weight follows =, as in {family}={argument}" if argument.isdecimal() else ""
        raise TaskError(f"{error}{hint}") from None
    return Domain(str(_alone(part)), held_out, name, part.weight)


def _alone(part: TaskPart) -> TaskPart:
    return replace(part, weight=1)


@dataclass(frozen=True, slots=True)
class ExpertStart:
    """The model with which an expert starts; with `lora` only an adapter is trained.

    Equal values of `tokenizer` mean the same tokenizer.
    """

    model: str
    parameters: int
    lora: bool = False
    tokenizer: str = ""


@dataclass(frozen=True, slots=True)
class Arm:
    """The start of each expert, easiest domain first, and its steps as a multiple of the usual number."""

    starts: tuple[ExpertStart, ...]
    lengths: tuple[float, ...]

    def steps(self, usual: int, goal: float, *, is_apart: bool) -> tuple[int, ...]:
        """Return the steps of each expert, at least 1, whose cost is nearest to `goal`."""
        tried = {
            tuple(max(1, round(usual * length * percent / 100)) for length in self.lengths) for percent in TRIED_PERCENT
        }
        return min(sorted(tried, reverse=True), key=lambda steps: abs(self.cost(steps, is_apart=is_apart) - goal))

    def cost(self, steps: tuple[int, ...], *, is_apart: bool) -> float:
        """Return the cost of these steps in parameters times updates.

        An expert that shares generates only a part of each update, and more after others have left.
        """
        generated, before, due = {}, 0, 0.0  # updates that an expert generates until its last step
        for last in sorted(set(steps)):
            due += (last - before) / (1 if is_apart else sum(other >= last for other in steps))
            generated[last], before = due, last
        return sum(
            start.parameters * (TRAINED_COST * last + GENERATED_COST * generated[last])
            for start, last in zip(self.starts, steps, strict=True)
        )


def arms_of(domains: Domains, starts: Sequence[ExpertStart]) -> dict[str, Arm]:
    """Return the arms by name. `starts` has one start for each domain, or one for all: then no arm varies sizes.

    The arm `steps` has steps in proportion to the weights of the mixture. If they are equal, the i-th domain has i.
    """
    num, middle = len(domains.trained), starts[len(starts) // 2]
    weights = [domain.weight for domain in domains.trained]
    rising = weights if len(set(weights)) > 1 else range(1, num + 1)
    same = (1.0,) * num
    arms = {
        "equal": Arm((middle,) * num, same),
        "steps": Arm((middle,) * num, tuple(num * each / sum(rising) for each in rising)),
    }
    if len(starts) > 1:
        arms["sizes"] = Arm(tuple(starts), same)
    return arms | {ONE: Arm((middle,), (float(num),))}


def starts_of(
    pair: str, domains: Domains, models: Path, *, seed: int, on_progress: OnProgress = unwatched
) -> list[ExpertStart]:
    """Return the starts for `hdee`, whose models are made in the folder `models`, or for `hdee:DIR[:lora][,...]`.

    Raises UsageError for a number of models that does not fit, ModelError and NetworkError.
    """
    num = len(domains.trained)
    given = pair.removeprefix(HDEE).removeprefix(":")
    if not given:
        if not domains.is_tiny:
            raise UsageError(f"--pair {HDEE} makes models for {TINY_TASK} only: name a start, as in --pair {HDEE}:DIR")
        sizes = [TINY_SIZES[round(place * (len(TINY_SIZES) - 1) / (num - 1))] for place in range(num)]
        return [ExpertStart(str(models / f"graded-{size}-{seed}"), RECIPES[size].num_parameters) for size in sizes]
    members = resolve_pair(given, models, seed=seed).members
    if len(members) not in (1, num):
        raise UsageError(f"--pair {pair}: {len(members)} models for {num} domains; name one, or one for each domain")
    starts = []
    for member in members:
        source = resolve_model(member.model, on_progress=on_progress)
        tokenizer = load_tokenizer(source, prompts=PromptSettings())
        starts.append(ExpertStart(member.model, parameter_count(source), member.lora, tokenizer.fingerprint))
    return starts


def hdee_trials(
    experiment: Experiment, domains: Domains, starts: Sequence[ExpertStart], *, model_seed: int
) -> list[Trial]:
    """Return the trials of all arms, separate and sharing, in which experts begin with `starts`. Seeds are the outer
    loop.

    Raises UsageError for a setting that does not fit.
    """
    arms = arms_of(domains, starts)
    if not all(map(is_alone, experiment.methods)):
        sharing = [planned_steps(arms, arm, experiment.steps, is_apart=False) for arm in arms if arm != ONE]
        _check_shares(experiment.base, sharing)
    found: dict[tuple[str, str], Trial] = {}
    for seed, arm, method in product(experiment.seeds, arms, experiment.methods):
        if arm != ONE or is_alone(method):  # a single model has no peer
            trial = _trial(experiment, domains, arms, Pair(f"{HDEE}:{arm}", (), model_seed), method)
            trial = replace(trial, seed=seed, labels=trial.labels | {"arm": arm})
            found.setdefault((options_of(trial), arm), trial)
    return list(found.values())


def _trial(experiment: Experiment, domains: Domains, arms: dict[str, Arm], pair: Pair, method: str) -> Trial:
    name, base, is_apart = pair.name.partition(":")[2], experiment.base, is_alone(method)
    arm, num = arms[name], len(domains.trained)
    steps = planned_steps(arms, name, experiment.steps, is_apart=is_apart)
    experts = [(ONE, None)] if name == ONE else [(domain.expert, domain.spec) for domain in domains.trained]
    members = [
        TrialMember(expert, start.model, lora=start.lora, domain=spec, steps=last)
        for (expert, spec), start, last in zip(experts, arm.starts, steps, strict=True)
    ]
    trial = TrialSetting(experiment, pair, method, "none", num_nodes=1 if is_apart else num).trial(members, 0)
    has_mixture = len({start.tokenizer for start in arm.starts}) == 1
    evaluation = FinalEvaluation(
        domains.held_out,
        modes=MODES if has_mixture else tuple(mode for mode in MODES if mode not in MIXTURES),
        limit=base.eval.limit,
        max_tokens=base.sampling.max_total_tokens,
    )
    return replace(trial, steps=max(steps), apart=is_apart, final_evaluation=None if name == ONE else evaluation)


def planned_steps(arms: dict[str, Arm], arm: str, usual: int, *, is_apart: bool) -> tuple[int, ...]:
    """Return the steps of each expert of an arm, if those of `equal` take `usual` ones."""
    equal = arms["equal"]
    return arms[arm].steps(usual, equal.cost((usual,) * len(equal.starts), is_apart=is_apart), is_apart=is_apart)


def _check_shares(base: RunManifest, steps_of_arms: Sequence[tuple[int, ...]]) -> None:
    """Raise UsageError unless all experts share an update evenly, and so do those that remain."""
    num_prompts = base.step.own_groups + base.step.foreign_groups
    present = {sum(other >= last for other in steps) for steps in steps_of_arms for last in steps}
    fitting = math.lcm(*present)
    if num_prompts % fitting:
        raise UsageError(
            f"--prompts {num_prompts}: {max(present)} experts share an update, and fewer after some have left: "
            f"use a multiple of {fitting}, or --methods {ALONE}"
        )
