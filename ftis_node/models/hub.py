"""Fetching a model from the hub, or saying in one line within seconds why it cannot be had.

The local cache is asked first, so that a model once fetched starts without a network and never changes under a run.
Before a download the hub is asked once under a short deadline: the library's own retries would keep a user without a
network waiting. The question runs in a thread because name look-up obeys no time-out.
"""

from __future__ import annotations

import errno
import queue
import sys
import threading
from pathlib import Path

from ftis_node.errors import MachineError, ModelFetchError
from ftis_node.models.quiet import quiet_libraries

# Weights as safetensors, configuration and tokenizer; nothing that is code and nothing in sub-folders.
WANTED_FILES = ("model*.safetensors", "*.json", "tokenizer.model", "merges.txt", "vocab.txt", "chat_template.jinja")
UNWANTED_FILES = ("*/*",)


def cached_snapshot(repo: str) -> Path | None:
    """The folder of `repo` in the local cache, or None. It may still lack files: an older download was interrupted."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    with quiet_libraries():
        try:
            return _snapshot(repo, local_files_only=True)
        except LocalEntryNotFoundError:
            return None


def fetch_snapshot(repo: str, *, answer_within_s: float = 8.0) -> Path:
    """Download what the hub has of `repo` and is not in the cache yet; return its folder.

    `answer_within_s` is how long the hub may take to answer at all; the download itself takes what it takes, and goes
    on where it was interrupted. Raises ModelFetchError, and MachineError where the disk is full.
    """
    with quiet_libraries():
        try:
            return _snapshot(repo, revision=_ask_for_newest_revision(repo, answer_within_s))
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise MachineError(f"no room on the disk for {repo}: free some space and start again") from error
            raise ModelFetchError(
                f"cannot fetch {repo} from the hub ({_short_reason(error)}): give a local folder with --model DIR"
            ) from error


def _snapshot(repo: str, *, revision: str | None = None, local_files_only: bool = False) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    silenced = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if silenced:
        disable_progress_bars()
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(WANTED_FILES),
            ignore_patterns=list(UNWANTED_FILES),
            local_files_only=local_files_only,
        )
    finally:
        if silenced:
            enable_progress_bars()
    return Path(folder)


def _ask_for_newest_revision(repo: str, answer_within_s: float) -> str:
    """The commit that the hub serves now. Raises what the library raises, or TimeoutError at the deadline."""
    answers: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()

    def ask() -> None:
        from huggingface_hub import HfApi

        try:
            answers.put(str(HfApi().model_info(repo, timeout=answer_within_s).sha))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=ask, name="ask-the-hub", daemon=True).start()
    try:
        answer = answers.get(timeout=answer_within_s)
    except queue.Empty:
        raise TimeoutError(f"no answer within {answer_within_s:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _short_reason(error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "gated: accept its terms on the hub and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "no such model, or a private one: set HF_TOKEN"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set and it is not in the cache"
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
