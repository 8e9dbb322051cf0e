"""`ftis-node doctor`: what this machine can do, and what to change where it cannot."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from ftis_node.cli.common import HomeOption, JsonOption, home_at, print_json
from ftis_node.errors import ConfigError, MachineError


def doctor(
    model: Annotated[str | None, typer.Option("--model", help="Also plan the memory of this model.")] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Preset or TOML file to plan for.", show_default="the home's")
    ] = None,
    lora: Annotated[bool | None, typer.Option("--lora/--full", help="Plan for an adapter, or for all weights.")] = None,
    gpu_memory: Annotated[
        list[float] | None,
        typer.Option("--gpu-memory", metavar="GIB", help="Plan for a GPU of this size instead; again for each more."),
    ] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the machine; each finding says what to do. Exit code 3 where something needed is missing.

    JSON shape: [{check, level: "ok" | "note" | "problem", finding, advice, num_bytes}].
    """
    from ftis_node.node.doctor import examine
    from ftis_node.node.memory_report import ask

    if model is None and (run is not None or lora is not None or gpu_memory):
        raise ConfigError("--run, --lora, --full and --gpu-memory plan a model's memory: name it with --model")
    if any(not 0 < gib < float("inf") for gib in gpu_memory or ()):
        raise ConfigError("--gpu-memory is a number of GiB above 0")
    place = home_at(home)
    question = ask(place, model=model, run=run, lora=lora, gpus_gib=gpu_memory or ()) if model else None
    findings = examine(place, question=question)
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        for finding in findings:
            advice = f" -> {finding.advice}" if finding.advice else ""
            typer.echo(f"{finding.level:8} {finding.check:10} {finding.finding}{advice}")
    if problems := [finding.check for finding in findings if finding.level == "problem"]:
        raise MachineError(f"not ready: {', '.join(problems)}; see the advice above")
