"""A model's tokenizer: chat messages to prompt ids, completion ids to text, and the ids that end a completion.

The prompt is rendered by the model's own chat template. A base model without one gets plain lines,

    System: <content>

    User: <content>

    Assistant:

with the tokenizer's usual start token in front. A template without a system role gets the system text at the head of
the first user message.

`AutoTokenizer` imports the configurations of all models, and with them torch: 4 s of processor time and 340 MB. For the
models in CLASSES its choice is known, and that class imports no torch. For any other model, and any other release of
transformers, `AutoTokenizer` chooses.
"""

from __future__ import annotations

import json
import logging
from functools import cached_property
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftis_node.errors import FileError, ModelError
from ftis_node.files import read_object
from ftis_node.models.fingerprint import tokenizer_fingerprint
from ftis_node.models.json_file import read_json
from ftis_node.models.library_logging import quiet_library_logging
from ftis_node.models.plain_template import CHAT_TEMPLATE_FILE, plain_template
from ftis_node.models.source import CONFIG_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenizers import Tokenizer

    from ftis_node.config.home import Home
    from ftis_node.models.source import ModelSource

log = logging.getLogger(__name__)
GENERATION_CONFIG_FILE = "generation_config.json"
MAX_REMEMBERED_PROMPTS = 4096
MAX_IDS = 1 << 31
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
KNOWN_RELEASE = "5.19."
QWEN2 = "transformers.models.qwen2.tokenization_qwen2", "Qwen2Tokenizer"
GENERIC = "transformers.tokenization_utils_tokenizers", "TokenizersBackend"
CLASSES = {
    ("qwen2", "Qwen2Tokenizer"): QWEN2,
    ("qwen2", "Qwen2TokenizerFast"): QWEN2,
    ("qwen2", "PreTrainedTokenizerFast"): QWEN2,
    ("qwen2", "TokenizersBackend"): QWEN2,
    ("qwen3", "Qwen2Tokenizer"): QWEN2,
    ("qwen3", "Qwen2TokenizerFast"): QWEN2,
    ("qwen3", "PreTrainedTokenizerFast"): GENERIC,
    ("qwen3", "TokenizersBackend"): GENERIC,
    ("llama", "PreTrainedTokenizerFast"): GENERIC,
    ("llama", "TokenizersBackend"): GENERIC,
}
"""Module and class by `model_type` in config.json and `tokenizer_class` in tokenizer_config.json."""
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


def _open_tokenizer(home: Home) -> tuple[Tokenizer | None, str]:
    try:
        model = str(read_object(home.settings)["model"])
    except (OSError, FileError, KeyError):
        return None, f"{home.settings} names no model: showing token ids"
    folder = _folder_of(model)
    if folder is None or not (folder / TOKENIZER_FILE).is_file():
        return None, f"the model's {TOKENIZER_FILE} is not on this machine: showing token ids"
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(folder / TOKENIZER_FILE)), ""
    except Exception as error:  # the library raises a plain Exception for an unreadable file
        return None, f"{folder / TOKENIZER_FILE} cannot be read ({error}): showing token ids"


def _folder_of(model: str) -> Path | None:
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub.errors import HFValidationError

    from ftis_node.models.hub import cached_snapshot

    try:
        return cached_snapshot(model)
    except HFValidationError:  # the folder was removed
        return None


