"""Download of a model from the hub, or a one-line error within seconds. Push of a folder to it, as one commit.

The local cache is checked first. So a downloaded model starts without a network and never changes during a run. Before
a download the hub is queried once under a short deadline, because the library's own retries would keep a user without a
network waiting.

The library's own login is the only one for a push: `hf auth login`, or HF_TOKEN. A new repository is private, and a
public one is refused, unless the user asks for a public one.
"""

from __future__ import annotations

import errno
import io
import re
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from ftis_node.errors import (
    FtisError,
    MachineError,
    ModelError,
    NetworkError,
    UsageError,
    first_line,
)
from ftis_node.files import hub_cache_problem, read_object
from ftis_node.telemetry.log import OnProgress, quiet_library_logging, unwatched
from ftis_node.telemetry.terminal_text import size

T = TypeVar("T")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Weights or an adapter as safetensors, configuration and tokenizer; no code, no sub-folders.
WANTED_FILES = (
    *("model*.safetensors", "adapter_model.safetensors", "*.json"),
    *("tokenizer.model", "merges.txt", "vocab.txt", "chat_template.jinja"),
)
UNWANTED_FILES = ("*/*",)
REPLACED: Final = ["*.safetensors", "*.safetensors.index.json", "adapter_config.json"]
"""Patterns of files that a push deletes if it does not write them."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """The hub's data on a model. `num_bytes` of its weights; `has_token`: whether the request had an access token."""

    num_bytes: int
    num_parameters: int | None
    licence: str
    has_token: bool
    config: Mapping[str, Any]


def cached_snapshot(repo: str) -> Path | None:
    """Return the folder of `repo` in the local cache, or None. It may lack files after an interrupted download."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    with quiet_library_logging():
        try:
            return _snapshot(repo, local_files_only=True)
        except LocalEntryNotFoundError:
            return None
        except PermissionError as error:
            raise _fetch_error(repo, error) from error


def fetch_snapshot(repo: str, *, answer_within_s: float = 8.0, on_progress: OnProgress = unwatched) -> Path:
    """Download the files of `repo` that the cache lacks; return its folder.

    `answer_within_s` limits the hub's first answer, not the download. Raises ModelError if the hub has no such model or
    denies access. Raises NetworkError if the hub does not answer, and MachineError if the disk is full.
    """
    with quiet_library_logging():
        try:
            from huggingface_hub import HfApi

            _within(answer_within_s, partial(HfApi().model_info, repo, timeout=answer_within_s))
            return _snapshot(repo, on_progress=on_progress)  # with a revision it would not be found without a network
        except Exception as error:
            raise _fetch_error(repo, error) from error


def fetch_file(repo: str, file: str, *, on_progress: OnProgress = unwatched) -> Path:
    """Return one file of `repo`, downloaded if the cache lacks it. Raises as `fetch_snapshot` does."""
    with quiet_library_logging():
        try:
            from huggingface_hub import hf_hub_download

            return Path(hf_hub_download(repo, file, tqdm_class=progress_bar_class(file, on_progress)))
        except Exception as error:
            raise _fetch_error(repo, error) from error


def cached_file(repo: str, file: str) -> Path | None:
    """Return one file of `repo` in the local cache, or None."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, file)
    return Path(found) if isinstance(found, str) else None


