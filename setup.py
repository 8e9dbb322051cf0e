"""Build step that pyproject.toml cannot express: the pages of docs/ go into the wheel as ftis_node/_docs.

If `make site` has built the site after the last change of a page, it goes with them. All other settings are in
pyproject.toml.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
IGNORED = shutil.ignore_patterns("*.py", "*.csv", "__pycache__", "results")


class BuildWithPages(build_py):
    """Build of the package with its documentation. An editable checkout reads docs/ itself."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "ftis_node/_docs"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(ROOT / "docs", target, ignore=IGNORED)
        site = ROOT / "build/site/index.html"
        pages = (ROOT / "docs").rglob("*.md")
        if site.is_file() and all(page.stat().st_mtime <= site.stat().st_mtime for page in pages):
            shutil.copytree(site.parent, target / "site")


setup(cmdclass={"build_py": BuildWithPages})
