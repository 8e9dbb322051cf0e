"""Domain experts of different size or length of training, at equal total compute (HDEE, arXiv 2502.19385).

Three domains of rising difficulty, an expert for each, and four arms that spend the same compute on them
(docs/research/experiments.md). The number of steps is adjusted so that all arms cost the same as `equal`. The actual
compute of a trial is counted from its tokens (`MemberResult.compute`). Experts that have finished leave, and the others
generate more.

The report has the accuracy of each expert and of all together, and the cost. Means and errors are those of
`experiment/summary.py`. A *cell* is one arm, separate or sharing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final, TypeVar

from ftis_node.errors import UsageError
from ftis_node.lab.experiment.pairs import HDEE, Pair, TrialMember
from ftis_node.lab.experiment.plots import plot_panels, plot_rows
from ftis_node.lab.experiment.report import document, interval, write_steps_csv
from ftis_node.lab.experiment.rounds import Rounds
from ftis_node.lab.experiment.specs import ALONE
from ftis_node.lab.experiment.summary import Estimate, estimate, markdown, model_seed, over_seeds, write_csv
from ftis_node.lab.experiment.trial import FinalEvaluation, Trial
from ftis_node.lab.experiment.trial_matrix import Experiment, TrialSetting, with_key
from ftis_node.lab.experiment.trial_result import GENERATED_COST, TRAINED_COST, TrialResult
from ftis_node.lab.tiny_sums import RECIPES, Size

V = TypeVar("V")
Seeds = tuple[int, int]  # model seed, seed
Accuracies = dict[Seeds, list[float]]  # on each domain, by the seeds of the trial

DOMAINS: Final = ("easy", "medium", "hard")
SPECS: Final = ("arithmetic:no-carry", "arithmetic:carry", "arithmetic:borrow")
MIXTURE: Final = "+".join(sorted(SPECS))
ONE: Final = "one"
UPDATE: Final = 6  # groups of an update that three, two or one expert share evenly
TRIED_PERCENT: Final = range(50, 151)  # percent of the usual steps
APART = "apart"
BEFORE, OWN, BEST = "own expert, before", "own expert", "best expert"
GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Arm:
    """Sizes of the experts, easiest domain first, and their steps in halves of the usual number."""

    sizes: tuple[Size, ...]
    halves: tuple[int, ...]

    def steps(self, usual: int, *, is_apart: bool) -> tuple[int, ...]:
        """Return the steps of each expert. They cost about as much as three middle-size experts with `usual` steps."""
        tried = {
            tuple(max(1, round(usual * half / 2 * percent / 100)) for half in self.halves) for percent in TRIED_PERCENT
        }
        goal = ARMS["equal"].cost((usual,) * len(DOMAINS), is_apart=is_apart)
        return min(sorted(tried, reverse=True), key=lambda steps: abs(self.cost(steps, is_apart=is_apart) - goal))

    def cost(self, steps: tuple[int, ...], *, is_apart: bool) -> float:
        """Return the cost of these steps in parameters times updates.

        An expert that shares generates only a part of each update, and more after others have left.
        """
        num_nodes = 1 if is_apart else len(steps)
        total = 0.0
        for size, last in zip(self.sizes, steps, strict=True):
            rounds = Rounds(UPDATE // num_nodes, UPDATE - UPDATE // num_nodes, (last,) if is_apart else steps)
            own = rounds.due(last)
            total += RECIPES[size].num_parameters * (TRAINED_COST * last + GENERATED_COST * own / UPDATE)
        return total


ARMS: Final = {
    "equal": Arm(("sm", "sm", "sm"), (2, 2, 2)),
    "steps": Arm(("sm", "sm", "sm"), (1, 2, 3)),
    "sizes": Arm(("s", "sm", "m"), (2, 2, 2)),
    ONE: Arm(("sm",), (6,)),
}


def hdee_trials(experiment: Experiment, models: Path, *, seed: int) -> list[Trial]:
    """Return the trials of all arms, separate and sharing. Seeds are the outer loop; `models` holds the tiny models of
    `seed`.

    Raises UsageError for a setting that does not fit.
    """
    found: dict[str, Trial] = {}
    for trial_seed in experiment.seeds:
        for arm in ARMS:
            for method in experiment.methods:
                for trial in _trials(experiment, arm, method, models, seed=seed, trial_seed=trial_seed):
                    found.setdefault(trial.key, trial)
    return list(found.values())


def _trials(
    experiment: Experiment, arm: str, method: str, models: Path, *, seed: int, trial_seed: int
) -> Iterator[Trial]:
    """Yield one trial; none if a single model would share, because it has no peer."""
    is_apart = method == ALONE
    if arm == ONE and not is_apart:
        return
    steps = ARMS[arm].steps(experiment.steps, is_apart=is_apart)
    names, domains = ((ONE,), (None,)) if arm == ONE else (DOMAINS, SPECS)
    members = [
        TrialMember(name, str(models / f"graded-{size}-{seed}"), domain=domain, steps=last)
        for name, size, domain, last in zip(names, ARMS[arm].sizes, domains, steps, strict=True)
    ]
    num_nodes = 1 if is_apart else len(members)
    setting = TrialSetting(experiment, Pair(f"{HDEE}:{arm}", (), seed), method, "none", num_nodes=num_nodes)
    trial = setting.trial(members, trial_seed)
    base = experiment.base
    final_evaluation = (
        FinalEvaluation(SPECS, limit=base.eval.limit, max_tokens=base.sampling.max_total_tokens) if arm != ONE else None
    )
    trial = replace(
        trial, steps=max(steps), apart=is_apart, final_evaluation=final_evaluation, labels=trial.labels | {"arm": arm}
    )
    if not is_apart and not trial.rounds(trial.members).is_even:
        num_prompts = base.step.own_groups + base.step.foreign_groups
        raise UsageError(f"--prompts {num_prompts}: three experts share an update, then two: use a multiple of 6")
    yield with_key(trial)


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm, separate or sharing, with one trial for each seed. All trials have the same experts in one order."""

    arm: str
    sharing: str
    trials: tuple[TrialResult, ...]

    def values(self, value: Callable[[TrialResult], V]) -> dict[Seeds, V]:
        return {(model_seed(trial), trial.seed): value(trial) for trial in self.trials}

    def costs(self) -> dict[Seeds, list[float]]:
        """Return the compute of each expert, in GFLOP."""
        return self.values(lambda trial: [member.compute / GIGA for member in trial.members])

    def experts(self, evaluation: int = -1) -> dict[str, Accuracies]:
        """Return the accuracies of each expert by name, at one of its evaluations."""

        def of(expert: int) -> Accuracies:
            return self.values(lambda t: [t.members[expert].curve(task)[evaluation].pass_at_1 for task in SPECS])

        return {member.name: of(expert) for expert, member in enumerate(self.trials[0].members)}

    def accuracies(self) -> dict[str, Accuracies]:
        """Return those of the own expert before and after, of the best expert, and of each ensemble mode, by name.

        The best expert on a domain is the same for all seeds: the best in their mean.
        """
        before, after = self.experts(0), self.experts()
        if self.arm == ONE:
            return {"the model, before": before[ONE], "the model": after[ONE]}
        best = [
            max(after, key=lambda name: fmean(each[domain] for each in after[name].values()))
            for domain in range(len(SPECS))
        ]
        found = {BEFORE: _chosen(before, DOMAINS), OWN: _chosen(after, DOMAINS), BEST: _chosen(after, best)}
        together = self.values(lambda trial: {(e.mode, e.task): e.pass_at_1 for e in trial.final_evaluation})
        for mode in dict.fromkeys(each.mode for each in self.trials[0].final_evaluation):
            found[f"ensemble, {mode}"] = {seeds: [by[mode, task] for task in SPECS] for seeds, by in together.items()}
        return found


