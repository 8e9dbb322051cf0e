"""`ftis-node swarm`: who takes part in a run, what each does, and who learns from whom."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftis_node.cli.options import HomeOption, JsonOption, home_at, print_document
from ftis_node.errors import FileError, UsageError
from ftis_node.node.http_api.node_client import read_document

if TYPE_CHECKING:
    from collections.abc import Callable


def swarm(
    home: HomeOption = None,
    peers: Annotated[
        list[str] | None,
        typer.Option("--peers", help="Multiaddr of a peer that serves the directory; needs no home. Needs --run."),
    ] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="RUN_ID", help="With --peers: the run.")] = None,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Update until ctrl-C.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=1.0, max=86400, metavar="SECONDS", help="Seconds between updates.")
    ] = 10.0,
) -> None:
    """Show the peers of a run: who takes part, rates, accuracy, and who learns from whom.

    The home is that of a node or of a bootstrap node. All figures are claims in signed directory records.

    JSON shape: [{run: {id, name, task, method}, taken_at, own_id, num_unreadable, num_omitted, peers: [{peer_id, name,
    role, model, parameters, software, seen_at, tokens_per_minute, step, groups_per_minute, refused_groups,
    pass_rates: [[step, pass_at_1]], learns_from: {peer_id: share}, measured_at}]}]; with --watch one line per update.
    """
    read = _from_directory(tuple(peers), run) if peers else lambda: read_document(home_at(home), "/swarm")
    if not watch:
        document = read()
        print_document(document, lambda: _lines(document), as_json=as_json)
        return
    from ftis_node.cli.watch import watch as show_until_interrupt

    show_until_interrupt(
        read,
        screen=lambda document, _: _lines(document),
        log_text=lambda document: "\n".join(_lines(document)),
        interval_s=interval_s,
        as_json=as_json,
    )


def _lines(document: Any) -> list[str]:
    from ftis_node.swarm.overview import SwarmView, render_views

    try:
        return render_views([SwarmView.from_dict(one) for one in document])
    except (TypeError, ValueError) as error:  # a damaged status.json, or a node with another version
        raise FileError(f"the view of the swarm cannot be read ({error}): start the node again") from None


def _from_directory(peers: tuple[str, ...], run: str | None) -> Callable[[], Any]:
    from ftis_node.node.peers.swarm_survey import survey_run
    from ftis_node.node.startup.run_plan import is_run_id

    if run is None or not is_run_id(run):
        raise UsageError("--peers needs --run RUN_ID: `ftis-node status --json` of a member has it as run.id")
    return lambda: [survey_run(run, peers).as_dict()]
