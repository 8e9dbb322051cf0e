"""Push of a model's folder to a repository of the hub by the hub's own client, as one commit.

The library's own login is the only one: `hf auth login`, or HF_TOKEN. A new repository is private, and a public one is
refused, unless the user asks for a public one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ftis_node.errors import FtisError, NetworkError, UsageError
from ftis_node.models.library_logging import quiet_library_logging

REPLACED: Final = ["*.safetensors", "*.safetensors.index.json", "adapter_config.json"]
"""Patterns of files that a push deletes if it does not write them."""


@dataclass(frozen=True, slots=True)
class PushTarget:
    """A repository `owner/name` and its branch, None for the default one."""

    repo: str
    public: bool = False
    revision: str | None = None


def check_target(target: PushTarget) -> None:
    """Check the name and the login without the network. Raises UsageError in one line."""
    from huggingface_hub import get_token

    from ftis_node.models.source import HUB_ID

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