def _chosen(experts: dict[str, Accuracies], names: Sequence[str]) -> Accuracies:
    """Return the accuracies of the expert `names[i]` on the i-th domain."""
    return {seeds: [experts[name][seeds][at] for at, name in enumerate(names)] for seeds in experts[names[0]]}


def _at(values: Accuracies, place: int) -> Estimate:
    return estimate(over_seeds({seeds: each[place] for seeds, each in values.items()}))


def _over_domains(accuracies: Accuracies) -> Estimate:
    return estimate(over_seeds({seeds: fmean(values) for seeds, values in accuracies.items()}))


def cells_of(results: Sequence[TrialResult]) -> list[Cell]:
    found: dict[tuple[str, str], list[TrialResult]] = {}
    for result in results:
        method = str(result.labels["method"])
        place = (str(result.labels["arm"]), APART if method == ALONE else method)
        found.setdefault(place, []).append(result)
    return [Cell(*place, tuple(trials)) for place, trials in found.items()]


def write_hdee_report(experiment: Experiment, results: Sequence[TrialResult], out: Path) -> str:
    """Write all files into the folder `out`. Return the tables."""
    cells = cells_of(results)
    tables = "\n".join((arms_table(cells), differences_table(cells), experts_table(cells)))
    (out / "table.md").write_text(tables)
    (out / "results.json").write_bytes(document(experiment, results))
    write_csv(results, out / "curves.csv")
    write_steps_csv(results, out / "steps.csv")
    curves = {
        task: {f"{cell.arm}, {cell.sharing}": _curve(cell, domain) for cell in cells}
        for domain, task in enumerate(SPECS)
    }
    plot_panels(curves, out / "curves.png", y="greedy pass@1 of the domain")
    panels: dict[str, dict[str, dict[str, Estimate]]] = {}
    for cell in cells:
        means = {who: _over_domains(accuracies) for who, accuracies in cell.accuracies().items()}
        panels.setdefault(cell.sharing, {})[cell.arm] = means
    plot_rows(panels, out / "arms.png", x="greedy pass@1, mean of the domains")
    return tables


