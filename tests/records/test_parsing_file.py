"""Only `records/parsing.py` parses messages, because it checks the bounds of every field."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ftis_node"
PARSING_FILE = Path("records/parsing.py")
PARSER = re.compile(r"\.(ParseFromString|FromString|MergeFromString|Parse|ParseDict)\b")


def test_messages_are_parsed_in_one_file_only():
    for path in sorted(PACKAGE.rglob("*.py")):
        name, source = path.relative_to(PACKAGE), path.read_text()
        if "rollout_pb2" not in source or name.name == "rollout_pb2.py" or name == PARSING_FILE:
            continue
        assert name.parts[0] == "records", f"{name}: only records/ may import the schema"
        assert not PARSER.search(source), f"{name} parses a message without a check of its bounds"
    assert PARSER.search((PACKAGE / PARSING_FILE).read_text())
