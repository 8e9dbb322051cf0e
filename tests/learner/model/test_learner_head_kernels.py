"""The output head's fused kernels compute what the operations compute."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "head_kernels_program.py"


def test_the_fused_kernels_equal_the_operations():
    """Triton's interpreter is set by the environment before the import, so another process runs it on the CPU."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, PROGRAM], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found["cases"]) == 4
    for case in found["cases"]:
        assert case["chosen"] == case["wrong_zeros"] == case["wrong_signs"] == case["dtype"] == 0
        assert case["log_prob"] < 1e-6
    *exact, rounded, large = [case["gradient"] for case in found["cases"]]
    assert max(*exact, large) < 1e-6
    assert rounded <= 2**-7, "one unit in the last place of bfloat16"
    assert 0 < found["head"] < 1e-5
    right, wrong = found["trials"]
    assert right == "" and "they are off by " in wrong
