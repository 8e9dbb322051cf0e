"""Rows of a data set of the hub. Only the child process of `dataset_rows` calls this module.

Before it fetches data it announces what comes from where, how large that is, and where it is written (`dataset_disk`).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ftis_node.errors import DiskFullError, FtisError, NetworkError, TaskError
from ftis_node.files import NO_ROOM, hub_cache_problem
from ftis_node.tasks.dataset_disk import DownloadNotice, begin_in, limit_for, scratch_folder, too_large
from ftis_node.tasks.dataset_query import RowSource
from ftis_node.telemetry.terminal_text import size

PROBE_LIMIT_S: Final = 5.0
SIZES_AT_ONCE: Final = 500  # files in one request
HUB_FILE = re.compile(r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)@(?P<revision>[^/]+)/(?P<path>.+)")
# Read by the libraries at their import. They would keep a second copy of a download, and unpack into a shared folder.
NO_SECOND_COPY: Final = {"HF_XET_CHUNK_CACHE_SIZE_BYTES": "0"}
UNPACK_FOLDER: Final = "HF_DATASETS_DOWNLOADED_DATASETS_PATH"


def hub_rows(source: RowSource, max_disk_bytes: int) -> Any:
    """Return the split as the library's data set. Raises NetworkError, TaskError and DiskFullError."""
    if importlib.util.find_spec("datasets") is None:
        raise TaskError(f"{source} needs the package datasets: install it, or give a local file")
    if Path(source.hub).exists():  # `datasets` would read it, and another person may have written the manifest
        raise TaskError(f"{source}: a folder or file here has the name of the repository: start in another folder")
    os.environ.update(NO_SECOND_COPY)
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and not _answers(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = True  # `datasets` copies the value at its import
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
    scratch = scratch_folder(cache)
    if scratch is None:  # this user may only read the cache
        return _split(source, None)
    os.environ[UNPACK_FOLDER] = str(scratch)
    announcement = DownloadNotice(
        folders=(str(Path(constants.HF_HUB_CACHE, f"datasets--{source.hub.replace('/', '--')}")),),
        scratch=str(scratch),
        since_ns=begin_in(scratch),
        limit_bytes=limit_for(scratch, max_disk_bytes),
    )
    announcement.send()
    try:
        return _split(source, announcement)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _split(source: RowSource, announcement: DownloadNotice | None) -> Any:
    """Return the split. A cache that this user may only read serves earlier downloads."""
    import datasets
    from huggingface_hub import constants

    try:
        return _prepared(source, announcement)
    except FtisError:
        raise
    except Exception as error:  # the library has dozens of them
        if any(isinstance(cause, OSError) and cause.errno in NO_ROOM for cause in _causes(error)):
            raise DiskFullError(f"{source}: the disk is full: free space, or give a local file") from None
        problem = hub_cache_problem(error)
        if not problem:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise NetworkError(f"cannot get {source} from the hub ({reason})") from None
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    datasets.builder.FileLock = lambda path: nullcontext()  # nobody who could write has to wait for this reader
    try:
        return _prepared(source, None)
    except Exception:
        raise TaskError(f"{source}: {problem}") from None


def _prepared(source: RowSource, announcement: DownloadNotice | None) -> Any:
    """Return the split as `datasets.load_dataset` does, with an announcement before the library fetches the data."""
    import datasets

    builder = datasets.load_dataset_builder(source.hub, source.config or None, revision=source.revision or None)
    if announcement is not None and not Path(builder.cache_dir).exists():
        folders = (*announcement.folders, str(Path(builder.cache_dir).parent))
        replace(announcement, text=_text(source, builder, announcement.limit_bytes), folders=folders).send()
    builder.download_and_prepare()
    return builder.as_dataset(split=source.split)


def _text(source: RowSource, builder: Any, limit_bytes: int) -> str:
    """Return what is fetched from where, in words. Raises TaskError if the hub's own sizes are above the limit."""
    from huggingface_hub import constants

    files = [str(file) for files in (builder.config.data_files or {}).values() for file in files]
    num_bytes = _size_on_hub(files)
    if num_bytes is not None and num_bytes > limit_bytes:
        raise TaskError(too_large(str(source), limit_bytes, f"its files on the hub have {size(num_bytes)}"))
    what = f"{len(files)} files" if len(files) != 1 else "1 file"
    how_large = "of unknown size" if num_bytes is None else f"of {size(num_bytes)}"
    act = "preparing earlier downloads" if constants.HF_HUB_OFFLINE else f"downloading from {constants.ENDPOINT}"
    return f"{source}: {act}: {what} {how_large}; at most {size(limit_bytes)} of disk with the unpacked rows"


def _size_on_hub(files: Sequence[str]) -> int | None:
    """Return the sum of the sizes that the hub has for these files; None if it lacks one or does not answer."""
    from huggingface_hub import HfApi, constants

    found = [HUB_FILE.fullmatch(file) for file in files]
    if not files or not all(found) or constants.HF_HUB_OFFLINE:
        return None
    first = next(match for match in found if match)
    paths = [match["path"] for match in found if match]
    try:
        entries = [
            entry
            for start in range(0, len(paths), SIZES_AT_ONCE)
            for entry in HfApi().get_paths_info(
                first["repo"], paths[start : start + SIZES_AT_ONCE], repo_type="dataset", revision=first["revision"]
            )
        ]
    except Exception:  # the download itself will show what is wrong
        return None
    sizes = {entry.path: entry.size for entry in entries if hasattr(entry, "size")}
    return sum(sizes[path] for path in paths) if sizes.keys() >= set(paths) else None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _answers(address: str) -> bool:
    """Return whether a server answers at the address."""
    request = urllib.request.Request(address, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=PROBE_LIMIT_S).close()  # nosec B310: the hub's own address
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
