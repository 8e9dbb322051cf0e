"""Token ids of a home's model as text, without transformers and torch, for screens and commands."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.config.home import Home
from ftis_node.errors import FileError, ModelError
from ftis_node.files import read_object
from ftis_node.models.adapter_folder import ADAPTER_CONFIG_FILE
from ftis_node.models.gguf import gguf_here, is_gguf

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"


class Decoder:
    """Decoder of token ids to text, by the tokenizer of a home's model. It loads neither transformers nor torch.

    The first use reads `tokenizer.json`, which may take a second, so do not call it in an event loop. If that file is
    not on this machine, the ids stay ids: nothing is downloaded.
    """

    def __init__(self, home: Home) -> None:
        self._home = home

    @cached_property
    def _opened(self) -> tuple[Tokenizer | None, str]:
        return _open_tokenizer(self._home)

    @property
    def missing(self) -> str:
        """Reason why there is no tokenizer; empty if there is one."""
        return self._opened[1]

    def text(self, token_ids: Sequence[int], *, with_special_tokens: bool = False) -> str | None:
        """Return the text of these ids; None if there is no tokenizer, or if an id is not in its vocabulary."""
        tokenizer, _ = self._opened
        if tokenizer is None:
            return None
        try:
            ids = [int(token) for token in token_ids]
            return str(tokenizer.decode(ids, skip_special_tokens=not with_special_tokens))
        except OverflowError:  # a negative id
            return None

    def answer(self, token_ids: Sequence[int], *, end_ids: Sequence[int]) -> str | None:
        """Return the text of a completion with its special tokens, but without one of `end_ids` at its end."""
        has_end = len(token_ids) > 0 and token_ids[-1] in end_ids
        return self.text(token_ids[:-1] if has_end else token_ids, with_special_tokens=True)


def _open_tokenizer(home: Home) -> tuple[Tokenizer | None, str]:
    try:
        model = str(read_object(home.settings)["model"])
    except (OSError, FileError, KeyError):
        return None, f"{home.settings} names no model: showing token ids"
    folder = _folder_of(model)
    if folder is not None and not (folder / TOKENIZER_FILE).is_file():
        folder = _base_of(folder)
    if folder is None or not (folder / TOKENIZER_FILE).is_file():
        return None, f"the model's {TOKENIZER_FILE} is not on this machine: showing token ids"
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(folder / TOKENIZER_FILE)), ""
    except Exception as error:  # the library raises a plain Exception for an unreadable file
        return None, f"{folder / TOKENIZER_FILE} cannot be read ({error}): showing token ids"


def _base_of(folder: Path) -> Path | None:
    """Return the folder of an adapter's base; None for another folder, or an unknown base."""
    try:
        base = str(read_object(folder / ADAPTER_CONFIG_FILE)["base_model_name_or_path"])
    except (OSError, FileError, KeyError):
        return None
    beside = folder / base
    return beside if beside.is_dir() else _folder_of(base)


def _folder_of(model: str) -> Path | None:
    """Return the model's folder on this machine, or its GGUF file if that was never converted."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub.errors import HFValidationError

    from ftis_node.models.hub import cached_snapshot

    try:
        return gguf_here(model) if is_gguf(model) else cached_snapshot(model)
    except (HFValidationError, ModelError):  # the folder or file was removed
        return None
