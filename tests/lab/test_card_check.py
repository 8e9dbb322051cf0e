"""`doctor --gpu`: its measurements run on a CPU too, and without a GPU it says so."""

import json
import sys

import pytest

from ftis_node.errors import MachineError
from ftis_node.lab.card import check, usage
from ftis_node.telemetry.terminal_text import MIB


def test_without_a_gpu_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "list_accelerators", list)
    with pytest.raises(MachineError, match="there is no GPU that torch can use"):
        check.check_card(tmp_path / "found.json", on_progress=lambda fraction, what: None)
    assert not (tmp_path / "found.json").exists()


def test_the_figures_of_both_workers_are_in_the_file_and_the_table(tmp_path, monkeypatch):
    monkeypatch.setenv("FTIS_ROLE", "generator")  # of the node that this container runs
    file, seen = tmp_path / "found.json", []

    def note(fraction, what):
        seen.append(json.loads(file.read_text()) if file.exists() else {})

    found = check.check_card(file, on_progress=note, device="cpu")
    assert json.loads(file.read_text()) == found
    assert any("planned_gib" in each and "engine_start_s" not in each for each in seen), "the plan comes first"
    figures = ("peak_gib", "generated_tokens_per_s", "learner_tokens_per_s", "transfer_s")
    assert all(found[name] > 0 for name in figures)
    assert found["sleep_s"] >= 0 <= found["wake_s"], "on a CPU less than half a millisecond"
    assert found["rounds"] == check.ROUNDS
    shown = "\n".join(check.table_of(found))
    assert all(text in shown for text in ("memory by the plan", "transfer of weights", "tokens/s"))


DRIVER = """#!{python}
import sys
used = {{"--id=0": 100, "--id=3": 300, "--id=GPU-ab": 500}}[sys.argv[-1]]
print(f"{{used}}, [N/A]")
"""


@pytest.mark.parametrize(("visible", "mib"), [(None, 100), ("", 100), ("3,1", 300), (" GPU-ab ,GPU-cd", 500)])
def test_the_first_visible_gpu_is_read_and_a_missing_load_is_none(tmp_path, monkeypatch, visible, mib):
    (tmp_path / "nvidia-smi").write_text(DRIVER.format(python=sys.executable))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(usage, "opened_nvml", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    use = usage.read_gpu()
    assert use == (mib * MIB, None)
    assert usage.mean_busy([use]) is None
    assert usage.mean_busy([use, usage.DeviceUse(0, 0.5)]) == 0.5
