"""No file of the repository names the host of a package registry. Tests of the pages are in tests/documented/."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_no_host_of_a_registry_is_named():
    forbidden = re.compile(r"pypi\.org|files\.pythonhosted|registry\.npmjs|deb\.debian")
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if not path.is_file() or parts[0] in {".git", "demo-out"} or "__pycache__" in parts:
            continue
        if (ROOT / parts[0] / "pyvenv.cfg").exists():  # a virtual environment
            continue
        if path.suffix in {".py", ".md", ".toml", ".proto", ".txt", ".yaml", ".yml"} or path.name in {
            "Makefile",
            "run",
        }:
            assert path == Path(__file__) or not forbidden.search(path.read_text()), path
