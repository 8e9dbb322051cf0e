"""Which GPU is measured, and what the driver leaves out."""

import sys

import pytest

from ftis_node.lab.card import usage

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
