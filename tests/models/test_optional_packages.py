"""transformers imports models without scipy, and other libraries of the process still import it."""

import subprocess
import sys

MODULE = "ftis_node.generation.engines.torch_engine"
SKIP = f"from ftis_node.models import import_quickly\nimport_quickly('{MODULE}')\n"
COLLECT = "import gc\nprint(gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
LOAD = "import sys\nfrom transformers import Qwen2ForCausalLM\nprint('scipy' in sys.modules)\n"
USE = "import scipy.optimize\nprint(scipy.optimize.brentq(lambda x: x - 2, 0, 3) == 2)\n"


def _run(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_transformers_does_not_import_scipy_for_a_model():
    assert _run(LOAD) == ["True"], "transformers no longer imports scipy: scipy need not be hidden"
    assert _run(SKIP + LOAD + USE + COLLECT) == ["False", "True", "True", "True"]


def test_scipy_is_hidden_after_an_import_of_transformers():
    assert _run("from transformers import AutoTokenizer\n" + SKIP + LOAD) == ["False"]


def test_a_process_that_uses_scipy_keeps_it():
    assert _run(USE + SKIP + USE) == ["True", "True"]
