"""Domain experts of different size or length of training, at equal total compute (HDEE, arXiv 2502.19385).

Three domains of rising difficulty, an expert for each, and four ways to spend the same compute on them:

| arm     | experts of easy, medium, hard       | what differs                                         |
|---------|-------------------------------------|------------------------------------------------------|
| `equal` | sm, sm, sm, S steps each            | nothing                                              |
| `steps` | sm, sm, sm, S/2, S and 3S/2 steps   | harder domains get more steps                        |
| `sizes` | s, sm, m, S steps each              | harder domains get larger models                     |
| `one`   | one sm, 3S steps on the mixture     | one model for all                                    |

Compute is counted as usual: 6 operations per parameter and trained completion token, 2 per generated one. Every update
uses the same number of completions. The number of steps is adjusted so that all arms cost the same as `equal`. The
actual compute of a trial is counted from its tokens (`MemberResult.compute`).

The experts either train separately on their own groups (the method `alone`), or share. Then each generates a part of
every update for its own domain and receives the others'. Experts that have finished leave, and the others generate
more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ftis_node.errors import UsageError
from ftis_node.lab.experiment.pairs import HDEE, Pair
from ftis_node.lab.experiment.rounds import ALONE, Rounds
from ftis_node.lab.experiment.trial import FinalEvaluation, Trial, TrialMember
from ftis_node.lab.experiment.trial_matrix import TrialSetting, with_key
from ftis_node.lab.experiment.trial_result import GENERATED_COST, TRAINED_COST
from ftis_node.lab.tiny import RECIPES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ftis_node.lab.experiment.trial_matrix import Experiment
    from ftis_node.lab.tiny import Size

DOMAINS: Final = ("easy", "medium", "hard")
SPECS: Final = ("arithmetic:no-carry", "arithmetic:carry", "arithmetic:borrow")
MIXTURE: Final = "+".join(sorted(SPECS))
ONE: Final = "one"
UPDATE: Final = 6  # groups of an update that three, two or one expert share evenly
TRIED_PERCENT: Final = range(50, 151)  # percent of the usual steps


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
    exam = (
        FinalEvaluation(SPECS, limit=base.eval.limit, max_tokens=base.sampling.max_total_tokens, gate_task=MIXTURE)
        if arm != ONE
        else None
    )
    trial = replace(trial, steps=max(steps), apart=is_apart, exam=exam, labels=trial.labels | {"arm": arm})
    if not is_apart and not trial.rounds(trial.members).is_even:
        num_prompts = base.step.own_groups + base.step.foreign_groups
        raise UsageError(f"--prompts {num_prompts}: three experts share an update, then two: use a multiple of 6")
    yield with_key(trial)
