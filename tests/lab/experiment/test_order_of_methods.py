"""What the project stands for, in short: with an unlike peer's completions, F-TIS learns sooner than no correction.

Two tiny models of unlike size, each with its own systematic mistake; real swarms of two, two seeds, a dozen steps. What
is compared is the mean of the learning curve. The margin is less than half of what five seeds showed
(docs/research/results.md), so chance does not break it, and losing truncation and filter does.
"""

from __future__ import annotations

import shutil
from statistics import fmean
from typing import TYPE_CHECKING

import pytest

from ftis_node.config.manifest import load_manifest
from ftis_node.config.workers import LoraSection
from ftis_node.lab.experiment.pairs import resolve_pair
from ftis_node.lab.experiment.runner import run_trials
from ftis_node.lab.experiment.summary import series_of
from ftis_node.lab.experiment.trial_matrix import Experiment
from tests.trained_models import trained_model

if TYPE_CHECKING:
    from pathlib import Path

TASK = "arithmetic"
STEPS = 12
MARGIN = 0.05


@pytest.mark.timeout(900)
def test_ftis_is_ahead_of_nois_for_both_models(tmp_path: Path) -> None:
    base = load_manifest("arithmetic-compare")
    base = base.model_copy(update={"eval": base.eval.model_copy(update={"every_steps": 4, "limit": 256})})
    for size in ("s", "m"):
        shutil.copytree(trained_model(size, scale=1.0), tmp_path / f"{size}-0")
    experiment = Experiment(
        base=base,
        pairs=(resolve_pair("size", tmp_path, seed=0),),
        methods=("nois", "ftis"),
        task_spec=TASK,
        eval_specs=(TASK,),
        steps=STEPS,
        seeds=range(2),
        lora_adapter=LoraSection(),
    )
    lines = series_of(run_trials(experiment.trials(), tmp_path, jobs=2, watch=lambda fraction, what: None))
    learnt = {(line.method, line.model): line.along(TASK).mean for line in lines}
    for model in ("s", "m"):
        assert learnt["ftis", model] > learnt["nois", model] + MARGIN, learnt
    starts = [member.curve(TASK)[0].pass_at_1 for line in lines for member in line.members()]
    assert min(learnt.values()) > fmean(starts), "nothing was learnt at all"
