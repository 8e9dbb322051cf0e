"""Power cuts of each kind in a swarm: no acknowledged group or ban is lost, no number or step is used twice."""

import pytest

from tests.chaos.__main__ import ONE_THREAD, parse, run
from tests.chaos.evidence import Evidence
from tests.chaos.faults import power

SEED = 3


@pytest.mark.timeout(900)
def test_a_node_loses_nothing_acknowledged_in_power_cuts(tmp_path, monkeypatch, capsys):
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    arguments = parse(f"--kinds power --seed {SEED} --nodes 2 --faults {len(power.FAULTS)}".split())
    num_violations = run(arguments, tmp_path, Evidence(tmp_path))
    lines = capsys.readouterr().out
    assert num_violations == 0, lines
    for fault in power.FAULTS:
        assert f" {fault.name} on " in lines
