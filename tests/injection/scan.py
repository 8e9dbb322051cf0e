"""Where values of peers are handled in `gossip`, `node` and `doctor`, read off the syntax.

A point is one of two things, and each has a name:

    node/loops/announcements.py:AnnouncementHandler.handle                   a function that takes a value of a peer
    node/loops/announcements.py:AnnouncementHandler.handle>open_announcement   a call of a reader: a value

Readers are found by rule: functions of `records/` and `gossip/` that take bytes or a stream and give something else
than bytes, and the few that `TEXT_READERS` names. Values are found by their type, or by the name of the parameter.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    Function = ast.FunctionDef | ast.AsyncFunctionDef

PACKAGE = Path(__file__).parents[2] / "ftis_node"
ROOMS = ("doctor", "gossip", "node", "validation")  # `records` works inside of these, `swarm` on what they give
READING_ROOMS = ("records", "gossip")
RAW_TYPES = {"bytes", "StreamReader"}
VALUE_TYPES = {
    *("Accepted", "Announcement", "Arrival", "DHTRecord", "DirectoryEntry", "Envelope", "Fetched", "GossipMessage"),
    *("Group", "Message", "PeerConnection", "PeerRecord", "PullItem", "PullRequest"),
    *(
        "BackfillRequest",
        "RecordError",
        "Refusal",
        "Refused",
        "SequenceGap",
        "SequenceTracker",
        "StoredGroup",
        "TextGroup",
        "ValidationResult",
    ),
    "WeightsOffer",
}
VALUE_NAMES = {"addresses", "announcer", "message", "origin", "peer", "peer_id", "peer_ids", "request", "sender"}
TEXT_READERS = {  # they take a peer's text or addresses, or come from a library
    *("usable_addresses", "address_block", "subnet_of", "parse_multiaddr", "part_names", "peer_id_from_text"),
    *("read_pbmsg_safe", "validated_domain", "train_group", "validate", "refuse_offer"),
}


def points(package: Path = PACKAGE) -> set[str]:
    readers = readers_of(package)
    found = set()
    for path in _files(package, ROOMS):
        tree = ast.parse(path.read_text())
        here = readers & bound_names(tree)
        for name, function in functions(tree):
            where = f"{path.relative_to(package).as_posix()}:{name}"
            if takes_value(function) and not places_of(function):
                found.add(where)
            found |= {f"{where}>{reader}" for reader in called(function) & here}
    return found


def readers_of(package: Path = PACKAGE) -> set[str]:
    """Functions, by name, that make values out of a peer's bytes or text."""
    found = set(TEXT_READERS)
    for path in _files(package, READING_ROOMS):
        for name, function in functions(ast.parse(path.read_text())):
            given = "" if function.returns is None else ast.unparse(function.returns)
            if "." not in name and not name.startswith("_") and given not in ("bytes", "None"):
                if any(names_in(parameter.annotation) & RAW_TYPES for parameter in parameters(function)):
                    found.add(name)
    return found


def takes_value(function: Function) -> bool:
    """Whether a function has a parameter that is a peer's."""
    return any(
        parameter.arg in VALUE_NAMES or names_in(parameter.annotation) & (VALUE_TYPES | RAW_TYPES)
        for parameter in parameters(function)
    )


def places_of(function: Function) -> list[str]:
    """The places of the guarded work in a function, by their names in `Place`; "" for one that is computed."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    given = [
        call.args[1]
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("work_for", "_work_for") and len(call.args) > 1
    ]
    return [
        each.attr if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "Place" else "" for each in given
    ]


def bound_names(module: ast.Module) -> set[str]:
    """Functions that a module imports or defines."""
    imported = {alias.asname or alias.name for node in module.body for alias in getattr(node, "names", ())}
    return imported | {node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def called(function: Function) -> set[str]:
    """Names of functions that a function calls or passes on. Methods that read are points themselves."""
    return {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Functions and methods with their qualified names; those inside of functions belong to these."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node


def parameters(function: Function) -> list[ast.arg]:
    """Of any kind, without `*args` and `**kwargs`."""
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def names_in(annotation: ast.expr | None) -> set[str]:
    return {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)} if annotation else set()


def _files(package: Path, rooms: tuple[str, ...]) -> list[Path]:
    found = sorted(path for room in rooms for path in (package / room).rglob("*.py"))
    return [path for path in found if not path.name.endswith("_pb2.py")]
