"""Version of the code that made a result: release, commit, torch and Python, in one line."""

from __future__ import annotations

import platform
import subprocess
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path

from ftis_node import __version__

ROOT = Path(__file__).parents[3]


@cache
def made_by() -> str:
    """Return the version of this process's code as one line."""
    commit = _commit()
    built = f"ftis-node {__version__}{f' at commit {commit}' if commit else ''}"
    return f"{built}, torch {version('torch')}, Python {platform.python_version()}"


def _commit() -> str | None:
    """Return the checkout's commit in 12 digits, with a `+` if tracked files differ; None outside of a checkout."""
    if not (ROOT / ".git").exists():
        return None
    git = partial(subprocess.run, capture_output=True, text=True, check=True, cwd=ROOT)
    try:
        commit = git(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip()
        return commit + ("+" if git(["git", "status", "--porcelain", "--untracked-files=no"]).stdout else "")
    except (OSError, subprocess.CalledProcessError):
        return None  # git is missing, or the checkout belongs to another user
