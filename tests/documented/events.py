"""The events that the code writes to `events.jsonl` with their fields, read from the syntax trees.

python -m tests.documented.events       print them as table rows
"""

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ftis_node"
RECEIVERS = {"events", "_events", "event_log"}


@cache
def written() -> dict[str, set[str]]:
    """Return the fields of each event whose name is written as a literal or as a constant; `...` for `**fields`."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if _is_write(node):
                assert isinstance(node, ast.Call)
                for name in _names(node.args[0]):
                    found.setdefault(name, set()).update(keyword.arg or "..." for keyword in node.keywords)
    return found


def _is_write(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
        return False
    receiver = node.func.value
    last = getattr(receiver, "attr", getattr(receiver, "id", ""))
    return (node.func.attr == "write" and last in RECEIVERS) or (node.func.attr == "_write" and last == "self")


def _names(argument: ast.expr) -> list[str]:
    match argument:
        case ast.Constant(value=str(name)) if name.isidentifier():
            return [name]
        case ast.IfExp(body=ast.Constant(value=str(one)), orelse=ast.Constant(value=str(other))):
            return [one, other]
        case ast.Name(id=name) if name.isupper():  # a constant whose name is its value in capitals
            return [name.lower()]
    return []


def fields_of(name: str) -> str:
    fields = sorted(written()[name] - {"..."}) + (["..."] if "..." in written()[name] else [])
    return ", ".join(f"`{field}`" if field != "..." else field for field in fields) or "-"


if __name__ == "__main__":
    for event in sorted(written()):
        print(f"| `{event}` | {fields_of(event)} |  |")  # noqa: T201
