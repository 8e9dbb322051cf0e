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
from typing import Final

from ftis_node.errors import UsageError
from ftis_node.lab.experiment.pairs import HDEE, Pair, TrialMember
from ftis_node.lab.experiment.plots import plot_panels, plot_rows
from ftis_node.lab.experiment.report import PairedDifference, document, interval, write_steps_csv
from ftis_node.lab.experiment.rounds import Rounds
from ftis_node.lab.experiment.specs import ALONE
from ftis_node.lab.experiment.summary import Estimate, estimate, markdown, model_seed, over_seeds, write_csv
from ftis_node.lab.experiment.trial import FinalEvaluation, Trial
from ftis_node.lab.experiment.trial_matrix import Experiment, TrialSetting, with_key
from ftis_node.lab.experiment.trial_result import GENERATED_COST, TRAINED_COST, MemberResult, TrialResult
from ftis_node.lab.tiny_sums import RECIPES, Size

Figure = Callable[[TrialResult, str], float]  # from a trial and a domain's task

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
    """One arm, separate or sharing, with one trial for each seed."""

    arm: str
    sharing: str
    trials: tuple[TrialResult, ...]

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.trials[0].members]

    def over_seeds(self, figure: Figure, task: str) -> Estimate:
        """Return mean and error of a metric for one domain."""
        return self._estimate(lambda trial: figure(trial, task))

    def over_domains(self, figure: Figure) -> Estimate:
        """Return mean and error of a metric that is averaged over the domains."""
        return self._estimate(lambda trial: _over_domains(figure, trial))

    def compute(self, name: str | None = None) -> Estimate:
        """Return the compute of one expert, or of all experts, in GFLOP."""
        return self._estimate(
            lambda trial: sum(each.compute for each in trial.members if name in (None, each.name)) / GIGA
        )

    def values(self, value: Callable[[TrialResult], float]) -> dict[tuple[int, int], float]:
        """Return a value of each trial by (model seed, seed)."""
        return {(model_seed(trial), trial.seed): value(trial) for trial in self.trials}

    def _estimate(self, value: Callable[[TrialResult], float]) -> Estimate:
        return estimate(over_seeds(self.values(value)))

    def figures(self) -> dict[str, Figure]:
        """Return the metrics of the cell by name: own expert before and after, best expert, and each ensemble mode."""
        if self.arm == ONE:
            return {"the model, before": _at(ONE, 0), "the model": _at(ONE, -1)}
        found: dict[str, Figure] = {BEFORE: _own(0), OWN: _own(-1), BEST: self._best}
        modes = dict.fromkeys(each.mode for each in self.trials[0].final_evaluation)
        return found | {f"ensemble, {mode}": _together(mode) for mode in modes}

    def _best(self, trial: TrialResult, task: str) -> float:
        """Return the accuracy of the expert that is best on this domain in the mean over seeds."""
        means = {name: fmean(_at(name, -1)(each, task) for each in self.trials) for name in self.names}
        return _at(max(means, key=means.__getitem__), -1)(trial, task)


def _over_domains(figure: Figure, trial: TrialResult) -> float:
    return fmean(figure(trial, task) for task in SPECS)


def _member(trial: TrialResult, name: str) -> MemberResult:
    return next(member for member in trial.members if member.name == name)


def _at(name: str, place: int) -> Figure:
    return lambda trial, task: _member(trial, name).curve(task)[place].pass_at_1


def _own(place: int) -> Figure:
    return lambda trial, task: _at(_expert_of(task), place)(trial, task)


def _together(mode: str) -> Figure:
    return lambda trial, task: next(e.pass_at_1 for e in trial.final_evaluation if (e.task, e.mode) == (task, mode))


def _expert_of(task: str) -> str:
    return DOMAINS[SPECS.index(task)]


def cells_of(results: Sequence[TrialResult]) -> list[Cell]:
    """Return the cells, in the order of the trials."""
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
    curves = {task: {f"{cell.arm}, {cell.sharing}": _curve(cell, task) for cell in cells} for task in SPECS}
    plot_panels(curves, out / "curves.png", y="greedy pass@1 of the domain")
    panels = {
        sharing: {
            cell.arm: {who: cell.over_domains(figure) for who, figure in cell.figures().items()}
            for cell in cells
            if cell.sharing == sharing
        }
        for sharing in dict.fromkeys(cell.sharing for cell in cells)
    }
    plot_rows(panels, out / "arms.png", x="greedy pass@1, mean of the domains")
    return tables


def arms_table(cells: Sequence[Cell]) -> str:
    """Return one row per metric of each cell: accuracy on each domain, their mean, and the compute of the whole arm."""
    head = ["arm", "sharing", "who", *DOMAINS, "mean of the domains", "compute, GFLOP", "seeds"]
    rows = [head, ["---"] * len(head)]
    for cell in cells:
        for who, figure in cell.figures().items():
            estimates = [*(cell.over_seeds(figure, task) for task in SPECS), cell.over_domains(figure)]
            cost = f"{cell.compute().mean:.1f}"
            rows.append([cell.arm, cell.sharing, who, *map(str, estimates), cost, str(len(cell.trials))])
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
    for cell in cells:
        for who, figure in cell.figures().items():
            if cell is not one and who != BEFORE:
                difference, error = _less_one(cell, one, figure), f"{_test_error(cell, figure):.3f}"
                rows.append([cell.arm, cell.sharing, who, str(difference), error])
    return markdown(rows)


def _less_one(cell: Cell, one: Cell, figure: Figure) -> PairedDifference:
    ours = cell.values(lambda trial: _over_domains(figure, trial))
    theirs = one.values(lambda trial: _over_domains(_at(ONE, -1), trial))
    return interval(over_seeds({seeds: ours[seeds] - theirs[seeds] for seeds in ours}))


def _test_error(cell: Cell, figure: Figure) -> float:
    variances = []
    for task in SPECS:
        accuracy = cell.over_seeds(figure, task).mean
        variances.append(accuracy * (1 - accuracy) / cell.trials[0].members[0].curve(task)[-1].n)
    return math.sqrt(sum(variances)) / len(SPECS)


def experts_table(cells: Sequence[Cell]) -> str:
    """Return one row per expert: size, steps, compute, final accuracy on every domain. `*` marks its own domain."""
    head = ["arm", "sharing", "expert", "parameters", "steps", *DOMAINS, "compute, GFLOP"]
    rows = [head, ["---"] * len(head)]
    for cell in cells:
        for name in cell.names:
            member = _member(cell.trials[0], name)
            known = [
                f"{cell.over_seeds(_at(name, -1), task)}{'*' if name in (ONE, _expert_of(task)) else ''}"
                for task in SPECS
            ]
            steps, cost = str(len(member.steps["grad_norm"])), f"{cell.compute(name).mean:.1f}"
            rows.append([cell.arm, cell.sharing, name, f"{member.parameters:,}", steps, *known, cost])
    return markdown(rows)


def _curve(cell: Cell, task: str) -> list[tuple[int, Estimate]]:
    name = ONE if cell.arm == ONE else _expert_of(task)
    steps = [point.step for point in _member(cell.trials[0], name).curve(task)]
    return [(step, cell.over_seeds(_at(name, place), task)) for place, step in enumerate(steps)]
