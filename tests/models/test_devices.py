"""The GPUs of a machine are listed without an import of torch in the calling process; unusable ones are named."""

import subprocess
import sys

import pytest

from ftis_node.models.accelerators import Accelerator, unusable_gpu, unusable_system, unused_gpu

LIST_SCRIPT = """
import sys
from ftis_node.models import accelerators, pick_device
from ftis_node.errors import MachineError
version, driver, probe, smi = sys.argv[1:]
accelerators.metadata.version = lambda name: version
accelerators.DRIVER_FILES = (driver,)
accelerators.PROBE = probe or accelerators.PROBE
accelerators.FREE_MEMORY = (sys.executable, "-c", smi)
try:
    found = [(each.name, each.memory_bytes, each.free_bytes) for each in accelerators.list_accelerators()]
    print(found, pick_device("auto"))
except MachineError as error:
    print(error)
sys.exit("torch was loaded" if "torch" in sys.modules else 0)
"""
NO_FILE = "/dev/no-such-gpu"
TWO_CARDS = """
print("a warning")
print('[["card", 5, [8, 9], "one", false], ["other", 7, [9, 0], "two", false]]')
"""
FREE = 'print("GPU-two, 3\\nGPU-one, [N/A]\\nGPU-three, 5")'
BROKEN = "raise SystemExit('no driver')"
MIB = 1 << 20


@pytest.mark.parametrize(
    ("version", "driver", "probe", "smi", "found"),
    [
        ("2.13.0+cpu", __file__, BROKEN, BROKEN, "[] cpu"),
        ("2.13.0", NO_FILE, BROKEN, BROKEN, "[] cpu"),
        ("2.13.0", __file__, TWO_CARDS, FREE, f"[('card', 5, None), ('other', 7, {3 * MIB})] cuda"),
        ("2.13.0", __file__, TWO_CARDS, BROKEN, "[('card', 5, None), ('other', 7, None)] cuda"),
        ("2.13.0", __file__, BROKEN, BROKEN, "torch cannot list the GPUs: no driver; see `ftis-node doctor`"),
    ],
    ids=["a build for CPUs", "no driver", "two cards", "no nvidia-smi", "torch is broken"],
)
def test_torch_is_asked_for_gpus_only_if_there_may_be_one(version, driver, probe, smi, found):
    done = subprocess.run(
        [sys.executable, "-c", LIST_SCRIPT, version, driver, probe, smi], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == found


def test_gpus_and_systems_that_cannot_work_are_named_in_one_line():
    turing, amd = Accelerator("Tesla T4", 16 << 30, (7, 5)), Accelerator("Radeon", 24 << 30, (11, 0), is_amd=True)
    line = str(unusable_gpu(turing))
    assert line.startswith('Tesla T4 has compute capability 7.5, and vLLM and bfloat16 need 8.0: device = "cpu" in no')
    assert "\n" not in line and unusable_gpu(turing, is_float32=True) is None
    assert str(unusable_gpu(amd, is_float32=True)).startswith("Radeon is an AMD GPU, which ftis-node does not support")
    assert unusable_gpu(Accelerator("L4", 24 << 30, (8, 9))) is None
    assert "Apple" in str(unusable_system("darwin", "24.1.0"))
    assert "WSL2" in str(unusable_system("linux", "4.4.0-19041-Microsoft"))
    assert unusable_system("linux", "5.15.90.1-microsoft-standard-WSL2") is unusable_system("linux", "6.8.0") is None


def test_an_amd_gpu_beside_a_torch_for_cpus_stays_unused(tmp_path):
    (tmp_path / "kfd").touch()
    assert "models run on the CPU" in str(unused_gpu(str(tmp_path / "kfd")))
    assert unused_gpu(str(tmp_path / "none")) is None
