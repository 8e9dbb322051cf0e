"""Checks of a model: whether it is complete and readable here, or available on the hub, and whether it fits.

Only a configuration of a few kilobytes is downloaded, which the memory plan needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ftis_node.config.home import Home
from ftis_node.config.home_files import remembered_settings
from ftis_node.config.manifest import RunManifest, load_manifest
from ftis_node.config.node import NodeSettings, load_node_settings
from ftis_node.doctor.check_result import CheckResult
from ftis_node.errors import FileError, FtisError, ModelError, NetworkError
from ftis_node.files import read_text
from ftis_node.memory.choice import (
    DEFAULT_RUN,
    PreviousTraining,
    TrainingOption,
    choose,
    read_previous_training,
    smaller_model,
    training_label,
)
from ftis_node.memory.machine import Card, Machine
from ftis_node.memory.placement import inspect_machine
from ftis_node.memory.plan import MemoryPlan, plan
from ftis_node.models import (
    ModelShape,
    ModelSource,
    PromptSettings,
    load_tokenizer,
    read_shape,
    resolve_model,
    shape_of,
)
from ftis_node.models.adapter_folder import continued
from ftis_node.models.chat_template import EXAMPLES
from ftis_node.models.gguf import gguf_config, gguf_here, is_gguf
from ftis_node.models.hub import HubModel, ask_about, cached_snapshot
from ftis_node.models.quantized import missing_package
from ftis_node.models.source import check_name
from ftis_node.telemetry.host_memory import free_host_bytes
from ftis_node.telemetry.terminal_text import GIB, in_gib, printable

OPTIONS_HEAD = f"{'needs':>10}  fits  plan"
DETAILS = ("memory.part",)  # shown with --verbose only
PLACES = {
    "cpu": "no GPU: both workers in host memory",
    "shared": "both workers stay on one GPU",
    "time_shared": "one GPU: the generator sleeps while the learner steps",
    "dedicated": "the generator on the first GPU, the learner on the next",
    "does_not_fit": "does not fit",
}
LICENCE = re.compile(r"^license:\s*['\"]?([^\s'\"]+)", re.MULTILINE)
CARD = "README.md"
CARD_HEAD_CHARACTERS = 10_000


@dataclass(frozen=True, slots=True)
class MemoryQuestion:
    """The question whether `settings.model` fits. `gpus_bytes`: GPUs to assume; None: those of this machine.

    `begun`: what the home already trains; None: nothing.
    """

    settings: NodeSettings
    manifest: RunManifest
    gpus_bytes: tuple[int, ...] | None = None
    begun: PreviousTraining | None = None


def memory_question(
    home: Home, *, model: str, run: str | None = None, gpus_gib: Sequence[float] = (), **flags: Any
) -> MemoryQuestion:
    """Return the question of `doctor`'s flags: the settings that `join` would use, and the run of a preset or file.

    `flags` are the node's settings, None if not given. Without `run` it is the home's run, else `gsm8k-ftis`. Raises
    ConfigError.
    """
    settings = load_node_settings(home.node_toml, remembered=remembered_settings(home), model=model, **flags)
    manifest = load_manifest(run or (str(home.run_toml) if home.run_toml.exists() else DEFAULT_RUN))
    gpus_bytes = tuple(int(gib * GIB) for gib in gpus_gib) or None
    return MemoryQuestion(settings, manifest, gpus_bytes, read_previous_training(home, settings.model))


def memory_results(question: MemoryQuestion, shape: ModelShape) -> Iterator[CheckResult]:
    """Yield what `join` would train of a model of this shape, its memory plan, and the other options."""
    settings, manifest = question.settings, question.manifest
    if settings.is_quantized and (advice := missing_package()):
        yield CheckResult("memory.package", "warn", "--quantize 4bit needs bitsandbytes", advice)
    if settings.is_quantized and shape.experts is not None:
        finding = "the model is a mixture of experts, which --quantize 4bit excludes"
        yield CheckResult("memory.plan", "fail", finding, "give --quantize none")
        return
    try:
        if question.gpus_bytes is None:
            settings, machine = inspect_machine(settings)
        else:
            machine = Machine(tuple(map(Card, question.gpus_bytes)), free_host_bytes())
        choice = choose(settings, manifest, shape, machine, question.begun)
        chosen = next((option for option in choice.options if option.settings is choice.settings), None)
        if chosen is None:
            made = plan(shape, replace(machine, cards=()), choice.settings, manifest)
        else:
            made = chosen.made
        advice = "" if made.fits else made.advice
        if not made.fits and settings.lora is None and question.begun is None and choice.options:
            advice = smaller_model(choice, manifest, shape, machine)
    except FtisError as error:
        yield CheckResult("memory.plan", "fail", str(error))
        return
    name = chosen.name if chosen else training_label(choice.settings)
    title = f"{manifest.name}, {name}: {_place(made, len(machine.cards))}"
    yield from _report(made, title=title, advice=advice)
    if len(choice.options) > 1:
        yield from (_option(option, is_taken=option is chosen and made.fits) for option in choice.options)


def _report(made: MemoryPlan, *, title: str, advice: str) -> Iterator[CheckResult]:
    """Yield a plan as results: the verdict, its parts, and the cache's share."""
    verdict = f"{title}: {in_gib(made.peak_bytes)} at the peak of {in_gib(made.usable_bytes)}{made.bound}"
    if made.step_s:
        verdict += f", about {made.step_s:.0f} s a step"
    yield CheckResult("memory.plan", "ok" if made.fits else "fail", verdict, advice, made.peak_bytes)
    for name, num_bytes in made.parts.items():
        if num_bytes:
            yield CheckResult("memory.part", "ok", f"{in_gib(num_bytes):>10}  {name}", num_bytes=num_bytes)
    if made.gpu_memory_utilization is not None:
        speed = f"{made.activations}; the output head takes {made.head_chunk_tokens} tokens at once"
        yield CheckResult("memory.part", "ok", speed)
        share = f"the generator's share of its GPU for weights and cache: {made.gpu_memory_utilization:.3f}"
        yield CheckResult("memory.part", "ok", share)
        yield CheckResult(
            "memory.part", "ok", f"host memory beside it: {in_gib(made.host_bytes)}", num_bytes=made.host_bytes
        )


