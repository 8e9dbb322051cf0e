"""`ftis-node invite`: one string, and a QR code, with which a friend joins the node's run."""

from __future__ import annotations

import ipaddress
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from ftis_node.cli.commands.peers import parse_length_s
from ftis_node.cli.options import HomeOption, JsonOption, home_at, print_json
from ftis_node.config.home import Home
from ftis_node.config.home_files import last_settings
from ftis_node.errors import ConfigError
from ftis_node.node.http_api.node_client import read_document
from ftis_node.telemetry.terminal_text import date_time

QR_BORDER = 2


def invite(
    length: Annotated[str, typer.Option("--for", metavar="TIME", help="Duration: 30m, 2h, 7d.")] = "7d",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print an invitation to the run of a running node: `ftis-node join INVITATION --model MODEL` accepts it.

    It holds addresses, the run and its secret, so it is as private as the secret. JSON shape: {invitation, expires_at,
    addresses: [..], run, has_secret}.
    """
    from ftis_node.config.invite import invite_to
    from ftis_node.config.manifest import load_manifest

    where = home_at(home)
    if where.running_url() is None:
        raise ConfigError(f"no node runs in {where.root}: start it, so that the invitation has its addresses")
    if not where.run_toml.exists():
        raise ConfigError(f"the node in {where.root} holds no run, as a bootstrap node: invite from a node of the run")
    manifest, expires_at = load_manifest(str(where.run_toml)), int(time.time() + parse_length_s(length))
    addresses, secret = _addresses(where), _secret(where)
    text = invite_to(manifest, addresses=addresses, secret=secret, expires_at=expires_at).text()
    if as_json:
        shown = {"invitation": text, "expires_at": expires_at, "addresses": addresses}
        print_json(shown | {"run": manifest.run_id, "has_secret": bool(secret)})
        return
    _show_code(text)
    typer.echo(f"ftis-node join {text} --model {_example_model(where)}")
    typer.echo("the friend may use any model with the same tokenizer", err=True)
    if all(_distance(address) != GLOBAL for address in addresses):
        reach = "only this machine and its local network can dial the addresses in it"
        typer.echo(f"{reach}: for other friends see ftis-node docs operate/networking", err=True)
    private = "; with it one reads the messages of the swarm" if secret else ""
    typer.echo(f"valid until {date_time(expires_at)[:-3]}{private}", err=True)


def _example_model(home: Home) -> str:
    """Return the name of the node's model if a friend can fetch it by this name, else MODEL."""
    from ftis_node.models.gguf import HUB_FILE, PACKAGE, PACKAGE_PREFIX
    from ftis_node.models.hub import HUB_ID

    model = str(last_settings(home).get("model"))
    if model.startswith(PACKAGE_PREFIX):
        return model if PACKAGE.fullmatch(model.removeprefix(PACKAGE_PREFIX)) else "MODEL"
    is_of_hub = HUB_ID.fullmatch(model) or HUB_FILE.fullmatch(model)
    return model if is_of_hub and not Path(model).exists() else "MODEL"


def _addresses(home: Home) -> list[str]:
    """Return the addresses that a friend can dial, those for other networks first, then the node's own peers.

    Those of this machine alone are left out, unless there are no others.
    """
    from ftis_node.config.invite import MAX_ADDRESSES

    own = [str(address) for address in read_document(home, "/status")["node"]["addresses"]]
    known = last_settings(home).get("peers")
    dialed = [address for address in known if isinstance(address, str)] if isinstance(known, list) else []
    unique = list(dict.fromkeys([*sorted(own, key=_distance), *dialed]))
    found = [address for address in unique if _distance(address) < LOCAL] or unique
    if not found:
        raise ConfigError("the node has no address that others can dial: see ftis-node docs operate/networking")
    return found[:MAX_ADDRESSES]


GLOBAL, PRIVATE, LOCAL = range(3)


def _distance(address: str) -> int:
    try:
        host = ipaddress.ip_address(address.split("/")[2])
    except (ValueError, IndexError):
        return GLOBAL  # a name, or a relay
    return LOCAL if host.is_loopback else PRIVATE if host.is_private else GLOBAL


def _secret(home: Home) -> bytes:
    from ftis_node.telemetry.secrets import read_secret

    swarm: Any = last_settings(home).get("swarm")
    path = swarm.get("secret_file") if isinstance(swarm, dict) else ""
    return read_secret(Path(path).expanduser(), name="swarm.secret_file") if path else b""


def _show_code(text: str) -> None:
    """Print the QR code on a terminal that is wide enough."""
    if not sys.stdout.isatty():
        return
    import segno

    with suppress(segno.DataOverflowError):
        code = segno.make_qr(text, error="l")
        if code.symbol_size(border=QR_BORDER)[0] <= shutil.get_terminal_size().columns:
            code.terminal(compact=True, border=QR_BORDER)
