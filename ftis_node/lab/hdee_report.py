"""Results of `compare --pair hdee`: accuracy of each expert and of all together, and their cost.

Means and errors are those of `experiment/summary.py`. A *cell* is one arm, separate or sharing. The arm `one` has as
much compute as all experts of another arm, so it makes more updates than any of them. Therefore each difference to it
is taken three times:

    equal compute   the end of both
    equal updates   `one` after as many updates as the answering expert has made, of an ensemble, the longest-trained
    equal time      `one` at the time at which the arm ends; its experts train side by side, each on its own machine

Machines have one speed, so the time of an expert is its compute, and that of an arm is that of its slowest expert.
Seconds are not used: all nodes of a trial share its process. Accuracies between two evaluations are interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final, TypeVar

import numpy as np

from ftis_node.lab.experiment.plots import plot_panels, plot_rows
from ftis_node.lab.experiment.report import document, interval, provenance, write_steps_csv
from ftis_node.lab.experiment.specs import ALONE
from ftis_node.lab.experiment.summary import Estimate, estimate, markdown, model_seed, over_seeds, write_csv
from ftis_node.lab.experiment.trial_matrix import Experiment
from ftis_node.lab.experiment.trial_result import Evaluation, MemberResult, TrialResult
from ftis_node.lab.hdee import ONE, Domain, Domains

V = TypeVar("V")
Seeds = tuple[int, int]  # model seed, seed
Accuracies = dict[Seeds, list[float]]  # on each domain, by the seeds of the trial
Axis = Callable[[MemberResult, Evaluation], float]

APART: Final = "apart"
BEFORE, OWN, BEST = "own expert, before", "own expert", "best expert"
GIGA: Final = 1e9
UNKNOWN: Final = "-"


@dataclass(frozen=True, slots=True)
class Row:
    """Accuracies of a model or an ensemble on the trained domains, and on the excluded ones unless it has none.

    `updates` is the number of updates of the model that answers, for each trained domain.
    """

    who: str
    trained: Accuracies
    updates: tuple[int, ...]
    excluded: Accuracies | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm, separate or sharing, with one trial for each seed. All trials have the same experts in one order."""

    arm: str
    sharing: str
    domains: Domains
    trials: tuple[TrialResult, ...]

    @property
    def members(self) -> list[MemberResult]:
        return self.trials[0].members

    def values(self, value: Callable[[TrialResult], V]) -> dict[Seeds, V]:
        return {(model_seed(trial), trial.seed): value(trial) for trial in self.trials}

    def costs(self) -> dict[Seeds, list[float]]:
        """Return the compute of each expert, in GFLOP."""
        return self.values(lambda trial: [member.compute / GIGA for member in trial.members])

    def accuracies_of(self, expert: int, domains: Sequence[Domain], evaluation: int = -1) -> Accuracies:
        """Return the accuracies of one expert at one of its evaluations."""
        return self.values(lambda t: [t.members[expert].curve(each.task)[evaluation].pass_at_1 for each in domains])

    def rows(self) -> list[Row]:
        """Return those of the own expert before and after, of the best expert, and of each mode of the ensemble.

        The best expert on a domain is the same for all seeds: the best in their mean.
        """
        trained, excluded = self.domains.trained, self.domains.excluded
        updates = [len(member.steps["grad_norm"]) for member in self.members]
        if self.arm == ONE:
            both = [(self.accuracies_of(0, trained, at), self.accuracies_of(0, excluded, at)) for at in (0, -1)]
            names = ("the model, before", "the model")
            return [
                Row(who, known, (num,) * len(trained), other)
                for who, num, (known, other) in zip(names, (0, updates[0]), both, strict=True)
            ]
        own = list(range(len(trained)))
        rows = [
            Row(BEFORE, self._chosen(own, trained, 0), (0,) * len(trained)),
            Row(OWN, self._chosen(own, trained), tuple(updates)),
        ]
        best = self._best(trained)
        others = self._chosen(self._best(excluded), excluded)
        rows.append(Row(BEST, self._chosen(best, trained), tuple(updates[expert] for expert in best), others))
        together = self.values(lambda trial: {(e.mode, e.task): e.pass_at_1 for e in trial.final_evaluation})
        modes = dict.fromkeys(each.mode for each in self.trials[0].final_evaluation)
        for mode in [mode for mode in modes if all((mode, trained[0].held_out) in by for by in together.values())]:
            known, other = (
                {seeds: [by[mode, each.held_out] for each in domains] for seeds, by in together.items()}
                for domains in (trained, excluded)
            )
            rows.append(Row(f"ensemble, {mode}", known, (max(updates),) * len(trained), other))
        return rows

    def _best(self, domains: Sequence[Domain]) -> list[int]:
        """Return the expert that is the best in the mean on each domain."""
        ends = [self.accuracies_of(expert, domains).values() for expert in range(len(self.members))]
        means = [[fmean(each[at] for each in values) for values in ends] for at in range(len(domains))]
        return [max(range(len(each)), key=each.__getitem__) for each in means]

    def _chosen(self, experts: Sequence[int], domains: Sequence[Domain], evaluation: int = -1) -> Accuracies:
        """Return the accuracies of the expert `experts[i]` on the i-th domain."""
        every = [self.accuracies_of(expert, domains, evaluation) for expert in range(len(self.members))]
        return {seeds: [every[expert][seeds][at] for at, expert in enumerate(experts)] for seeds in every[0]}

    def time(self) -> dict[Seeds, float]:
        """Return the compute of the slowest expert, in GFLOP."""
        return {seeds: max(each) for seeds, each in self.costs().items()}