def _place(made: MemoryPlan, num_gpus: int) -> str:
    gpus = made.gpus
    if num_gpus < 2 or made.placement in ("cpu", "does_not_fit"):
        return PLACES[made.placement]
    if gpus.are_shared:
        return f"{PLACES[made.placement]} (GPU {gpus.learner[0]} of {num_gpus})"
    ranks = ", divided among them" if len(gpus.learner) > 1 else ""
    unused = [str(gpu) for gpu in range(num_gpus) if gpu not in (*gpus.generator, *gpus.learner)]
    rest = f"; not used: {', '.join(unused)}" if unused else ""
    return f"{gpus}{ranks}{rest}"


def _option(option: TrainingOption, *, is_taken: bool) -> CheckResult:
    """Return a row of the table under `OPTIONS_HEAD`."""
    note = " (join takes this)" if is_taken else f" (first {option.missing})" if option.missing and option.fits else ""
    row = f"{in_gib(option.made.needed_bytes):>10}  {'yes' if option.fits else 'no':<4}  {option.name}{note}"
    return CheckResult("memory.option", "ok", row, num_bytes=option.made.needed_bytes)


def check_model(question: MemoryQuestion) -> Iterator[CheckResult]:
    """Yield the results of the model of `question`, and its memory plan if its shape is known."""
    model = question.settings.model
    try:
        check_name(model)
        source = _on_this_machine(model)
        file_config = gguf_config(source) if isinstance(source, Path) else {}
    except FtisError as error:
        yield CheckResult("model.found", "fail", str(error), "correct --model, or complete the folder")
        return
    if isinstance(source, Path):
        size = f"{source.stat().st_size / 1e9:.2f} GB"
        yield CheckResult("model.found", "ok", f"{source} is complete, {size}: the first `join` converts it")
        yield from _planned(question, partial(shape_of, file_config, where=str(source)))
        return
    if source is not None:
        question = replace(question, settings=continued(question.settings, source.adapter))
        yield from _files(source, PromptSettings(question.settings.prompts.template_arguments))
        yield from _planned(question, partial(read_shape, source))
        return
    if is_gguf(model):
        finding = f"{model} is not on this machine, so doctor cannot plan its memory"
        yield CheckResult("model.found", "warn", finding, "the first `join` downloads it, and then plans its memory")
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
    where = f"{model}: config.json"
    yield from _planned(question, partial(shape_of, on_hub.config, where=where, num_parameters=on_hub.num_parameters))