def _fetch_error(repo: str, error: Exception) -> FtisError:
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return MachineError(f"the disk is too full for {repo}: free disk space and start again")
    if problem := hub_cache_problem(error):
        return ModelError(f"{repo}: {problem}")
    if isinstance(error, GatedRepoError):
        return ModelError(
            f"{repo} is gated: accept its terms on the hub, then set HF_TOKEN to an access token of that account"
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelError(
            f"the hub has no model {repo}, or it is private: check the spelling, set HF_TOKEN, or give a local folder "
            "with --model DIR"
        )
    is_offline = isinstance(error, OfflineModeIsEnabled)
    reason = "HF_HUB_OFFLINE is set and it is not in the cache" if is_offline else first_line(error).strip().rstrip(".")
    return NetworkError(f"cannot fetch {repo} from the hub ({reason}): give a local folder with --model DIR")


def ask_about(repo: str, *, answer_within_s: float = 8.0) -> HubModel:
    """Return the hub's data on `repo`. It downloads the configuration only. Raises as `fetch_snapshot` does."""
    with quiet_library_logging():
        try:
            return _within(answer_within_s, partial(_look_up, repo, answer_within_s))
        except Exception as error:
            raise _fetch_error(repo, error) from error


def _look_up(repo: str, answer_within_s: float) -> HubModel:
    from huggingface_hub import HfApi, get_token, hf_hub_download

    info = HfApi().model_info(repo, timeout=answer_within_s, files_metadata=True)
    config = Path(hf_hub_download(repo, "config.json", revision=str(info.sha)))
    sizes = [file.size or 0 for file in info.siblings or () if file.rfilename.endswith(".safetensors")]
    card = info.card_data
    return HubModel(
        num_bytes=sum(sizes),
        num_parameters=info.safetensors.total if info.safetensors else None,
        licence=str(card.get("license") or "") if card else "",
        has_token=get_token() is not None,
        config=read_object(config),
    )


def _snapshot(repo: str, *, local_files_only: bool = False, on_progress: OnProgress = unwatched) -> Path:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        repo,
        allow_patterns=list(WANTED_FILES),
        ignore_patterns=list(UNWANTED_FILES),
        local_files_only=local_files_only,
        tqdm_class=progress_bar_class(repo, on_progress),
    )
    return Path(folder)


def _within(limit_s: float, ask: Callable[[], T]) -> T:
    """Return what `ask` returns, or raise what it raises. At the limit raise TimeoutError and abandon its thread.

    It needs a thread, because name look-up ignores time-outs. An executor would wait for it at the process's end.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="ask-the-hub", daemon=True).start()
    if not wait([answer], limit_s).done:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return answer.result()


def progress_bar_class(repo: str, on_progress: OnProgress) -> type[Any]:
    """Return a class of bars that report the progress of `repo`'s download instead of drawing.

    The library makes several for one download, of files and of bytes. The one with the most bytes to come reports.
    """
    from tqdm.std import tqdm

    largest = [0.0]

    class CallbackBar(tqdm):  # type: ignore[misc]  # untyped
        monitor_interval = 0  # no drawing thread

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"file": io.StringIO(), "disable": False})

        def display(self, *_: Any, **__: Any) -> bool:
            total = float(self.total or 0)
            if self.unit == "B" and total > 0 and total >= largest[0]:
                largest[0] = total
                on_progress(min(1.0, self.n / total), f"downloading {repo}, {size(self.n)} of {size(total)}")
            return True

    return CallbackBar


@dataclass(frozen=True, slots=True)
class PushTarget:
    """A repository `owner/name` and its branch, None for the default one."""

    repo: str
    public: bool = False
    revision: str | None = None


def check_target(target: PushTarget) -> None:
    """Check the name and the login without the network. Raises UsageError in one line."""
    from huggingface_hub import get_token

    if not HUB_ID.fullmatch(target.repo):
        raise UsageError(f"--push-to {target.repo!r} names no repository of the hub: write OWNER/NAME")
    if get_token() is None:
        raise UsageError("you are not logged in to the hub: run `hf auth login`, then this command again")


def push_folder(folder: Path, target: PushTarget, *, message: str) -> tuple[str, bool]:
    """Push all files of `folder` in one commit; return its page, and whether the repository is private.

    It creates a missing repository and a missing branch. Raises UsageError if the hub refuses the push, or if the
    repository is public and `target.public` is not set. Raises NetworkError for every other fault.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi()
    how: dict[str, Any] = {"commit_message": message, "revision": target.revision, "delete_patterns": REPLACED}
    try:
        with quiet_library_logging():
            api.create_repo(target.repo, private=not target.public, exist_ok=True)
            if not (is_private := bool(api.repo_info(target.repo).private)) and not target.public:
                raise UsageError(f"{target.repo} is public: add --public to push to it, or give another --push-to")
            if target.revision:
                api.create_branch(target.repo, branch=target.revision, exist_ok=True)
            commit = api.upload_folder(repo_id=target.repo, folder_path=folder, **how)
    except FtisError:
        raise
    except Exception as error:  # the library has no common class for them
        status, said = getattr(getattr(error, "response", None), "status_code", None), " ".join(str(error).split())
        if type(error) is ValueError or status in (400, 401, 403, 404, 422):  # ValueError: of an invalid card
            raise UsageError(f"the hub refuses the push to {target.repo}: {said}") from error
        raise NetworkError(f"cannot push to {target.repo} ({said}): push again later") from error
    return str(commit.commit_url), is_private
