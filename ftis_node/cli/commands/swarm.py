"""`ftis-node swarm`: who takes part in a run, what each does, and who learns from whom."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftis_node.cli.options import HomeOption, JsonOption, home_at, print_document
from ftis_node.errors import ConfigError, FileError, UsageError
from ftis_node.files import replace_file
from ftis_node.node.http_api.node_client import read_document, read_status

if TYPE_CHECKING:
    from ftis_node.config.home import Home
    from ftis_node.swarm.overview import SwarmView


def swarm(
    home: HomeOption = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(help="Multiaddr of a peer that serves the directory; needs no home. Needs --run."),
    ] = None,
    run: Annotated[str | None, typer.Option(metavar="RUN_ID", help="With --peers: the run.")] = None,
    as_json: JsonOption = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page to this file.")] = None,
) -> None:
    """Show the peers of a run: who takes part, rates, accuracy, and who learns from whom.

    The home is that of a node or of a bootstrap node. All figures are claims in signed directory records. The page of
    --html has the line to join with, and so addresses of this node or of --peers.

    JSON shape: [{run: {id, name, task, method, limits}, taken_at, own_id, num_unreadable, num_omitted, peers:
    [{peer_id, name, role, model, parameters, software, seen_at, tokens_per_minute, step, groups_per_minute,
    refused_groups, pass_rates: [[step, pass_at_1]], learns_from: {peer_id: share}, measured_at, used_groups,
    used_tokens}]}].
    """
    if run and not peers:
        raise UsageError("--run is for --peers ADDRESS: omit it to see the runs of the home")
    if html is not None and as_json:
        raise UsageError("--html writes a page and --json prints: give one of the two")
    document = _from_directory(tuple(peers), run) if peers else read_document(home_at(home), "/swarm")
    if html is None:
        print_document(document, lambda: _lines(document), as_json=as_json)
        return
    page = _page(document, tuple(peers or ()) or addresses_of(home_at(home)), is_live=False)
    try:
        replace_file(html, page.encode())
    except OSError as error:
        raise UsageError(f"cannot write {html}: {error.strerror}; give another --html") from None
    typer.echo(html)


def addresses_of(home: Home) -> tuple[str, ...]:
    """Return the addresses of the node on this home; () for a bootstrap node, which has no status."""
    with suppress(ConfigError):
        return tuple(read_status(home).node.addresses)
    return ()


def live_page(home: Home) -> str:
    """Return the live page of the swarm as the node on this home sees it."""
    return _page(read_document(home, "/swarm"), addresses_of(home), is_live=True)


def _page(document: Any, addresses: tuple[str, ...], *, is_live: bool) -> str:
    from ftis_node.report.swarm_page import swarm_page

    return swarm_page(_views(document), addresses=addresses, is_live=is_live)


def _lines(document: Any) -> list[str]:
    from ftis_node.view.swarm import swarm_text

    return swarm_text(_views(document), now=time.time())


def _views(document: Any) -> list[SwarmView]:
    from ftis_node.swarm.overview import SwarmView

    try:
        return [SwarmView.from_dict(one) for one in document]
    except (TypeError, ValueError) as error:  # a damaged status.json, or a node with another version
        raise FileError(f"the view of the swarm cannot be read ({error}): start the node again") from None


def _from_directory(peers: tuple[str, ...], run: str | None) -> list[dict[str, Any]]:
    from ftis_node.bootstrap.survey import survey_run
    from ftis_node.node.startup.run_plan import is_run_id

    if run is None or not is_run_id(run):
        raise UsageError("--peers needs --run RUN_ID: `ftis-node status --json` of a member has it as run.id")
    return [survey_run(run, peers).as_dict()]
