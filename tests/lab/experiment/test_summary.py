"""Tables and curves from results written by hand."""

import csv
from typing import Any

import msgspec
import pytest

from ftis_node.lab.experiment.plots import plot_curves, plot_methods, plot_panels, plot_sweep
from ftis_node.lab.experiment.report import FIGURES, STEP_COLUMNS, steps_table, write_steps_csv
from ftis_node.lab.experiment.summary import Estimate, alone_line, estimate, markdown_table, series_of, write_csv
from ftis_node.lab.experiment.trial_result import Evaluation, MemberResult, TrialResult
from ftis_node.view.formats import MAIN


def member(name: str, curve: list[float], *, tokens_a_step: int, received_a_step: int = 0) -> MemberResult:
    """Return the result of a node that was evaluated every 10 steps."""
    points = [
        Evaluation(10 * k, "sums", accuracy, 64, 0.5 if k else None, 10 * k * tokens_a_step, 10 * k * received_a_step)
        for k, accuracy in enumerate(curve)
    ]
    return MemberResult(name, name, 10, 10, 1, 1, 0, {}, points, {"kept_fraction": [1.0, 0.5]})


def result(method: str, seed: int, *members: MemberResult, **labels: Any) -> TrialResult:
    place = {"pair": "size", "method": method, "share": "vertical", "delay": "none", "nodes": 2}
    place |= {"lie": "none", "codec": "exact"}
    return TrialResult(f"{method}-{seed}", place | labels, {}, 20, seed, list(members), 1.0)


RESULTS = [
    result("alone", 0, member("s", [0.0, 0.5, 0.8], tokens_a_step=100), nodes=1),
    result("alone", 1, member("s", [0.0, 0.7, 1.0], tokens_a_step=100), nodes=1),
    result("ftis", 0, member("s", [0.0, 0.57, 0.9], tokens_a_step=50, received_a_step=50)),
    result("ftis", 1, member("s", [0.0, 0.855, 0.9], tokens_a_step=50, received_a_step=50)),
]


def test_mean_and_standard_error_by_hand():
    found = [str(estimate(values)) for values in ([0.8, 1.0], [1.0, 2.0, 6.0], [0.5])]
    assert found == ["0.900 ± 0.100", "3.000 ± 1.528", "0.500"]  # the second: deviation sqrt(7), over sqrt(3)


def test_a_line_contains_all_seeds():
    alone, ftis = series_of(RESULTS)
    assert (alone.method, ftis.method, len(ftis.runs)) == ("alone", "ftis", 2)
    assert str(alone.final("sums")) == "0.900 ± 0.100"
    assert ftis.along("sums").mean == pytest.approx((0.735 + 0.8775) / 2)  # step 0 does not count
    assert [step for step, _ in ftis.curve("sums")] == [0, 10, 20]
    assert ftis.tokens("sums") == (1000, 1000)
    assert ftis.token_curve("sums") == [(50 * step, accuracy) for step, accuracy in ftis.curve("sums")]


def test_copies_of_a_model_do_not_count_as_seeds():
    def swarm(seed):
        copies = [member(name, [0.0, end + seed], tokens_a_step=50) for name, end in (("s", 0.4), ("s~2", 0.6))]
        return result("ftis", seed, *copies)

    (line,) = series_of([swarm(0), swarm(1)])
    assert str(line.final("sums")) == "1.000 ± 0.500"  # of 0.5 and 1.5


def test_the_csv_has_fixed_columns(tmp_path):
    write_csv(RESULTS, tmp_path / "curves.csv")
    rows = list(csv.DictReader((tmp_path / "curves.csv").read_text().splitlines()))
    columns = "pair,method,model,seed,step,task,pass_at_1,reward_mean,tokens_generated,tokens_received"
    assert ",".join(rows[0]) == columns
    assert len(rows) == 12
    assert rows[-1] == {
        "pair": "size", "method": "ftis", "model": "s", "seed": "1", "step": "20", "task": "sums",
        "pass_at_1": "0.900000", "reward_mean": "0.500000", "tokens_generated": "1000", "tokens_received": "1000",
    }  # fmt: skip
    assert rows[0]["reward_mean"] == ""  # before the first step


