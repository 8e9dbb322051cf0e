"""`ftis-node learner-host`: this host's part of a learner that several hosts share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ftis_node.cli.options import LogFormat, LogFormatOption
from ftis_node.errors import UsageError
from ftis_node.telemetry.log import log_as_json


def learner_host(
    rendezvous: Annotated[
        str, typer.Option("--rendezvous", metavar="HOST:PORT", help="The node's `learner.rendezvous`.")
    ],
    secret_file: Annotated[
        Path, typer.Option("--secret-file", help="File with the secret of all hosts, as on the node.")
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="Folder or hub id of the node's model on this host.",
            show_default="the node's folder, else its hub id",
        ),
    ] = "",
    threads: Annotated[
        int, typer.Option("--threads", min=0, max=1024, help="CPU threads of each process; 0: all cores, divided.")
    ] = 0,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=1, max=86400, help="Longest wait for an answer of the node.")
    ] = 600.0,
    wait_again: Annotated[
        bool, typer.Option("--wait-again", help="After the node ends, wait for its next start instead of ending.")
    ] = False,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Run this host's processes of a node's learner, if `learner.hosts` is above 1 there.

    Needs a private network between the hosts, the node's model and as many GPUs as the node's learner. Needs no home.
    Ends when the node ends. If the node's learner restarts, this host joins it again.
    """
    if log_format is LogFormat.JSON:
        log_as_json()
    from ftis_node.config.workers import parse_endpoint

    try:
        host, port = parse_endpoint(rendezvous, name="--rendezvous")
    except ValueError as error:
        raise UsageError(str(error)) from None
    import asyncio

    from ftis_node.learner.distributed.host_agent import AgentSettings, run_agent
    from ftis_node.telemetry.secrets import read_secret

    settings = AgentSettings(host, port, model=model, threads=threads, timeout_s=timeout_s, waits_again=wait_again)
    try:
        asyncio.run(run_agent(settings, read_secret(secret_file, name="--secret-file")))
    except asyncio.CancelledError:
        typer.echo("stopped", err=True)
