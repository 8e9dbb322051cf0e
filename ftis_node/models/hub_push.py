"""Push of a folder to a repository of the hub, as one commit.

The library's own login is the only one: `hf auth login`, or HF_TOKEN. A new repository is private, and a public one is
refused, unless the user asks for a public one.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, Literal

from ftis_node.errors import FtisError, NetworkError, UsageError
from ftis_node.models.hub import fraction_text
from ftis_node.models.library_logging import quiet_library_logging
from ftis_node.telemetry.log import unwatched

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from huggingface_hub import CommitOperationAdd, HfApi

    from ftis_node.telemetry.log import OnProgress

LOG_IN = "run `hf auth login`"
CONFLICT = (409, 412)
PASSING = (408, 429)  # a time-out, and too many requests


@dataclass(frozen=True, slots=True)
class PushTarget:
    """A repository `owner/name` and how to push to it. `revision` is a branch, "" for the default one.

    `replaces` has patterns of files that a push deletes if it does not write them, such as shards of an earlier model.
    """

    repo: str
    kind: Literal["model", "dataset"]
    public: bool = False
    revision: str = ""
    message: str = ""
    replaces: tuple[str, ...] = ()

    @property
    def by_hand(self) -> str:
        """The command of the hub's own client that pushes a folder, but for the folder."""
        options = f" --type {self.kind}" + ("" if self.public else " --private")
        return f"hf upload {self.repo} FOLDER .{options}" + (f" --revision {self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class PushResult:
    """A commit on the hub. `url` is its page."""

    url: str
    num_files: int
    is_private: bool


def check_target(target: PushTarget) -> None:
    """Check the name and the login without the network. Raises UsageError in one line."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(target.repo)
    except HFValidationError as error:
        raise UsageError(f"--push-to {target.repo!r} names no repository of the hub: {error}") from None
    if target.repo.count("/") != 1:
        raise UsageError(f"--push-to {target.repo!r} names no repository of the hub: write OWNER/NAME")
    if constants.HF_HUB_OFFLINE:
        raise UsageError("HF_HUB_OFFLINE is set: unset it to use --push-to")
    if get_token() is None:
        raise UsageError(f"you are not logged in to the hub: {LOG_IN}, then this command again")


def push_folder(folder: Path, target: PushTarget, *, on_progress: OnProgress = unwatched) -> PushResult:
    """Push all files of `folder` in one commit. It creates a missing repository and a missing branch.

    Raises UsageError if the hub refuses the login, the account or the card, or if the repository is public and
    `target.public` is not set. Raises NetworkError for every other fault. An upload that ends early leaves no commit.
    """
    with quiet_library_logging(), _without_bars():
        try:
            return _push(folder, target, on_progress)
        except FtisError:
            raise
        except Exception as error:
            raise _push_error(target, error) from error


def _push(folder: Path, target: PushTarget, on_progress: OnProgress) -> PushResult:
    from huggingface_hub import CommitOperationDelete, HfApi

    api = HfApi()
    place: dict[str, Any] = {"repo_id": target.repo, "repo_type": target.kind}
    on_progress(0.0, f"looking for {target.repo}")
    is_private = _open_repository(api, target)
    if target.revision:
        api.create_branch(**place, branch=target.revision, exist_ok=True)
    place["revision"] = target.revision or None
    additions = _upload(api, place, folder, on_progress)
    written = {addition.path_in_repo for addition in additions}
    stale = [
        CommitOperationDelete(path)
        for path in api.list_repo_files(**place)
        if path not in written and any(fnmatch(path, pattern) for pattern in target.replaces)
    ]
    on_progress(1.0, f"committing {len(additions)} files")
    message = target.message or f"Upload {len(additions)} files"
    commit = api.create_commit(**place, operations=[*additions, *stale], commit_message=message)
    if missing := sorted(written - set(api.list_repo_files(**place))):
        raise UsageError(f"{target.repo} did not take {', '.join(missing)}: does its .gitignore exclude them?")
    return PushResult(str(commit.commit_url), len(additions), is_private)


def _open_repository(api: HfApi, target: PushTarget) -> bool:
    """Return whether the repository is private. Create a missing one."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.repo_info(target.repo, repo_type=target.kind)
    except RepositoryNotFoundError:
        api.create_repo(target.repo, repo_type=target.kind, private=not target.public)
        return not target.public
    if not info.private and not target.public:
        raise UsageError(f"{target.repo} is public: add --public to push to it, or give another --push-to")
    return bool(info.private)


def _upload(api: HfApi, place: dict[str, Any], folder: Path, on_progress: OnProgress) -> list[CommitOperationAdd]:
    """Upload the contents of large files, one file after the other. The commit carries the small ones."""
    from huggingface_hub import CommitOperationAdd

    sizes = {path: path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    total, done = max(1, sum(sizes.values())), 0
    additions = []
    for path, num_bytes in sizes.items():
        on_progress(done / total, f"uploading {path.name}, {fraction_text(done, total)}")
        addition = CommitOperationAdd(path.relative_to(folder).as_posix(), path)
        api.preupload_lfs_files(**place, additions=[addition])
        additions.append(addition)
        done += num_bytes
    return additions


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the library's progress bars, because the caller shows its own."""
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _push_error(target: PushTarget, error: Exception) -> FtisError:
    status, said = _answer(error)
    if status == 401:
        return UsageError(f"the hub refuses your login: {LOG_IN} with a token that may write")
    if status == 403:
        return UsageError(f"your account may not write to {target.repo} ({said}): {LOG_IN} with one that may")
    if status in CONFLICT:
        return NetworkError(f"{target.repo} changed at the same time ({said}): push again")
    is_bad_card = isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError)
    if is_bad_card or (status is not None and 400 <= status < 500 and status not in PASSING):
        return UsageError(f"the hub refuses the push to {target.repo}: {said}")
    return NetworkError(f"cannot push to {target.repo} ({said}): push again later")


def _answer(error: BaseException) -> tuple[int | None, str]:
    """Return the status of the hub's answer, None if there was none, and the reason in one line.

    The library wraps the answer to an upload in other errors.
    """
    from huggingface_hub.errors import HfHubHTTPError

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HfHubHTTPError):
        cause = cause.__cause__
    if cause is None:
        return None, " ".join(str(error).split()) or type(error).__name__
    return cause.response.status_code, cause.server_message or f"HTTP {cause.response.status_code}"
