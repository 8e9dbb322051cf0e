"""A copy of the working tree, to which faults are applied and reverted one by one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.errors import FtisError, MachineError

if TYPE_CHECKING:
    from tests.breaks.patches import Break

WHERE = "import ftis_node; print(ftis_node.__file__)"
IN_A_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WHERE!r}], check=True)"


class Tree:
    """The copy of the working tree in `folder`."""

    def __init__(self, root: Path, folder: Path) -> None:
        """Copy the files of `root` that git tracks or would add. Raises MachineError without git."""
        self.folder = folder
        for name in tracked(root):
            if (root / name).is_file():  # else it is removed, but not committed yet
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of processes that import the copy, and of their children."""
        others = os.environ.get("PYTHONPATH")
        return {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.folder), *([others] if others else [])])}

    def check_imports(self) -> None:
        """Raise FtisError if tests, or processes that they start in other folders, would import another `ftis_node`."""
        own = str(self.folder / "ftis_node" / "__init__.py")
        for code, place in ((WHERE, self.folder), (IN_A_CHILD, Path("/"))):
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, cwd=place, env=self.environment, capture_output=True, text=True, check=False)
            if done.stdout.strip() != own:
                raise FtisError(f"{place} imports {done.stdout.strip() or done.stderr.strip()[-200:]}, not {own}")

    def apply(self, one: Break) -> bool:
        """Apply a fault; return whether its patch applies."""
        return self._git_apply(one)

    def revert(self, one: Break) -> None:
        """Revert a fault. Raises FtisError."""
        if not self._git_apply(one, "--reverse"):
            raise FtisError(f"{one.name} cannot be reverted")

    def _git_apply(self, one: Break, *options: str) -> bool:
        # git must not find a repository above the folder for temporary files
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(self.folder.parent)}
        command = ["git", "apply", *options, str(one.path)]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        for name in one.files:  # Python compares size and time in seconds, and a fault may change neither
            Path(cache_from_source(str(self.folder / name))).unlink(missing_ok=True)
        return done.returncode == 0


def tracked(root: Path) -> list[str]:
    """Return the files that git tracks or would add in the repository at `root`. Raises MachineError."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise MachineError(f"git and a repository are needed at {root}") from None
    return [name for name in dict.fromkeys(done.stdout.split("\0")) if name]
