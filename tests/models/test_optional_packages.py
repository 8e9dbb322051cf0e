"""transformers imports models without scipy, and other libraries of the process still import it."""

from __future__ import annotations

import subprocess
import sys

SKIP = "from ftis_node.models import skip_unused_packages\nskip_unused_packages()\n"
LOAD = "import sys\nfrom transformers import Qwen2ForCausalLM\nprint('scipy' in sys.modules)\n"
USE = "import scipy.optimize\nprint(scipy.optimize.brentq(lambda x: x - 2, 0, 3) == 2)\n"


def _run(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_transformers_does_not_import_scipy_for_a_model() -> None:
    assert _run(LOAD) == ["True"], "transformers no longer imports scipy: delete skip_unused_packages"
    assert _run(SKIP + LOAD + USE) == ["False", "True"]


def test_a_process_that_uses_scipy_keeps_it() -> None:
    assert _run(USE + SKIP + USE) == ["True", "True"]
