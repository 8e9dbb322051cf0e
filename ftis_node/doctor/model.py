"""Checks of a model: whether it is complete and readable here, or available on the hub, and whether it fits.

Only a configuration of a few kilobytes is downloaded, which the plan needs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node.doctor.memory import memory_results
from ftis_node.doctor.table import CheckResult
from ftis_node.errors import FileError, FtisError, ModelError, NetworkError
from ftis_node.files import read_text
from ftis_node.models import read_json, read_shape, resolve_model, shape_of
from ftis_node.models.hub import ask_about, cached_snapshot
from ftis_node.models.source import check_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftis_node.doctor.memory import MemoryQuestion
    from ftis_node.models import ModelShape, ModelSource
    from ftis_node.models.hub import HubModel

LICENCE = re.compile(r"^license:\s*['\"]?([^\s'\"]+)", re.MULTILINE)
CARD = "README.md"
CARD_HEAD_CHARACTERS = 10_000
TEMPLATE_FILE = "chat_template.jinja"


def check_model(question: MemoryQuestion) -> Iterator[CheckResult]:
    """Yield the results of the model of `question`, and its memory plan if its shape is known."""
    model = question.settings.model
    try:
        check_name(model)
        source = _on_this_machine(model)
    except FtisError as error:
        yield CheckResult("model.found", "fail", str(error), "correct --model, or complete the folder")
        return
    if source is not None:
        yield from _files(source)
        yield from _planned(question, source)
        return
    try:
        on_hub = ask_about(model)
    except NetworkError as error:
        text = str(error).split(": give ")[0]
        yield CheckResult("hub.reached", "fail", text, "check the network, or give a local folder with --model DIR")
        return
    except ModelError as error:
        yield CheckResult("hub.reached", "fail", str(error), "check the name, and HF_TOKEN")
        return
    yield from _offered(model, on_hub)
    try:
        shape = shape_of(on_hub.config, where=f"{model}: config.json", num_parameters=on_hub.num_parameters)
    except ModelError as error:
        yield CheckResult("memory.plan", "warn", str(error), "it may work all the same: join tries it")
        return
    yield from memory_results(question, shape)


def _on_this_machine(model: str) -> ModelSource | None:
    """Return the model in its folder or in the hub's cache; None if it must be downloaded. Raises ModelError."""
    if Path(model).expanduser().is_dir():
        return resolve_model(model)
    folder = cached_snapshot(model)
    if folder is None:
        return None
    try:
        return resolve_model(str(folder))
    except ModelError:  # an interrupted download
        return None


def _files(source: ModelSource) -> Iterator[CheckResult]:
    num_bytes = sum(path.stat().st_size for path in source.weights_files)
    yield CheckResult("model.found", "ok", f"{source.folder} is complete, {num_bytes / 1e9:.2f} GB of weights")
    yield tokenizer_of(source.folder)
    if licence := _licence_in(source.folder / CARD):
        yield CheckResult("model.licence", "ok", f"its card names the license {licence}")


def tokenizer_of(folder: Path) -> CheckResult:
    """Return whether the tokenizer can be read. Without loading transformers, this checks only `tokenizer.json`."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return CheckResult("model.tokenizer", "ok", "its files are there")
    from tokenizers import Tokenizer

    try:
        size = Tokenizer.from_file(str(file)).get_vocab_size()
    except Exception as error:  # the library raises plain Exception
        return CheckResult(
            "model.tokenizer", "fail", f"{file} cannot be read: {error}", "fetch the model's folder again"
        )
    if not has_template(folder):
        advice = "fine for a base model; a chat model gives worse answers without it"
        return CheckResult(
            "model.tokenizer", "warn", f"{size} tokens, no chat template: prompts are plain lines", advice
        )
    return CheckResult("model.tokenizer", "ok", f"{size} tokens, with a chat template")


def has_template(folder: Path) -> bool:
    """Return whether the folder has a chat template, in a separate file or in the tokenizer's settings."""
    if (folder / TEMPLATE_FILE).is_file():
        return True
    try:
        return bool(read_json(folder / "tokenizer_config.json").get("chat_template"))
    except ModelError:
        return False


def _licence_in(card: Path) -> str:
    try:
        found = LICENCE.search(read_text(card)[:CARD_HEAD_CHARACTERS])
    except (OSError, FileError):
        return ""
    return found[1] if found else ""


def _planned(question: MemoryQuestion, source: ModelSource) -> Iterator[CheckResult]:
    try:
        shape: ModelShape = read_shape(source)
    except ModelError as error:
        yield CheckResult("memory.plan", "warn", str(error), "it may work all the same: join tries it")
        return
    yield from memory_results(question, shape)


def _offered(model: str, on_hub: HubModel) -> Iterator[CheckResult]:
    size = f", {on_hub.num_bytes / 1e9:.1f} GB" if on_hub.num_bytes else ""
    yield CheckResult("hub.reached", "ok", f"the hub has {model}{size}: the first `join` downloads it")
    token = "an access token is set" if on_hub.has_token else "no access token is set, and the model needs none"
    yield CheckResult("hub.token", "ok", token)
    if on_hub.licence:
        yield CheckResult("model.licence", "ok", f"its card names the license {json.dumps(on_hub.licence)[1:-1]}")
