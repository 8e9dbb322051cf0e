"""The hub's cache of another user: it is read without a lock, and a part that is missing is no network error.

Root ignores the modes of files, so as root the tests run in a process without that privilege.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ftis_node.errors import ModelError
from ftis_node.models import hub

UNPRIVILEGED = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
pytestmark = pytest.mark.skipif(bool(UNPRIVILEGED) and shutil.which("setpriv") is None, reason="root without setpriv")
READ = """
import sys
from ftis_node.errors import FtisError
from ftis_node.models import resolve_model
from ftis_node.tasks import load_task
try:
    found = resolve_model(sys.argv[2]) if sys.argv[1] == "model" else load_task(sys.argv[2])[1]
except FtisError as error:
    sys.exit(f"{type(error).__name__}: {error}")
print(found)
"""


def close(folder: Path, *, mode: int) -> None:
    """Set the mode of the folders, and that of files without the right to enter."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(mode if path.is_dir() else mode & 0o666)


def read(kind: str, what: str, cache: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*UNPRIVILEGED, sys.executable, "-c", READ, kind, what]
    close(cache, mode=0o555)
    try:
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    finally:
        close(cache, mode=0o755)


def test_a_cached_model_is_read_without_a_lock(tmp_path):
    from tests.models.tiny_models import save_tiny

    repository = tmp_path / "hf" / "hub" / "models--o--n"
    save_tiny(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    done = read("model", "o/n", tmp_path / "hf", tmp_path)
    assert "name='o/n'" in done.stdout, done.stderr


def test_a_download_into_a_cache_of_another_user_names_the_path(monkeypatch):
    def locked(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "/cache/.locks/models--o--n/x.lock")

    monkeypatch.setattr(hub, "_snapshot", locked)
    monkeypatch.setattr(hub, "_within", lambda *_: type("Info", (), {"sha": "abc"}))
    for get in (hub.fetch_snapshot, hub.cached_snapshot):
        with pytest.raises(ModelError, match=r"^o/n: .* cache at /cache/\.locks/models--o--n/x\.lock \(Perm.*HF_HOME"):
            get("o/n")
