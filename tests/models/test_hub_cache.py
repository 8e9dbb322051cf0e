"""The hub's cache of another user: it is read without a lock, and a part that is missing is no network error.

Root ignores the modes of files, so as root the tests run in a process without that privilege.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ftis_node.errors import FtisError, ModelError
from ftis_node.files import hub_cache_problem
from ftis_node.models import hub

UNPRIVILEGED = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
pytestmark = pytest.mark.skipif(bool(UNPRIVILEGED) and shutil.which("setpriv") is None, reason="root without setpriv")
DATASET = "dataset:o/n?prompt=q&answer=a"
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


def cached_dataset(cache: Path) -> None:
    """Write the data set `o/n` as the library caches it."""
    import datasets

    folder = cache / "datasets" / "o___n" / "default" / "0.0.0" / ("a" * 40)
    folder.mkdir(parents=True)
    rows = datasets.Dataset.from_dict({"q": ["1+1=", "2+2="], "a": ["2", "4"]})
    with datasets.arrow_writer.ArrowWriter(path=str(folder / "n-train.arrow"), features=rows.features) as writer:
        for row in rows:
            writer.write(row)
        num_examples, num_bytes = writer.finalize()
    split = {"name": "train", "num_bytes": num_bytes, "num_examples": num_examples, "dataset_name": "n"}
    columns = {name: {"dtype": "string", "_type": "Value"} for name in ("q", "a")}
    info = {"features": columns, "builder_name": "parquet", "dataset_name": "n", "splits": {"train": split}}
    version = {"version": {"version_str": "0.0.0", "major": 0, "minor": 0, "patch": 0}, "config_name": "default"}
    (folder / "dataset_info.json").write_text(json.dumps(info | version))


def test_a_complete_cache_is_read_without_a_lock(tmp_path: Path) -> None:
    cached_dataset(tmp_path / "hf")
    done = read("task", DATASET, tmp_path / "hf", tmp_path)
    assert "'2+2='" in done.stdout, done.stderr
    assert not [path for path in (tmp_path / "hf").rglob("*") if path.suffix == ".lock"]


def test_a_cached_model_is_read_without_a_lock(tmp_path: Path) -> None:
    from tests.models.tiny_models import save_tiny

    repository = tmp_path / "hf" / "hub" / "models--o--n"
    save_tiny(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    done = read("model", "o/n", tmp_path / "hf", tmp_path)
    assert "name='o/n'" in done.stdout, done.stderr


def test_a_part_that_is_missing_there_is_no_network_error(tmp_path: Path) -> None:
    cached_dataset(tmp_path / "hf")
    next((tmp_path / "hf").rglob("n-train.arrow")).unlink()
    done = read("task", DATASET, tmp_path / "hf", tmp_path)
    lock = tmp_path / "hf" / "datasets"
    assert f"TaskError: o/n (train): this user may not use the hub's cache at {lock}" in done.stderr
    assert "(Permission denied): set HF_HOME to another folder" in done.stderr


def test_a_download_into_a_cache_of_another_user_names_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/cache/.locks/models--o--n/x.lock")

    monkeypatch.setattr(hub, "_snapshot", locked)
    monkeypatch.setattr(hub, "_within", lambda *_: type("Info", (), {"sha": "abc"}))
    for get in (hub.fetch_snapshot, hub.cached_snapshot):
        with pytest.raises(ModelError, match=r"^o/n: .* cache at /cache/\.locks/models--o--n/x\.lock \(Perm.*HF_HOME"):
            get("o/n")


@pytest.mark.parametrize("error", [OSError("no answer"), FtisError("x"), OSError(errno.ECONNREFUSED, "refused")])
def test_other_errors_are_no_problem_of_the_cache(error: Exception) -> None:
    assert hub_cache_problem(error) == ""
    assert hub_cache_problem(OSError(errno.EROFS, "Read-only file system", "/c")).startswith("this user may not use")
