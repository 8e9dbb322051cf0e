"""A model's tokenizer: chat messages to prompt ids, completion ids to text, and the ids that end a completion.

Each model is prompted by its own chat template, so nodes of one run may render a problem differently. A base model
without a template gets plain lines,

    System: <content>

    User: <content>

    Assistant:

with the tokenizer's usual start token in front. A template without a system role gets the system text at the head of
the first user message.
"""

from __future__ import annotations

import hashlib
import json
import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import jinja2

from ftis_node.errors import ModelError
from ftis_node.models.chat_template import (
    CHAT_TEMPLATE_FILE,
    DEFAULT,
    EPISODE_EXAMPLE,
    ChatTemplate,
    PromptSettings,
    around_observation,
    check_template,
    chosen_template,
    plain_template,
)
from ftis_node.models.fingerprint import tokenizer_fingerprint
from ftis_node.models.source import ModelSource
from ftis_node.models.tokenizer_class import tokenizer_class
from ftis_node.records.bounds import MAX_END_IDS
from ftis_node.records.group import FinishReason
from ftis_node.records.think_block import ANSWER_TAGS, split_opening, whole_answer
from ftis_node.records.token_batch import TokenBatch
from ftis_node.telemetry.log import quiet_library_logging

log = logging.getLogger(__name__)
MAX_REMEMBERED_PROMPTS = 4096
MAX_IDS = 1 << 31


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as this model reads it: `text` without `opening`, the beginning of the answer in the template's words.

    `opening` is empty, or an open or empty think block. `token_ids` are those of both together.
    """

    text: str
    opening: str
    token_ids: tuple[int, ...]


class PromptTokenizer:
    """One model's tokenizer. `fingerprint` is the same on every node that tokenizes alike."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        name: str,
        extra_eos_ids: Sequence[int] = (),
        num_rows: int | None = None,
        prompts: PromptSettings | None = None,
    ) -> None:
        """Wrap a transformers tokenizer. `num_rows` is the number of the model's embeddings, None if unknown."""
        self._tokenizer = tokenizer
        self._prompts = prompts or PromptSettings()
        self._rendered = lru_cache(MAX_REMEMBERED_PROMPTS)(self._render)
        self.name = name
        # Ids from `num_ids` on are no tokens. It is len(tokenizer) unless the vocabulary has holes. Of ids from
        # `vocab_size` on the model has no embedding. Most embeddings are padded to more rows.
        self.num_ids: int = max(tokenizer.get_vocab().values()) + 1
        self.vocab_size: int = min(self.num_ids, num_rows or MAX_IDS)
        if self.vocab_size < self.num_ids:
            log.warning(
                "the tokenizer of %s has %d ids, the model %d embeddings: texts with the other ids are not used",
                *(name, self.num_ids, self.vocab_size),
            )
        ends = {int(eos) for eos in (tokenizer.eos_token_id, *extra_eos_ids) if eos is not None}
        usable = sorted(
            (eos for eos in ends if 0 <= eos < self.vocab_size), key=lambda eos: eos != tokenizer.eos_token_id
        )
        self.eos_ids: tuple[int, ...] = tuple(sorted(usable[:MAX_END_IDS]))
        if left_out := sorted(ends.difference(self.eos_ids)):
            log.warning(
                "%s names end tokens that it does not have, or over %d: %s are left out", name, MAX_END_IDS, left_out
            )
        self.fingerprint: str = tokenizer_fingerprint(tokenizer)

    @cached_property
    def eos_id(self) -> int | None:
        """The id with which this model ends an answer; None if it has none. Generation may stop at other `eos_ids`.

        It is the one that the chat template writes after an answer, else the tokenizer's.
        """
        first = self._tokenizer.eos_token_id if self._tokenizer.eos_token_id in self.eos_ids else None
        if self.template is not None and len(self.eos_ids) > 1:
            turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            with suppress(jinja2.TemplateError):
                ids = self._encode(self.template.render(turns))
                found = [token for token in reversed(ids) if token in self.eos_ids]
                first = found[0] if found else first
        return next(iter(self.eos_ids), None) if first is None else int(first)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The ids of `eos_ids`, `eos_id` first: those with which this model ends an answer, by preference."""
        return tuple(sorted(self.eos_ids, key=lambda token: (token != self.eos_id, token)))

    @cached_property
    def start_text(self) -> str:
        """The text of the special tokens that the tokenizer puts before a text by itself; empty if there are none."""
        ids = takewhile(set(self._tokenizer.all_special_ids).__contains__, self._tokenizer.encode("a"))
        return self.decode([*ids], skip_special=False)

    @cached_property
    def hidden_ids(self) -> frozenset[int]:
        """The ids that no answer may contain, because its text does not show them.

        They are special tokens, except for the tags of the answer format, and ids that the vocabulary leaves out. Nodes
        with one fingerprint have the same ones.
        """
        added = self._tokenizer.added_tokens_decoder.items()
        special = {int(token) for token, each in added if each.special and each.content not in ANSWER_TAGS}
        left_out = set(range(self.num_ids)).difference(self._tokenizer.get_vocab().values())
        return frozenset(special | left_out)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template; None for plain lines. Raises ModelError if there are several, and no default."""
        return chosen_template(self._tokenizer, self.name, self._prompts)

    @cached_property
    def template_digest(self) -> str:
        """32 hexadecimal digits that identify the chat template with its variables and the run's date."""
        form = "" if self.template is None else self.template.to_json()
        return hashlib.sha256(form.encode()).hexdigest()[:32]

    def encode_prompt(self, messages: Sequence[Mapping[str, object]], *, opening: str | None = None) -> list[int]:
        """Return the ids of `messages` up to the answer. Raises ModelError for a broken template.

        `opening` replaces the beginning of the answer that this model's template writes, because a peer sampled its
        answer after another one.
        """
        rendered = self.render_prompt(messages)
        if opening is None or opening == rendered.opening:
            return list(rendered.token_ids)
        return self._encode(rendered.text + opening)

    def render_prompt(self, messages: Sequence[Mapping[str, object]]) -> RenderedPrompt:
        """Return the prompt in this model's form. Raises ModelError for a broken template.

        The last ones are cached: a node encodes a prompt at generation, at validation and again at every evaluation.
        """
        return self._rendered(json.dumps(messages))

    def _render(self, messages: str) -> RenderedPrompt:
        text = self._prompt_text(json.loads(messages))
        rendered = RenderedPrompt(*split_opening(text), tuple(self._encode(text)))
        if rendered.token_ids and max(rendered.token_ids) >= self.vocab_size:
            raise ModelError(
                f"the prompts of {self.name} have the id {max(rendered.token_ids)}, but the model has "
                f"{self.vocab_size} embeddings: resize them, or use the tokenizer that belongs to the model"
            )
        return rendered

    def _prompt_text(self, messages: Sequence[Mapping[str, object]]) -> str:
        if self.template is None:
            turns = [f"{str(message['role']).capitalize()}: {message['content']}" for message in messages]
            return "\n\n".join([*turns, "Assistant:"])
        try:
            return self.template.render(messages)
        except jinja2.TemplateError as error:
            if messages[0]["role"] != "system" or len(messages) == 1:
                raise ModelError(f"the chat template of {self.name} refuses the prompt: {error}") from error
            system, first, *rest = messages
            with_system = {"role": first["role"], "content": f"{system['content']}\n\n{first['content']}"}
            return self._prompt_text([with_system, *rest])

    def _encode(self, text: str) -> list[int]:
        """Return the ids of a prompt's text. A template writes its start token, plain lines get the usual one."""
        ids = [int(token) for token in self._tokenizer.encode(text, add_special_tokens=self.template is None)]
        while self.template is None and ids and ids[-1] in self.eos_ids:  # `add_eos_token`: for training texts
            ids.pop()
        return ids

    def encode_observation(self, text: str, *, opening: str, max_tokens: int, has_end: bool = True) -> list[int]:
        """Return the ids between two turns of an episode: `text` as a user's message, up to the model's next turn.

        They follow the end token that the model sampled. After a turn without one (not `has_end`) they begin with the
        template's. No earlier turn is rendered again, as a template may write it otherwise then. Of `text` at most
        `max_tokens` ids are used. Raises ModelError, also for an unknown id.
        """
        end, before, after = self._around_observation
        before = before if has_end else end + before
        ids = [*self._plain(before), *self.encode_text(text)[:max_tokens], *self._plain(after + opening)]
        if max(ids, default=0) >= self.vocab_size:
            raise ModelError(f"an observation has the id {max(ids)}, but {self.name} has {self.vocab_size} embeddings")
        return ids

    @cached_property
    def observation_form(self) -> tuple[int, ...]:
        """The ids around an observation, empty if this model has none. Peers with the same ones count equal tokens."""
        with suppress(ModelError):
            return tuple(self.encode_observation("", opening="", max_tokens=0, has_end=False))
        return ()

    @cached_property
    def _around_observation(self) -> tuple[str, str, str]:
        """What the chat template writes around a user's second message: the end token, the rest before it, after it."""
        ends = [self.decode([token], skip_special=False) for token in self.end_ids]
        parts = around_observation(self._prompt_text(EPISODE_EXAMPLE), ends)
        if parts is None:
            raise ModelError(f"the chat template of {self.name} leaves out a user's second message: give another model")
        return *parts[:2], split_opening(parts[2])[0]

    def _plain(self, text: str) -> list[int]:
        """Return the ids of a text that contains the template's special tokens, without the usual start token."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of plain text, such as a peer's. Text that looks like a special token is split, too."""
        ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return [int(token) for token in ids]

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of `token_ids`, by default without special tokens such as the end of sequence."""
        ids = [int(token) for token in token_ids]
        decode = self._tokenizer.decode
        return str(decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))

    def num_until_stop(self, token_ids: Sequence[int], strings: Sequence[str]) -> int | None:
        """Return how many ids a turn has up to the one that completes the first of `strings`; None without any.

        Every node of one tokenizer returns the same number.
        """

        def has_string(num_ids: int) -> bool:
            text = self.decode(token_ids[:num_ids], skip_special=False)
            return any(string in text for string in strings)

        if not has_string(len(token_ids)):
            return None
        return bisect_left(range(len(token_ids)), True, key=has_string)

    def has_hidden(self, text: str) -> bool:
        """Return whether a text has a special token that no answer may contain."""
        return not self.hidden_ids.isdisjoint(self._plain(text))

    def encode_stops(self, strings: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the usual ids of each string, by which an engine can end most turns early."""
        encoded = ((string, self.encode_text(string)) for string in strings)
        return tuple(tuple(ids) for string, ids in encoded if string in self.decode(ids, skip_special=False))

    def answer_texts(
        self, tokens: TokenBatch, finish_reasons: Sequence[FinishReason], *, opening: str = ""
    ) -> list[str | None]:
        """Return the text of each completion that is scored (`think_block.whole_answer`), without its end token.

        It is None if the completion has another special token: nobody sees such a token in a text, so no reward judges
        it. Every node of one tokenizer returns the same texts.
        """
        return [
            self.answer_text(ids.tolist(), has_end=reason is FinishReason.STOP, opening=opening)
            for ids, reason in zip(tokens.ids_of_each(), finish_reasons, strict=True)
        ]

    def answer_text(self, ids: Sequence[int], *, has_end: bool, opening: str) -> str | None:
        """Return the text of one completion as `answer_texts` does. Its last id is an end token if it `has_end`."""
        answer = ids[:-1] if has_end else ids
        if not self.hidden_ids.isdisjoint(answer):
            return None
        return whole_answer(opening, self.decode(answer, skip_special=False))

    def opening_of(self, prompt_ids: Sequence[int]) -> str:
        """Return the opening of a prompt that another program rendered for this tokenizer; empty if it has none."""
        return split_opening(self.decode(prompt_ids, skip_special=False))[1]

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files in the hub's format, with the template that renders these prompts.

        The arguments of `PromptSettings` are defaults of its variables. A tokenizer without a template gets that of
        plain lines. Raises ModelError if there are several templates, and no default.
        """
        own = self._tokenizer.chat_template
        try:
            self._tokenizer.chat_template = self._template_to_save()
            self._tokenizer.save_pretrained(folder)
        finally:
            self._tokenizer.chat_template = own
        if own is None:
            template = plain_template(self._tokenizer, self.encode_prompt)
            if template:
                (folder / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")
            else:
                log.warning(
                    "no chat template gives the prompts of %s, so the folder has none: servers prompt it otherwise",
                    self.name,
                )

    def _template_to_save(self) -> Any:
        own = self._tokenizer.chat_template
        if not self._prompts.arguments or self.template is None:
            return own
        chosen = self.template.source_with_defaults
        return own | {DEFAULT: chosen} if isinstance(own, dict) else chosen


def load_tokenizer(source: ModelSource, *, prompts: PromptSettings | None = None) -> PromptTokenizer:
    """Return the tokenizer of `source`. Raises ModelError if its files are damaged.

    With `prompts` its chat template is checked (`check_template`); a process that encodes no prompts needs none. Raises
    ModelError too for a template that exceeds the limits.
    """
    with quiet_library_logging():
        try:
            chosen = tokenizer_class(source.folder, source.tokenizer_folder)
            tokenizer = chosen.from_pretrained(source.tokenizer_folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:
            raise ModelError(f"the tokenizer in {source.tokenizer_folder} cannot be read: {error}") from error
    made = PromptTokenizer(
        tokenizer,
        name=source.name,
        extra_eos_ids=source.generation_eos_ids,
        num_rows=source.num_embedding_rows,
        prompts=prompts,
    )
    if prompts is not None and made.template is not None and (reason := check_template(made.template)):
        raise ModelError(f"the chat template of {source.name} cannot be used: {reason}; give another model")
    return made
