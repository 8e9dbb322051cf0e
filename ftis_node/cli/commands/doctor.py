"""`ftis-node doctor`: what this machine can run, and what to change if it cannot."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftis_node.cli.options import (
    BaseForm,
    GpusOption,
    HomeOption,
    JsonOption,
    TensorParallelOption,
    generation_settings,
    home_at,
    print_document,
)
from ftis_node.cli.progress import show_fraction
from ftis_node.errors import ConfigError
from ftis_node.telemetry.terminal_text import wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ftis_node.doctor.check_result import CheckResult

# same as in doctor/doctor.py
CHECKS = ("python", "gpu", "ram", "disk", "limits", "engine", "grader", "port", "route", "peer", "model")
INDENT = " " * 6
OPTION = "memory.option"


def doctor(
    model: Annotated[str | None, typer.Option(help="Also check this model and plan its memory.")] = None,
    run: Annotated[str | None, typer.Option(help="Preset or TOML file to plan for.", show_default="the home's")] = None,
    lora: Annotated[
        bool | None, typer.Option("--lora/--full", help="Plan for a LoRA adapter, or for all weights.")
    ] = None,
    quantize: Annotated[BaseForm | None, typer.Option(help="Plan for the base of an adapter in this form.")] = None,
    gpu_memory: Annotated[
        list[float] | None,
        typer.Option(metavar="GIB", help="Plan for a GPU of this size in GiB instead; repeat it for each GPU."),
    ] = None,
    gpus: GpusOption = None,
    tensor_parallel: TensorParallelOption = None,
    peers: Annotated[
        list[str] | None, typer.Option(help="Multiaddr of a peer to dial. Repeatable.", show_default="the home's")
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(help="Multiaddr whose port should be free. Repeatable.", show_default="the home's"),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Run only this check: {', '.join(CHECKS)}. Repeatable.")
    ] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Measure the first GPU for three minutes; the figures are in doctor-gpu.json.")
    ] = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also show each part of the memory plan.")] = False,
) -> None:
    """Check the machine. Each finding says what to do (ftis-node docs reference/doctor lists them all).

    Peers, given here or in the home's node.toml, are dialed one by one, and their clocks compared with this one.

    Exit code 3 if the machine cannot run a node, 4 if the network fails, 0 with warnings.

    JSON shape: [{check, id, level: "ok" | "warn" | "fail", finding, advice, num_bytes}], the worst first.

    With --gpu nothing is checked. Both workers run on the first GPU with --model or a random one, with --lora,
    --quantize 4bit or all weights. The figures are one JSON object.
    """
    if gpu:
        _measure(model, lora=lora, quantize=quantize, as_json=as_json)
        return
    if model is None and any((run is not None, lora is not None, quantize, gpu_memory, gpus, tensor_parallel)):
        raise ConfigError(
            "--run, --lora, --full, --quantize, --gpu-memory, --gpus and --tensor-parallel plan a model's memory: "
            "give it with --model"
        )
    if any(not 0 < gib < float("inf") for gib in gpu_memory or ()):
        raise ConfigError("--gpu-memory needs a number of GiB above 0")
    if unknown := set(only or ()) - set(CHECKS):
        raise ConfigError(f"--only {min(unknown)}: unknown check; known are {', '.join(CHECKS)}")

    from ftis_node.config.home_files import remembered_settings
    from ftis_node.config.node import load_node_settings
    from ftis_node.doctor.check_result import worst_first
    from ftis_node.doctor.doctor import checks_of, exit_code_of, run_checks
    from ftis_node.doctor.model import DETAILS, memory_question
    from ftis_node.gossip import parse_multiaddr
    from ftis_node.gossip.multiaddr import parse_listen_address

    place = home_at(home)
    settings = load_node_settings(
        place.node_toml,
        remembered=remembered_settings(place),
        model=model or "any",
        peers=tuple(peers) if peers else None,
        listen=tuple(listen) if listen else None,
    )
    for address in settings.peers:
        parse_multiaddr(address)
    for address in settings.listen:
        parse_listen_address(address)
    question = None
    if model:
        generation = generation_settings(tensor_parallel)
        flags = {"lora": lora, "quantize": quantize, "gpus": gpus, "generation": generation}
        question = memory_question(place, model=model, run=run, gpus_gib=gpu_memory or (), **flags)
    checks = [check for check in checks_of(place, settings, question) if check.name in (only or CHECKS)]
    findings = worst_first(run_checks(checks, on_progress=lambda text: typer.echo(f"{text} ...", err=True)))
    shown = [finding for finding in findings if verbose or finding.id not in DETAILS]
    print_document([finding.as_dict() for finding in findings], lambda: _screen(shown), as_json=as_json)
    if code := exit_code_of(findings):
        failed = dict.fromkeys(finding.id for finding in findings if finding.level == "fail")
        typer.echo(f"ftis-node: not ready: {', '.join(failed)}; see the advice above", err=True)
        raise typer.Exit(code)


def _measure(model: str | None, *, lora: bool | None, quantize: BaseForm | None, as_json: bool) -> None:
    from ftis_node.lab.card.check import check_card, table_of

    file = Path("doctor-gpu.json").absolute()
    with show_fraction("measuring the GPU") as on_progress:
        found = check_card(file, model=model, lora=bool(lora), quantize=quantize or "none", on_progress=on_progress)
    print_document(found, lambda: [*table_of(found), f"{file}: attach it to an issue"], as_json=as_json)


def _screen(findings: list[CheckResult]) -> Iterator[str]:
    from ftis_node.doctor.model import OPTIONS_HEAD

    head = OPTIONS_HEAD
    for finding in findings:
        if head and finding.id == OPTION:
            yield " " * len(f"{finding.level:5} {OPTION}: ") + head
            head = ""
        yield from _lines(finding)


def _lines(finding: CheckResult) -> Iterator[str]:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    level = finding.level.upper() if finding.level == "fail" else finding.level
    yield from wrapped(f"{level:5} {finding.id}: {finding.finding}", width, indent=len(INDENT))
    for line in wrapped(f"-> {finding.advice}", width - len(INDENT)) if finding.advice else ():
        yield INDENT + line