class PromptTokenizer:
    """One model's tokenizer. `fingerprint` is the same on every node that tokenizes alike."""

    def __init__(
        self, tokenizer: Any, *, name: str, extra_eos_ids: Sequence[int] = (), num_rows: int | None = None
    ) -> None:
        """Wrap a transformers tokenizer. `num_rows` is the number of the model's embeddings, None if unknown."""
        self._tokenizer = tokenizer
        self._encoded: dict[str, tuple[int, ...]] = {}
        self.name = name
        # Ids from here on are no tokens: the tokenizer does not have them, or the model no embedding of them. Most
        # embeddings are padded to more rows. The first bound is len(tokenizer) unless the vocabulary has holes.
        self.vocab_size: int = min(max(tokenizer.get_vocab().values()) + 1, num_rows or MAX_IDS)
        ends = {int(eos) for eos in (tokenizer.eos_token_id, *extra_eos_ids) if eos is not None}
        self.eos_ids: tuple[int, ...] = tuple(sorted(eos for eos in ends if 0 <= eos < self.vocab_size))
        # The id that ends a turn; generation may stop at others.
        self.eos_id: int | None = tokenizer.eos_token_id if tokenizer.eos_token_id in self.eos_ids else None
        if left_out := sorted(ends.difference(self.eos_ids)):
            log.warning("%s names the end tokens %s, which it does not have: they are left out", name, left_out)
        self.fingerprint: str = tokenizer_fingerprint(tokenizer)

    def encode_prompt(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Return the ids of `messages` up to the assistant's turn. Raises ModelError for a broken template.

        The last ones are cached: a node encodes a prompt at generation, at validation and again at every evaluation.
        """
        key = json.dumps(messages, sort_keys=True)
        if (known := self._encoded.get(key)) is None:
            known = self._encoded[key] = tuple(self._encode(messages))
            if known and max(known) >= self.vocab_size:
                del self._encoded[key]
                raise ModelError(
                    f"the prompts of {self.name} have the id {max(known)}, but the model has {self.vocab_size} "
                    "embeddings: resize them, or use the tokenizer that belongs to the model"
                )
            if len(self._encoded) > MAX_REMEMBERED_PROMPTS:
                del self._encoded[next(iter(self._encoded))]
        return list(known)

    def _encode(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        from jinja2 import TemplateError

        if self._tokenizer.chat_template is None:
            turns = [f"{str(message['role']).capitalize()}: {message['content']}" for message in messages]
            ids = [int(token) for token in self._tokenizer.encode("\n\n".join([*turns, "Assistant:"]))]
            while ids and ids[-1] in self.eos_ids:  # `add_eos_token`: for training texts
                ids.pop()
            return ids
        try:
            return self._render(messages)
        except TemplateError as error:
            if messages[0]["role"] != "system":
                raise ModelError(f"the chat template of {self.name} refuses the prompt: {error}") from error
            system, first, *rest = messages
            with_system = {"role": first["role"], "content": f"{system['content']}\n\n{first['content']}"}
            return self._render([with_system, *rest])

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of plain text, such as a peer's. Text that looks like a special token is split, too."""
        ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return [int(token) for token in ids]

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of `token_ids`, by default without special tokens such as the end of sequence."""
        ids = [int(token) for token in token_ids]
        decode = self._tokenizer.decode
        return str(decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files in the hub's format, and the template of plain lines if it has none."""
        self._tokenizer.save_pretrained(folder)
        if self._tokenizer.chat_template is None:
            template = plain_template(self._tokenizer, self.encode_prompt)
            if template:
                (folder / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")
            else:
                log.warning("no chat template gives the ids of the prompts of %s: the model card shows one", self.name)

    def _render(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        ids = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return [int(token) for token in ids]


def load_tokenizer(source: ModelSource) -> PromptTokenizer:
    """Return the tokenizer of `source`. Raises ModelError if its files are damaged."""
    with quiet_library_logging():
        try:
            chosen = tokenizer_class(source.folder, source.tokenizer_folder)
            tokenizer = chosen.from_pretrained(source.tokenizer_folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:
            raise ModelError(f"the tokenizer in {source.tokenizer_folder} cannot be read: {error}") from error
    return PromptTokenizer(
        tokenizer,
        name=source.name,
        extra_eos_ids=_generation_eos_ids(source.folder),
        num_rows=source.num_embedding_rows,
    )


def _generation_eos_ids(folder: Path) -> list[int]:
    """Return the end-of-sequence ids that stop generation; chat models name several."""
    path = folder / GENERATION_CONFIG_FILE
    if not path.is_file():
        return []
    eos = read_json(path).get("eos_token_id")
    if isinstance(eos, int):
        return [eos]
    return [token for token in eos if isinstance(token, int)] if isinstance(eos, list) else []


def tokenizer_class(folder: Path, tokenizer_folder: Path | None = None) -> Any:
    """Return the transformers class whose `from_pretrained` AutoTokenizer would call, or AutoTokenizer itself.

    `folder` has the model's configuration, and the tokenizer's unless `tokenizer_folder` has it. Raises ModelError for
    a damaged config.json or tokenizer_config.json.
    """
    path = (tokenizer_folder or folder) / TOKENIZER_CONFIG_FILE
    if path.is_file() and metadata.version("transformers").startswith(KNOWN_RELEASE):
        config = read_json(path)
        kind = str(read_json(folder / CONFIG_FILE).get("model_type")), str(config.get("tokenizer_class"))
        if kind in CLASSES and "auto_map" not in config:  # the model's own code, which AutoTokenizer refuses
            module, name = CLASSES[kind]
            return getattr(import_module(module), name)
    from transformers import AutoTokenizer

    return AutoTokenizer