def cells_of(domains: Domains, results: Sequence[TrialResult]) -> list[Cell]:
    found: dict[tuple[str, str], list[TrialResult]] = {}
    for result in results:
        method = str(result.labels["method"])
        place = (str(result.labels["arm"]), APART if method == ALONE else method)
        found.setdefault(place, []).append(result)
    return [Cell(*place, domains, tuple(trials)) for place, trials in found.items()]


def write_hdee_report(experiment: Experiment, domains: Domains, results: Sequence[TrialResult], out: Path) -> str:
    """Write all files into the folder `out`. Return the tables."""
    cells = cells_of(domains, results)
    tables = [arms_table(cells, domains), differences_table(cells), experts_table(cells, domains), provenance(results)]
    text = "\n".join(filter(None, tables))
    (out / "table.md").write_text(text)
    (out / "results.json").write_bytes(document(experiment, results))
    write_csv(results, out / "curves.csv")
    write_steps_csv(results, out / "steps.csv")
    curves = {
        domain.task: {f"{cell.arm}, {cell.sharing}": _own_curve(cell, at) for cell in cells}
        for at, domain in enumerate(domains.trained)
    }
    plot_panels(curves, out / "curves.png", y="greedy pass@1 of the domain")
    panels: dict[str, dict[str, dict[str, Estimate]]] = {}
    for cell in cells:
        means = {row.who: _over_domains(row.trained) for row in cell.rows()}
        panels.setdefault(cell.sharing, {})[cell.arm] = means
    plot_rows(panels, out / "arms.png", x="greedy pass@1, mean of the domains")
    return text


def arms_table(cells: Sequence[Cell], domains: Domains) -> str:
    """Return one row per metric of each cell: accuracy on each domain, their means, compute and time of the arm."""
    excluded = [f"{domain.task}, excluded" for domain in domains.excluded]
    head = [
        *("arm", "sharing", "who", *(domain.task for domain in domains.trained), "mean of the domains"),
        *(*excluded, *(["mean of the excluded"] if excluded else [])),
        *("compute, GFLOP", "time, GFLOP", "seeds"),
    ]
    rows = []
    for cell in cells:
        cost = estimate(over_seeds({seeds: sum(each) for seeds, each in cell.costs().items()})).mean
        costs = [f"{value:.1f}" for value in (cost, estimate(over_seeds(cell.time())).mean)]
        for row in cell.rows():
            other = [UNKNOWN] * (len(excluded) + 1) if row.excluded is None else _estimates(row.excluded)
            rows.append(
                [
                    *(cell.arm, cell.sharing, row.who, *_estimates(row.trained)),
                    *(*(other if excluded else []), *costs, str(len(cell.trials))),
                ]
            )
    return markdown(head, rows)


