"""The soak test's verdicts on known series: growth is detected, noise and saw teeth are not reported as growth."""

import numpy as np
import pytest

from soaking.sampling import MACHINE, Point
from soaking.slopes import Bounds, sen_slope, trend
from soaking.verdicts import findings_of, series_of, warm_up_minutes

MINUTES = np.arange(0.0, 50.0, 0.5)


def _noise(size: float, seed: int = 0) -> np.ndarray:
    """Return noise whose neighbors are correlated, as in samples of memory."""
    drawn = np.random.default_rng(seed).normal(size=len(MINUTES))
    return size * np.convolve(drawn, np.ones(4) / 2, mode="same")


def test_the_slope_is_the_median_of_all_pairs():
    peaked = np.array([0.0, 2.0, 4.0, 6.0, 100.0])
    assert sen_slope(np.arange(5.0), peaked) == 2.0, "six of ten pairs have this slope"


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        (500 + _noise(5), "flat"),
        (500 + 60 * MINUTES / 60 + _noise(5), "grows"),
        (500 - 60 * MINUTES / 60 + _noise(5), "falls"),
        (100 + 20 * (MINUTES % 7) / 7, "flat"),
        (500 + 5 * MINUTES / 60, "flat"),  # significant, but a hundredth per hour
        (500 + 10 * np.floor(MINUTES / 10), "grows"),  # in steps
        (500 + _noise(400), "unclear"),
        (np.full(len(MINUTES), 7.0), "flat"),
    ],
)
def test_the_verdict_on_a_series(values, verdict):
    found_trend = trend(MINUTES.tolist(), values.tolist())
    assert found_trend is not None
    assert found_trend.verdict(Bounds()) == verdict, found_trend


def test_nodes_are_summed_and_the_warm_up_is_left_out():
    def points(node, leak):
        return [Point(float(m), node, "rss_mib", "daemon", 100 + 20 * min(m, 10) + leak * m) for m in MINUTES]

    assert warm_up_minutes(50) == 10
    for leak, verdict in ((0.0, "flat"), (1.0, "grows")):
        (series,) = series_of([*points("node-0", 0.0), *points("node-1", leak)])
        (found,) = findings_of([series], after=warm_up_minutes(50))
        assert (found.verdict, round(found.trend.slope)) == (verdict, round(60 * leak))


@pytest.mark.parametrize(("num_disturbed", "verdict"), [(20, "flat"), (60, "unclear"), (0, "grows")])
def test_lags_are_not_judged_while_the_host_takes_processor_time(num_disturbed, verdict):
    """Lags grow with the time that the host takes, in the last of 40 minutes or in most of them."""
    host = [
        Point(float(m), MACHINE, "stolen_percent", "", 9.0 * (i >= 100 - num_disturbed)) for i, m in enumerate(MINUTES)
    ]
    lags = [Point(float(m), "node-0", "lag_ms", "mean", 3.0 + (m - 10 if m >= 40 else 0)) for m in MINUTES]
    if not num_disturbed:
        lags = [point._replace(value=3.0 + point.minute) for point in lags]
    found = {one.series.quantity: one.verdict for one in findings_of(series_of([*host, *lags]), after=10)}
    assert found["lag_ms"] == verdict
