"""Only `records/parsing.py` parses messages, because it checks the bounds of every field."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ftis_node"
PARSING_FILE = Path("records/parsing.py")
PARSERS = {"ParseFromString", "FromString", "MergeFromString", "Parse", "ParseDict"}


def parsing_lines(source: str) -> Iterator[int]:
    """Yield the lines that parse a message."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in PARSERS:
            yield node.lineno


def imports_the_schema(source: str) -> bool:
    imported = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return any("rollout_pb2" in alias.name for node in imported for alias in node.names)


def test_messages_are_parsed_in_one_file_only() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        name, source = path.relative_to(PACKAGE), path.read_text()
        if name.name == "rollout_pb2.py" or name == PARSING_FILE or not imports_the_schema(source):
            continue
        assert name.parts[0] == "records", f"{name}: only records/ may import the schema"
        assert list(parsing_lines(source)) == [], f"{name} parses a message without a check of its bounds"
    assert list(parsing_lines((PACKAGE / PARSING_FILE).read_text()))


@pytest.mark.parametrize(
    "line", ["pb.Body.FromString(data)", "message.ParseFromString(data)", "parse = pb.Body.FromString"]
)
def test_a_parser_elsewhere_is_found(line: str) -> None:
    assert list(parsing_lines(line)) == [1]
    assert imports_the_schema(f"from ftis_node.records import rollout_pb2 as pb\n{line}")