def differences_table(cells: Sequence[Cell]) -> str:
    """Return the difference of each metric to the single model, averaged over the domains and paired by seed.

    The last column is the binomial error of that average for the sizes of the test sets.
    """
    one = next((cell for cell in cells if cell.arm == ONE), None)
    if one is None:
        return ""
    has_excluded = bool(one.domains.excluded)
    head = [
        *("arm", "sharing", "who", "less one, equal compute", "less one, equal updates", "less one, equal time"),
        *(["excluded: less one, equal compute"] if has_excluded else []),
        "test sets ±",
    ]
    rows = []
    (_, end) = one.rows()
    for cell in cells:
        times = cell.time()
        for row in cell.rows():
            if cell is one or row.who == BEFORE:
                continue
            at_updates = _along(one, lambda member, point: point.step, dict.fromkeys(row.trained, row.updates))
            at_time = _along(one, _compute, {seeds: (times[seeds],) * len(row.updates) for seeds in row.trained})
            rows.append(
                [
                    *(cell.arm, cell.sharing, row.who),
                    *(_difference(row.trained, theirs) for theirs in (end.trained, at_updates, at_time)),
                    *([_difference(row.excluded, end.excluded)] if has_excluded else []),
                    f"{_test_error(cell, row.trained):.3f}",
                ]
            )
    return markdown(head, rows)


def _difference(ours: Accuracies | None, theirs: Accuracies | None) -> str:
    if ours is None or theirs is None:
        return UNKNOWN
    return str(interval(over_seeds({each: fmean(ours[each]) - fmean(theirs[each]) for each in ours if each in theirs})))


def _along(one: Cell, axis: Axis, places: dict[Seeds, tuple[float, ...]]) -> Accuracies:
    """Return the accuracies of the single model on each domain at the place `places[seeds][i]` of an axis."""
    members = one.values(lambda trial: trial.members[0])
    return {
        seeds: [
            _interpolated(members[seeds], domain.task, axis, place)
            for domain, place in zip(one.domains.trained, places[seeds], strict=True)
        ]
        for seeds in places
        if seeds in members
    }


def _interpolated(member: MemberResult, task: str, axis: Axis, place: float) -> float:
    curve = member.curve(task)
    return float(np.interp(place, [axis(member, point) for point in curve], [point.pass_at_1 for point in curve]))


def _compute(member: MemberResult, point: Evaluation) -> float:
    """Return the GFLOP until a step. Without peers, a model trains on all tokens that it generates."""
    return member.compute / GIGA * point.tokens_generated / member.tokens_generated


def _test_error(cell: Cell, accuracies: Accuracies) -> float:
    variances = []
    for at, domain in enumerate(cell.domains.trained):
        accuracy = _at(accuracies, at).mean
        variances.append(accuracy * (1 - accuracy) / cell.members[0].curve(domain.task)[-1].n)
    return math.sqrt(sum(variances)) / len(variances)


def experts_table(cells: Sequence[Cell], domains: Domains) -> str:
    """Return one row per expert: size, steps, compute, final accuracy on every domain. `*` marks its own domain."""
    every = (*domains.trained, *domains.excluded)
    head = ["arm", "sharing", "expert", "parameters", "steps", *(each.task for each in every), "compute, GFLOP"]
    rows = []
    for cell in cells:
        for expert, member in enumerate(cell.members):
            accuracies = cell.accuracies_of(expert, every)
            is_own = [each in domains.trained and member.name in (ONE, each.expert) for each in every]
            known = [f"{_at(accuracies, at)}{'*' if own else ''}" for at, own in enumerate(is_own)]
            cost = _at(cell.costs(), expert).mean
            steps = str(len(member.steps["grad_norm"]))
            rows.append([cell.arm, cell.sharing, member.name, f"{member.parameters:,}", steps, *known, f"{cost:.1f}"])
    return markdown(head, rows)


def _estimates(accuracies: Accuracies) -> list[str]:
    """Return the estimate of each domain, and that of their mean."""
    num = len(next(iter(accuracies.values())))
    return [str(_at(accuracies, at)) for at in range(num)] + [str(_over_domains(accuracies)) if num else UNKNOWN]


def _at(values: Accuracies, place: int) -> Estimate:
    return estimate(over_seeds({seeds: each[place] for seeds, each in values.items()}))


def _over_domains(accuracies: Accuracies) -> Estimate:
    return estimate(over_seeds({seeds: fmean(values) for seeds, values in accuracies.items()}))


def _own_curve(cell: Cell, domain: int) -> list[tuple[int, Estimate]]:
    """Return the accuracy of a domain's own expert at each evaluated step."""
    expert, task = 0 if cell.arm == ONE else domain, cell.domains.trained[domain].task
    steps = [point.step for point in cell.members[expert].curve(task)]
    curves = cell.values(lambda trial: trial.members[expert].curve(task))
    return [
        (step, estimate(over_seeds({seeds: curve[place].pass_at_1 for seeds, curve in curves.items()})))
        for place, step in enumerate(steps)
    ]
