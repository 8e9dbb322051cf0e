"""Find the points in the source where `doctor`, `gossip`, `node` and `validation` handle values of peers.

A point is of one of two kinds, with these names:

    node/loops/announcements.py:AnnouncementHandler.handle                   a function with a parameter from a peer
    node/loops/announcements.py:AnnouncementHandler.handle>open_announcement   a call of a reader

A reader is a function of `records/` or `gossip/` that takes bytes or a stream and does not return bytes. `TEXT_READERS`
has the other readers. A parameter is from a peer by its type or by its name.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    Function = ast.FunctionDef | ast.AsyncFunctionDef

PACKAGE = Path(__file__).parents[2] / "ftis_node"
PACKAGES = ("doctor", "gossip", "node", "validation")  # these call `records` and `swarm`
READER_PACKAGES = ("records", "gossip")
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
TEXT_READERS = {  # take a peer's text or addresses, or are of a library
    *("usable_addresses", "address_block", "subnet_of", "parse_multiaddr", "part_names", "peer_id_from_text"),
    *("read_pbmsg_safe", "validated_domain", "train_group", "validate", "refuse_offer"),
}


def points(package: Path = PACKAGE) -> set[str]:
    """Return the names of all points."""
    readers = readers_of(package)
    found = set()
    for path in _files(package, PACKAGES):
        tree = ast.parse(path.read_text())
        here = readers & bound_names(tree)
        for name, function in functions(tree):
            where = f"{path.relative_to(package).as_posix()}:{name}"
            if takes_value(function) and not places_of(function):
                found.add(where)
            found |= {f"{where}>{reader}" for reader in called(function) & here}
    return found


def readers_of(package: Path = PACKAGE) -> set[str]:
    """Return the names of the functions that convert a peer's bytes or text to values."""
    found = set(TEXT_READERS)
    for path in _files(package, READER_PACKAGES):
        for name, function in functions(ast.parse(path.read_text())):
            given = "" if function.returns is None else ast.unparse(function.returns)
            if "." not in name and not name.startswith("_") and given not in ("bytes", "None"):
                if any(names_in(parameter.annotation) & RAW_TYPES for parameter in parameters(function)):
                    found.add(name)
    return found


def takes_value(function: Function) -> bool:
    """Return whether a function has a parameter from a peer."""
    return any(
        parameter.arg in VALUE_NAMES or names_in(parameter.annotation) & (VALUE_TYPES | RAW_TYPES)
        for parameter in parameters(function)
    )


def places_of(function: Function) -> list[str]:
    """Return the names in `Place` of the guarded work in a function, "" for a computed place."""
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
    """Return the functions that a module imports or defines."""
    imported = {alias.asname or alias.name for node in module.body for alias in getattr(node, "names", ())}
    return imported | {node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def called(function: Function) -> set[str]:
    """Return the names that a function uses. Methods that read are separate points."""
    return {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield functions and methods with their qualified names. Nested functions belong to the outer one."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node


def parameters(function: Function) -> list[ast.arg]:
    """Return all parameters but `*args` and `**kwargs`."""
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def names_in(annotation: ast.expr | None) -> set[str]:
    return {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)} if annotation else set()


def _files(package: Path, packages: tuple[str, ...]) -> list[Path]:
    found = sorted(path for room in packages for path in (package / room).rglob("*.py"))
    return [path for path in found if not path.name.endswith("_pb2.py")]
