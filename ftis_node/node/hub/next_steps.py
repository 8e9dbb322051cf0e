"""How to ask, serve and push an exported model: the lines that `export` prints, and the section of the model card."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftis_node.generation.engines.vllm_options import served_rank
from ftis_node.models.adapter_folder import read_adapter_config
from ftis_node.telemetry.terminal_text import printable

QUESTION = "What is 12 + 30?"
ANY_REPOSITORY = "OWNER/NAME"
SECTION = """## Use

Replace `{name}` by a folder for a local copy.

```python
from transformers import pipeline

ask = pipeline("text-generation", model="{name}")
question = [{turns}]
(answer,) = ask(question, max_new_tokens=256, do_sample=False)
print(answer["generated_text"][-1]["content"])
```

```
{serve}
```
"""


def next_steps(folder: Path, *, home: Path | None, is_pushed: bool) -> list[str]:
    """Return what to do with an exported folder, one command a line. `home` is that of the command, if it named one."""
    where = shlex.quote(str(folder))
    of_home = f"--home {shlex.quote(str(home))} " if home else ""
    push = f"  push   ftis-node export {of_home}--push-to {ANY_REPOSITORY} --out ANOTHER"
    return [
        f'  ask    ftis-node try "{QUESTION}" --model {where}',
        f"  serve  {serve_command(str(folder), read_adapter_config(folder))}",
        *([] if is_pushed else [push]),
    ]


def ollama_step(file: Path) -> str:
    """Return the command by which ollama imports a GGUF file and its Modelfile."""
    return f"  run    ollama create {shlex.quote(file.stem.lower())} -f {shlex.quote(str(file.parent / 'Modelfile'))}"


def use_section(name: str, adapter: Mapping[str, Any] | None, *, base: str, system: str) -> str:
    """Return the section of a card for the repository `name`.

    `base` is the name of the adapter's base model, `system` the system message of the run's task.
    """
    messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": QUESTION}]
    turns = ", ".join(map(json.dumps, messages))  # on one line, so that no text ends the block of code
    return SECTION.format(name=name, turns=turns, serve=serve_command(name, adapter, base=base))


def serve_command(model: str, adapter: Mapping[str, Any] | None, *, base: str | None = None) -> str:
    """Return the command of vLLM for a model, or for an adapter and its base."""
    if adapter is None:
        return f"vllm serve {shlex.quote(model)}"
    start = shlex.quote(printable(base or str(adapter["base_model_name_or_path"])))
    rank = served_rank(int(adapter["r"]))
    return f"vllm serve {start} --enable-lora --max-lora-rank {rank} --lora-modules trained={shlex.quote(model)}"
