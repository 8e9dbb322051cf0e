"""The chat template of plain lines: that of the prompts on which a model without a template is trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

CHAT_TEMPLATE_FILE = "chat_template.jinja"
LINES = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}{{ '\\n\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
EXAMPLES: tuple[Sequence[Mapping[str, object]], ...] = (
    [{"role": "user", "content": "What is 12 + 30?"}],
    [{"role": "system", "content": "Answer\n in tags. "}, {"role": "user", "content": " naïve  42"}],
)


def plain_template(tokenizer: Any, encode: Callable[[Sequence[Mapping[str, object]]], Sequence[int]]) -> str:
    """Return the template with which a transformers tokenizer gives the ids of `encode`; empty if there is none.

    The start tokens are part of it. Some tokenizers begin a text with a space, but not after a start token.
    """
    ids = encode(EXAMPLES[0])
    num_special = next(number for number, token in enumerate(ids) if token not in tokenizer.all_special_ids)
    start = "".join(tokenizer.convert_ids_to_tokens(ids[:num_special]))
    for before in (start, f"{start} "):
        template = f"{{{{ {json.dumps(before)} }}}}{LINES}" if before else LINES
        options = {"chat_template": template, "add_generation_prompt": True, "return_dict": False}
        if all(tokenizer.apply_chat_template(each, **options) == list(encode(each)) for each in EXAMPLES):
            return template
    return ""
