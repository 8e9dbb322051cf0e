"""A Modelfile: the settings with which ollama imports a GGUF file, and prompts it as the node does.

ollama has its own language for templates, and knows the chat templates of some families. For any other it would send
the bare question. So the template is made of prompts that the model's tokenizer renders, with fields in place of the
texts. One filled template is one turn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ftis_node.errors import ModelError
from ftis_node.models.tokenizer import PromptTokenizer

SYSTEM: Final = {"role": "system", "content": "{{ .System }}"}
PROMPT: Final = {"role": "user", "content": "{{ .Prompt }}"}
QUOTES: Final = '"""'


def modelfile(file: Path, tokenizer: PromptTokenizer, *, system: str = "") -> str:
    """Return the Modelfile for a GGUF file beside it, with greedy answers. `system` is the usual system message.

    Raises ModelError for texts that a Modelfile cannot quote.
    """
    ends = [tokenizer.decode([token], skip_special=False) for token in tokenizer.end_ids]
    with_system, without = (_rendered(tokenizer, turns) for turns in ([SYSTEM, PROMPT], [PROMPT]))
    template = (
        f"{{{{ if .System }}}}{with_system}{{{{ else }}}}{without}{{{{ end }}}}{{{{ .Response }}}}{''.join(ends[:1])}"
    )
    lines = [
        "# ollama create NAME -f Modelfile",
        f"FROM ./{file.name}",
        f"TEMPLATE {_quoted(template)}",
        *([f"SYSTEM {_quoted(system)}"] if system else []),
        *(f"PARAMETER stop {_quoted(end)}" for end in ends),
        "PARAMETER temperature 0",
    ]
    return "\n".join(lines) + "\n"


def _rendered(tokenizer: PromptTokenizer, turns: list[dict[str, str]]) -> str:
    """Return a prompt up to the answer, without the start tokens that llama.cpp adds by itself."""
    prompt = tokenizer.render_prompt(turns)
    return prompt.text.removeprefix(tokenizer.start_text) + prompt.opening


def _quoted(text: str) -> str:
    if QUOTES in text:
        raise ModelError(f"a Modelfile cannot hold {QUOTES}, which the prompts of the model have")
    return f"{QUOTES}{text}{QUOTES}"
