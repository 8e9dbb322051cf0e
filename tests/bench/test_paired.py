"""Paired differences of published curves: seeds of one model are one value, and another file may hold the base."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench/results/paired.py"
HEADER = "pair,method,model,seed,step,task,pass_at_1,reward_mean,tokens_generated,tokens_received,model_seed\n"


def _write(path: Path, method: str, ends: dict[tuple[int, int], float]) -> None:
    rows = [f"p,{method},s,{seed},4,t,{end},,10,0,{model}\n" for (model, seed), end in ends.items()]
    path.write_text(HEADER + "".join(rows))


def test_seeds_of_a_model_are_one_value_and_the_base_may_be_of_another_file(tmp_path):
    _write(tmp_path / "a.csv", "ftis", {(0, 0): 0.5, (0, 1): 0.7, (1, 0): 0.6, (1, 1): 0.8})
    _write(tmp_path / "b.csv", "alone", {(0, 0): 0.4, (0, 1): 0.4, (1, 0): 0.3, (1, 1): 0.3})
    options = [tmp_path / "a.csv", "--method", "ftis", "--base", "alone", "--base-curves", tmp_path / "b.csv"]
    done = subprocess.run([sys.executable, BENCH, *options], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])["differences"]["p t/s/end"]
    assert found["mean"] == pytest.approx(0.3)  # of 0.2 and 0.4, the means of the models
    assert found["error"] == pytest.approx(0.1)
    assert found["spread_of_seeds"] == pytest.approx(0.1414)
