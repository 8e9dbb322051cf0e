"""The generated code agrees with `proto/rollout.proto`, whose fields have comments. Only one file parses messages."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ftis_node"
PARSING_FILE = Path("records/parsing.py")
PARSER = re.compile(r"\.(ParseFromString|FromString|MergeFromString|Parse|ParseDict)\b")


def test_the_committed_code_is_up_to_date(tmp_path):
    protoc = pytest.importorskip("grpc_tools.protoc")
    arguments = [sys.executable, f"-I{ROOT / 'proto'}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    assert protoc.main([*arguments, str(ROOT / "proto" / "rollout.proto")]) == 0
    for name in ("rollout_pb2.py", "rollout_pb2.pyi"):
        committed = (ROOT / "ftis_node" / "records" / name).read_text()
        assert committed == (tmp_path / name).read_text(), "run `make proto`"


def test_every_field_has_a_comment():
    lines = (ROOT / "proto" / "rollout.proto").read_text().splitlines()
    fields = [number for number, line in enumerate(lines) if re.match(r"\s+[\w ]+ = \d+;", line)]
    assert len(fields) > 40
    for number in fields:
        assert lines[number - 1].strip().startswith("//"), f"line {number + 1}: {lines[number].strip()}"


def test_messages_are_parsed_in_one_file_only():
    for path in sorted(PACKAGE.rglob("*.py")):
        name, source = path.relative_to(PACKAGE), path.read_text()
        if "rollout_pb2" not in source or name.name == "rollout_pb2.py" or name == PARSING_FILE:
            continue
        assert name.parts[0] == "records", f"{name}: only records/ may import the schema"
        assert not PARSER.search(source), f"{name} parses a message without a check of its bounds"
    assert PARSER.search((PACKAGE / PARSING_FILE).read_text())
