"""`import ftis_node` loads no large module, and provides every name of docs/reference/python.md."""

import re
import subprocess
import sys

from tests.documented.pages import ROOT
from tests.test_architecture import HEAVY

PROGRAM = """
import sys
before = set(sys.modules)
import ftis_node
heavy = (set(sys.modules) - before) & set({heavy!r})
assert not heavy, heavy
shown = dir(ftis_node)
for name in {names!r}:
    first, _, rest = name.partition(".")
    assert first in shown, f"{{name}} is missing in dir(ftis_node)"
    value = getattr(ftis_node, first)
    assert not rest or getattr(value, rest), name
"""


def test_each_name_of_the_page_can_be_imported_without_large_modules():
    page = (ROOT / "docs/reference/python.md").read_text("utf-8")
    names = re.findall(r"^\| `ftis_node\.((?!integrations)[\w.]+)` \|", page, flags=re.MULTILINE)
    assert {"Manifest", "algorithms.policy_loss", "tasks.load_task"} <= set(names)
    program = PROGRAM.format(heavy=HEAVY, names=names)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
