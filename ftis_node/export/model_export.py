"""Export of a home's newest checkpoint: in the format of the Hugging Face hub with a model card, and as a GGUF file."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ftis_node.config.home import Home
from ftis_node.config.home_files import last_settings, start_command
from ftis_node.config.manifest import load_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.config.section import first_problem
from ftis_node.errors import ConfigError, DamagedError
from ftis_node.export.model_card import RunRecord, write_model_card
from ftis_node.files import read_object, write_error
from ftis_node.generation.engines.vllm_options import served_rank
from ftis_node.memory.placement import WorkerPlacement
from ftis_node.models import PromptSettings, load_tokenizer, resolve_model
from ftis_node.models.adapter_folder import ADAPTER_CONFIG_FILE, read_adapter_config
from ftis_node.models.gguf import SUFFIX
from ftis_node.models.gguf_export import GgufKind, architecture_of, modelfile, write_gguf
from ftis_node.node.startup.previous_run import read_last_status
from ftis_node.node.startup.worker_boots import learner_boot
from ftis_node.tasks.registry import system_message
from ftis_node.telemetry.log import OnProgress, unwatched
from ftis_node.telemetry.terminal_text import printable

MODELFILE = "Modelfile"
QUESTION = "What is 12 + 30?"
ANY_REPOSITORY = "OWNER/NAME"
USE = """
## Use

```python
from transformers import pipeline

ask = pipeline("text-generation", model="{name}")
(answer,) = ask({turns}, max_new_tokens=256, do_sample=False)
print(answer["generated_text"][-1]["content"])
```

```
{serve}
```
"""


def export_model_of(
    home: Home,
    out: Path,
    *,
    merge: bool,
    base: str | None = None,
    license: str | None = None,
    repository: str | None = None,
    on_progress: OnProgress = unwatched,
) -> int:
    """Write the model, its card and the manifest to `out`, and return its training step.

    `base` is the base model's id on the hub if the node was given a folder, `license` the hub's id of a license. A
    folder for a `repository` of the hub names no path of this machine. The chat template is the home's, with its
    arguments as defaults. Raise ConfigError if no node has run with the home, its settings are not of this release, or
    `out` is in use.
    """
    from ftis_node.learner.checkpoint.export import export_newest

    if not home.settings.exists() or not home.run_toml.exists():
        raise ConfigError(f"no node has run with the home {home.root}: give the right one with --home")
    try:
        given = NodeSettings.model_validate(read_object(home.settings))
    except ValidationError as error:
        problem = first_problem(error, schema=NodeSettings)
        raise DamagedError(f"{home.settings}: {problem}; `{start_command(home)}` writes it again") from error
    manifest = load_manifest(str(home.run_toml))
    source, nothing_planned = resolve_model(given.model, on_progress=on_progress), WorkerPlacement()
    settings = given.model_copy(update={"quantize": "none"})  # an adapter is merged into the base as it is published
    boot = learner_boot(settings, manifest, source, home, nothing_planned, weights=home.weights)
    tokenizer = load_tokenizer(source, prompts=PromptSettings(settings.prompts.template_arguments))
    step = export_newest(boot, out, merge=merge, tokenizer=tokenizer, on_progress=on_progress)
    folder = out.expanduser()
    adapter = read_adapter_config(folder)
    if adapter and (base or repository):  # the name of a local folder is a path of this machine
        adapter["base_model_name_or_path"] = base or source.base.name
        (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(adapter, indent=2, sort_keys=True), encoding="utf-8")
    trains = ("--lora" if given.lora else "--full") + (f" --quantize {given.quantize}" if given.is_quantized else "")
    record = RunRecord(manifest, base or source.name, trains, given.seed, read_last_status(home))
    use = _use_section(repository or ANY_REPOSITORY, adapter, base=record.base, system=system_message(manifest.task))
    write_model_card(folder, record, step=step, is_adapter=adapter is not None, use=use, license=license)
    return step


def _use_section(name: str, adapter: Mapping[str, Any] | None, *, base: str, system: str) -> str:
    """Return the section of a card for the repository `name`. `base` is the name of the adapter's base model."""
    messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": QUESTION}]
    turns = f"[{', '.join(map(json.dumps, messages))}]"  # on one line, so that no text ends the block of code
    return USE.format(name=name, turns=turns, serve=_serve_command(name, adapter, base=base))


def next_steps(folder: Path, *, home: Path | None, is_pushed: bool) -> list[str]:
    """Return what to do with an exported folder, one command a line. `home` is that of the command, if it named one."""
    where = shlex.quote(str(folder))
    of_home = f"--home {shlex.quote(str(home))} " if home else ""
    push = f"  push   ftis-node export {of_home}--push-to {ANY_REPOSITORY} --out ANOTHER"
    return [
        f'  ask    ftis-node try "{QUESTION}" --model {where}',
        f"  serve  {_serve_command(str(folder), read_adapter_config(folder))}",
        *([] if is_pushed else [push]),
    ]


def _serve_command(model: str, adapter: Mapping[str, Any] | None, *, base: str | None = None) -> str:
    if adapter is None:
        return f"vllm serve {shlex.quote(model)}"
    start, rank = printable(base or str(adapter["base_model_name_or_path"])), served_rank(int(adapter["r"]))
    adapters = f"--enable-lora --max-lora-rank {rank} --lora-modules trained={shlex.quote(model)}"
    return f"vllm serve {shlex.quote(start)} {adapters}"


def ollama_step(file: Path) -> str:
    """Return the command by which ollama imports a GGUF file and its Modelfile."""
    return f"  run    ollama create {shlex.quote(file.stem.lower())} -f {shlex.quote(str(file.parent / MODELFILE))}"


def check_gguf_file(file: Path, home: Home) -> None:
    """Raise ConfigError unless `file` is a new GGUF file in a folder without a Modelfile.

    Raises ModelError if the model of the home is of a family that is not written.
    """
    if file.suffix != SUFFIX:
        raise ConfigError(f"--gguf {file}: give the name of a file that ends with {SUFFIX}")
    for path in (file, file.parent / MODELFILE):
        if path.exists():
            raise ConfigError(f"{path} exists: give a file in another folder with --gguf")
    if isinstance(model := last_settings(home).get("model"), str):
        architecture_of(resolve_model(model))


def export_gguf(folder: Path, file: Path, *, kind: GgufKind, system: str) -> None:
    """Write the model in `folder` to `file`, which has its name only when it is complete, and then the Modelfile.

    `system` is the usual system message. Raises ModelError as `write_gguf`, and MachineError if the disk refuses.
    """
    source = resolve_model(str(folder), trains=False)
    text = modelfile(file, load_tokenizer(source, prompts=PromptSettings()), system=system)
    partial = file.with_name(f".{file.name}.partial-{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(source, partial, kind=kind)
        partial.rename(file)
        (file.parent / MODELFILE).write_text(text, encoding="utf-8")
    except OSError as error:
        raise write_error(f"{file} cannot be written: {error}", error) from error
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()
