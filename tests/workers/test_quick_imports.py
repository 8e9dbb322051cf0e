"""transformers imports models without scipy, and other libraries of the process still import it."""

import subprocess
import sys
from importlib import import_module

from ftis_node.workers.quick_imports import import_quickly

MODULE = "ftis_node.generation.engines.torch_engine"
SKIP = f"from ftis_node.workers.quick_imports import import_quickly\nimport_quickly('{MODULE}')\n"
COLLECT = "import gc\nprint(gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
LOAD = "from transformers import Qwen2ForCausalLM\nprint('scipy' in sys.modules)\n"
USE = "import scipy.optimize\nprint(scipy.optimize.brentq(lambda x: x - 2, 0, 3) == 2)\n"
FORKS = """
import os, sys, torch  # once for all programs: it takes seconds
for program in sys.argv[1:]:
    if os.fork() == 0:
        exec(program)
        sys.stdout.flush()
        os._exit(0)
    os.wait()
    print(flush=True)
"""
PROGRAMS = {
    LOAD: "True", SKIP + LOAD + USE + COLLECT: "False True True True",
    "from transformers import AutoTokenizer\n" + SKIP + LOAD: "False", USE + SKIP + USE: "True True",
}  # fmt: skip


def test_transformers_imports_no_scipy_for_a_model_and_a_process_that_uses_it_keeps_it():
    command = [sys.executable, "-W", "ignore", "-c", FORKS, *PROGRAMS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [" ".join(part.split()) for part in done.stdout.split("\n\n")[:-1]]
    assert found[0] == "True", "transformers no longer imports scipy: scipy need not be hidden"
    assert found == list(PROGRAMS.values()), done.stderr


def test_a_part_that_a_module_does_not_need_is_imported_only_when_another_needs_it(tmp_path, monkeypatch):
    (tmp_path / "ftis_part.py").write_text("Part = 7")
    (tmp_path / "ftis_whole.py").write_text("from ftis_part import Part")
    monkeypatch.syspath_prepend(tmp_path)
    import_quickly("ftis_whole", without=["ftis_part"])
    assert (import_module("ftis_part").Part, type(import_module("ftis_whole").Part)) == (7, type)
