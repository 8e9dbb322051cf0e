"""`ftis-node chat` and `ftis-node try`: ask the trained model of a home, or any model."""

from __future__ import annotations

import dataclasses
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftis_node.cli.options import Device, HomeOption, JsonOption, home_at, print_json
from ftis_node.cli.progress import show_fraction
from ftis_node.errors import ModelError
from ftis_node.telemetry.terminal_text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftis_node.generation.chat_model import ChatModel

EXIT, RESET = "/exit", "/reset"
ModelOption = Annotated[
    str | None, typer.Option(help="Ask this folder, hub id or GGUF file.", show_default="the home's newest")
]
CompareOption = Annotated[
    str | None, typer.Option(help="Also ask this model.", show_default="with a home, the model it started from")
]
AloneOption = Annotated[bool, typer.Option("--alone", help="Do not ask the model that the home started from.")]
SystemOption = Annotated[
    str | None, typer.Option(help="System message.", show_default="of the home's or export's task")
]
MaxTokensOption = Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")]
TemperatureOption = Annotated[float, typer.Option(min=0.0, help="Temperature of sampling; 0 is greedy.")]
DeviceOption = Annotated[Device, typer.Option(help="Device of the models.")]


def chat(
    home: HomeOption = None,
    model: ModelOption = None,
    compare: CompareOption = None,
    alone: AloneOption = False,
    system: SystemOption = None,
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    device: DeviceOption = "auto",
) -> None:
    """Talk to the trained model, beside the model it started from.

    Each model remembers its own conversation. /reset starts a new one; /exit or Ctrl-D ends. If standard input is no
    terminal, each line is one question.
    """
    answering: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "device": device}
    models = _opened(home, model=model, compare=compare, alone=alone, system=system, **answering)
    for question in _questions():
        if question == RESET:
            for each in models:
                each.reset()
            continue
        for each in models:
            try:
                _show_answer(each, question, with_name=len(models) > 1)
            except ModelError as error:
                typer.echo(f"ftis-node: {error}", err=True)


def ask_once(
    question: Annotated[str, typer.Argument(help="The question.")],
    home: HomeOption = None,
    model: ModelOption = None,
    compare: CompareOption = None,
    alone: AloneOption = False,
    system: SystemOption = None,
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Ask one question: the answer of the trained model, and of the model it started from.

    JSON shape: {question, answers: [{role, model, text, num_tokens, truncated}]}; role is base, trained or model.
    """
    answering: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "device": device}
    models = _opened(home, model=model, compare=compare, alone=alone, system=system, **answering)
    if not as_json:
        for each in models:
            _show_answer(each, question, with_name=len(models) > 1)
        return
    rows = [{"role": each.role, "model": each.name, **dataclasses.asdict(each.ask(question))} for each in models]
    print_json({"question": question, "answers": rows})


def _opened(home: Path | None, **options: Any) -> list[ChatModel]:
    from ftis_node.evaluation.chat import open_models
    from ftis_node.evaluation.members import prompts_for_command

    where = home_at(home)
    with show_fraction("chat") as progress:
        return open_models(where, prompts=prompts_for_command(where), on_progress=progress, **options)


def _questions() -> Iterator[str]:
    """Yield the questions of the input, without empty lines, until its end or /exit."""
    if is_terminal := sys.stdin.isatty():
        typer.echo(f"{RESET} starts a new conversation, {EXIT} or Ctrl-D ends")
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    for line in map(str.strip, _typed() if is_terminal else sys.stdin):
        if line == EXIT:
            return
        if line and not is_terminal:
            typer.echo(f"> {printable(line)}")
        if line:
            yield line


def _typed() -> Iterator[str]:
    import readline  # noqa: F401  # gives input() a history and the arrow keys

    while True:
        try:
            yield input("> ")
        except EOFError:
            typer.echo()
            return


def _show_answer(model: ChatModel, question: str, *, with_name: bool) -> None:
    if with_name:
        typer.echo(f"{model.role} ({printable(model.name)}):")
    answer = model.ask(question, on_text=lambda text: typer.echo(printable(text, keep_newlines=True), nl=False))
    typer.echo(" [cut: raise --max-tokens]" if answer.truncated else "")