def test_a_varied_axis_is_in_the_label(tmp_path):
    late = [result("ftis", seed, member("s", [0.0, 0.4], tokens_a_step=50), delay="fixed:8") for seed in (0, 1)]
    lines = series_of([*RESULTS[2:], *late])
    assert [line.method for line in lines] == ["ftis delay=none", "ftis delay=fixed:8"]
    plot_sweep(lines, [*RESULTS[2:], *late], "sums", tmp_path / "sweep.png")
    plot_sweep(series_of(RESULTS), RESULTS, "sums", tmp_path / "none.png")
    plot_curves(series_of(RESULTS), "sums", tmp_path / "curves.png")
    plot_methods(series_of(RESULTS), "sums", tmp_path / "methods.png")
    for name in ("sweep.png", "curves.png", "methods.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "none.png").exists()


def test_curves_have_bars_over_seeds_whole_steps_and_one_legend(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    curve = [(step, Estimate(0.1 * step, 0.05)) for step in range(3)]
    one_seed = [(step, Estimate(0.1 * step, None)) for step in range(3)]
    panels = {title: {"alone": one_seed, "ftis": curve} for title in ("s", "m")}
    plot_panels(panels, tmp_path / "curves.png", y="pass@1", dashed={"alone"})
    (figure,) = drawn
    for panel in figure.axes:
        alone, ftis = panel.containers
        assert (alone.has_yerr, ftis.has_yerr) == (False, True)
        low, high = ftis.lines[2][0].get_segments()[1][:, 1]
        assert (low, high) == pytest.approx((0.05, 0.15))
        assert ftis.lines[0].get_color() == MAIN
        assert all(float(tick).is_integer() for tick in panel.get_xticks())
        assert panel.get_legend() is None
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["alone", "ftis"]


def test_a_swarm_with_a_late_peer_is_compared_with_alone_without_delay():
    late = result("ftis", 0, member("s", [0.0, 0.8], tokens_a_step=50), delay="fixed:8@peer", nodes=4)
    late.members.append(member("s@late", [0.0, 0.8], tokens_a_step=50))
    alone = [
        result("alone", 0, member("s", [0.0, end], tokens_a_step=100), nodes=1, delay=delay)
        for delay, end in (("fixed:8", 0.4), ("none", 0.8))
    ]
    lines = series_of([*alone, late, result("ftis", 0, member("s", [0.0, 0.8], tokens_a_step=50))])
    assert [line.model for line in lines[2:4]] == ["s", "s@late"], "a prompt node and a late one are separate lines"
    for line in lines[2:4]:
        found = alone_line(lines, line)
        assert found is not None and found.labels["delay"] == "none"


def test_the_table_has_a_row_for_each_line():
    table = markdown_table(series_of(RESULTS), ["sums"]).splitlines()
    assert len(table) == 2 + 2
    assert "| size | ftis | s | 0.900 ± 0.000 |" in table[3]
    assert table[3].endswith("| 0.75 | 2 |")


def test_the_csv_of_steps_has_a_row_for_each_step(tmp_path):
    whole, other = member("s", [0.0, 0.5], tokens_a_step=100), member("m", [0.0], tokens_a_step=1)
    for each in (whole, other):
        each.steps.update({figure: [None, None] for figure in FIGURES if figure not in each.steps})
    whole.steps.update({"foreign_kept_negatives": [None, 0.25], "foreign_mean_kl": [1 / 3, 5.0]})
    write_steps_csv([result("ftis", 4, whole, other)], tmp_path / "steps.csv")
    rows = list(csv.DictReader((tmp_path / "steps.csv").read_text().splitlines()))
    assert tuple(rows[0]) == STEP_COLUMNS
    found = [(row["pair"], row["method"], row["model"], row["seed"], row["step"]) for row in rows]
    assert found == [("size", "ftis", model, "4", step) for model in ("s", "m") for step in ("1", "2")]
    assert [row["kept_fraction"] for row in rows] == ["1", "0.5"] * 2
    assert [row["foreign_kept_negatives"] for row in rows] == ["", "0.25", "", ""]  # empty where it is unknown
    assert rows[0]["foreign_mean_kl"] == "0.333333"


def test_step_figures_are_means_over_the_runs_that_have_them():
    steps = [[None, 0.2, 0.4], [0.6, None, 0.8]]
    one = member("s", [0.0, 0.5], tokens_a_step=1)
    made = [msgspec.structs.replace(one, steps={"own_signal": each}) for each in steps]
    (line,) = series_of([result("ftis", seed, each) for seed, each in enumerate(made)])
    assert line.step_means("own_signal") == [(1, 0.6), (2, 0.2), (3, pytest.approx(0.6))]
    assert line.step_means("foreign_ess") == []
    (row,) = steps_table([line], "sums").splitlines()[2:]
    assert row.startswith("| size | ftis | s | 0.000 ± 0.000 | 0.467 | - |"), "means over steps of means over runs"
