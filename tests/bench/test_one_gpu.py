"""Both workers on one GPU: the measurement runs on a CPU too, and the first visible GPU is read."""

import sys

import pytest

import one_gpu
from bench.card import usage


def test_the_figures_of_both_workers_come_after_the_plan():
    noted: list[dict[str, object]] = []

    def note(**figures):
        noted.append(figures)

    one_gpu.measure("2m", lora=False, device="cpu", small=True, note=note)
    assert "planned_gib" in noted[0]
    found = {name: figure for figures in noted for name, figure in figures.items()}
    figures = ("engine_start_s", "peak_gib", "generated_tokens_per_s", "learner_tokens_per_s", "transfer_s")
    assert all(found[name] > 0 for name in figures)
    assert found["rounds"] == one_gpu.ROUNDS


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
    assert use == (mib * usage.MIB, None)
    assert usage.mean_busy([use]) is None
    assert usage.mean_busy([use, usage.DeviceUse(0, 0.5)]) == 0.5