def arms_table(cells: Sequence[Cell]) -> str:
    """Return one row per metric of each cell: accuracy on each domain, their mean, and the compute of the whole arm."""
    head = ["arm", "sharing", "who", *DOMAINS, "mean of the domains", "compute, GFLOP", "seeds"]
    rows = [head, ["---"] * len(head)]
    for cell in cells:
        cost = estimate(over_seeds({seeds: sum(each) for seeds, each in cell.costs().items()})).mean
        for who, accuracies in cell.accuracies().items():
            found = [*(_at(accuracies, at) for at in range(len(SPECS))), _over_domains(accuracies)]
            rows.append([cell.arm, cell.sharing, who, *map(str, found), f"{cost:.1f}", str(len(cell.trials))])
    return markdown(rows)


def differences_table(cells: Sequence[Cell]) -> str:
    """Return the difference of each metric to the single model, averaged over the domains and paired by seed.

    The last column is the binomial error of that average for the sizes of the test sets.
    """
    head = ["arm", "sharing", "who", "less the one model", "test sets ±"]
    rows = [head, ["---"] * len(head)]
    one = next((cell for cell in cells if cell.arm == ONE), None)
    if one is None:
        return ""
    theirs = one.experts()[ONE]
    for cell in cells:
        for who, ours in cell.accuracies().items():
            if cell is not one and who != BEFORE:
                difference = interval(over_seeds({each: fmean(ours[each]) - fmean(theirs[each]) for each in ours}))
                rows.append([cell.arm, cell.sharing, who, str(difference), f"{_test_error(cell, ours):.3f}"])
    return markdown(rows)


def _test_error(cell: Cell, accuracies: Accuracies) -> float:
    variances = []
    for at, task in enumerate(SPECS):
        accuracy = _at(accuracies, at).mean
        variances.append(accuracy * (1 - accuracy) / cell.trials[0].members[0].curve(task)[-1].n)
    return math.sqrt(sum(variances)) / len(SPECS)


def experts_table(cells: Sequence[Cell]) -> str:
    """Return one row per expert: size, steps, compute, final accuracy on every domain. `*` marks its own domain."""
    head = ["arm", "sharing", "expert", "parameters", "steps", *DOMAINS, "compute, GFLOP"]
    rows = [head, ["---"] * len(head)]
    for cell in cells:
        for expert, (name, accuracies) in enumerate(cell.experts().items()):
            member = cell.trials[0].members[expert]
            marks = ["*" if name in (ONE, domain) else "" for domain in DOMAINS]
            known = [f"{_at(accuracies, at)}{mark}" for at, mark in enumerate(marks)]
            cost = _at(cell.costs(), expert).mean
            steps = str(len(member.steps["grad_norm"]))
            rows.append([cell.arm, cell.sharing, name, f"{member.parameters:,}", steps, *known, f"{cost:.1f}"])
    return markdown(rows)


def _curve(cell: Cell, domain: int) -> list[tuple[int, Estimate]]:
    """Return the accuracy of a domain's own expert at each evaluated step."""
    expert, task = 0 if cell.arm == ONE else domain, SPECS[domain]
    steps = [point.step for point in cell.trials[0].members[expert].curve(task)]
    curves = cell.values(lambda trial: trial.members[expert].curve(task))
    return [
        (step, estimate(over_seeds({seeds: curve[place].pass_at_1 for seeds, curve in curves.items()})))
        for place, step in enumerate(steps)
    ]
