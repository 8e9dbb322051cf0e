"""`ftis-node doctor`: what this machine can do, and what to change where it cannot."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from ftis_node.cli.common import HomeOption, JsonOption, home_at, print_json
from ftis_node.errors import MachineError


def doctor(
    model: Annotated[str | None, typer.Option("--model", help="Also plan the memory of this model.")] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the machine; each finding says what to do. Exit code 3 where something needed is missing.

    JSON shape: [{check, level: "ok" | "note" | "problem", finding, advice}].
    """
    from ftis_node.node.doctor import examine

    findings = examine(home_at(home), model=model)
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        for finding in findings:
            advice = f" -> {finding.advice}" if finding.advice else ""
            typer.echo(f"{finding.level:8} {finding.check:10} {finding.finding}{advice}")
    if problems := [finding.check for finding in findings if finding.level == "problem"]:
        raise MachineError(f"not ready: {', '.join(problems)}; see the advice above")