def _on_this_machine(model: str) -> ModelSource | Path | None:
    """Return the model in its folder or in a cache, or its GGUF file if that is not converted.

    None if it must be downloaded. Raises ModelError.
    """
    if Path(model).expanduser().is_dir():
        return resolve_model(model)
    if is_gguf(model):
        found = gguf_here(model)
        return resolve_model(str(found)) if found is not None and found.is_dir() else found
    folder = cached_snapshot(model)
    if folder is None:
        return None
    try:
        return resolve_model(str(folder))
    except ModelError:  # an interrupted download
        return None


def _files(source: ModelSource, prompts: PromptSettings) -> Iterator[CheckResult]:
    num_bytes = sum(path.stat().st_size for path in source.weights_files)
    what = "" if source.adapter is None else f", the base of the adapter {source.adapter}"
    yield CheckResult("model.found", "ok", f"{source.folder}{what} is complete, {num_bytes / 1e9:.2f} GB of weights")
    yield tokenizer_of(source, prompts)
    if licence := _licence_in(source.path / CARD):
        yield CheckResult("model.licence", "ok", f"its card names the license {licence}")


def tokenizer_of(source: ModelSource, prompts: PromptSettings) -> CheckResult:
    """Return whether the tokenizer and its chat template can be used, and how a prompt and an answer end."""
    try:
        tokenizer = load_tokenizer(source, prompts=prompts)
        opening = tokenizer.render_prompt(EXAMPLES[-1]).opening
    except ModelError as error:
        advice = "correct prompts.template_arguments in node.toml, fetch the folder again, or give another"
        return CheckResult("model.tokenizer", "fail", str(error), advice)
    ends = " or ".join(tokenizer.decode([token], skip_special=False) for token in tokenizer.end_ids) or "no token"
    what = f"{tokenizer.vocab_size} tokens, an answer ends with {printable(ends)}"
    if tokenizer.template is None:
        advice = "fine for a base model; a chat model gives worse answers without it"
        return CheckResult("model.tokenizer", "warn", f"{what}, no chat template: prompts are plain lines", advice)
    begins = f", which begins the answer with {printable(opening.strip())}" if opening else ""
    return CheckResult("model.tokenizer", "ok", f"{what}, with a chat template{begins}")


def _licence_in(card: Path) -> str:
    try:
        found = LICENCE.search(read_text(card)[:CARD_HEAD_CHARACTERS])
    except (OSError, FileError):
        return ""
    return found[1] if found else ""


def _planned(question: MemoryQuestion, read: Callable[[], ModelShape]) -> Iterator[CheckResult]:
    try:
        shape = read()
    except ModelError as error:
        yield CheckResult("memory.plan", "warn", str(error), "it may still fit: join tries it")
        return
    yield from memory_results(question, shape)


def _offered(model: str, on_hub: HubModel) -> Iterator[CheckResult]:
    size = f", {on_hub.num_bytes / 1e9:.1f} GB" if on_hub.num_bytes else ""
    yield CheckResult("hub.reached", "ok", f"the hub has {model}{size}: the first `join` downloads it")
    token = "an access token is set" if on_hub.has_token else "no access token is set, and the model needs none"
    yield CheckResult("hub.token", "ok", token)
    if on_hub.licence:
        yield CheckResult("model.licence", "ok", f"its card names the license {json.dumps(on_hub.licence)[1:-1]}")
