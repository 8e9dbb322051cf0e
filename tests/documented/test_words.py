"""The prose of the project uses the field's words, and no sentence has more than 25 words."""

import pytest

from tests.documented.words import DEFAULT, files, findings


def test_no_file_has_a_banned_word_or_a_long_sentence():
    found = [str(finding) for path in files(list(DEFAULT)) for finding in findings(path)]
    assert not found, "\n".join(found)


LONG = "one " * 26 + "end."


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.py", '"""A node\n\nis told it."""\n', [(3, "told")]),
        ("a.py", "x = '# 1'  # nobody tells it\n", [(1, "tells")]),
        ("a.py", 'log(f"{x} was told {y} groups")\n', [(1, "told")]),
        ("a.py", "told = door = 1\nx = 'told'\n", []),
        ("a.py", f'"""{LONG}"""\n', [(1, "27 words")]),
        ("a.py", f'"""Table.\n\n| a | {LONG} |\n| b | is told |\n"""\n', [(4, "told")]),
        ("a.py", f"x = 1  # {LONG[:64]}\n# {LONG[:64]} end.\n", []),
        ("a.md", "# Page\n\nUnlike models of text,\nit is unlike that.\n", [(3, "Unlike models"), (4, "is unlike")]),
        ("a.md", "```\nis told\n```\n\n    is told\n\n`told` and `the door`.\n", []),
        ("a.md", "| a | the door |\n|---|---|\n", [(1, "door")]),
        ("a.md", f"- {LONG}\n- Short.\n", [(1, "27 words")]),
        ("a.py", f'execute("""\nSELECT\n{LONG}""")\n', []),
        ("a.toml", '# it is told\nkey = "it stands here"  # more\n', [(1, "told"), (2, "stands")]),
        ("a.proto", "int32 x = 1;  // whoever it is\n", [(1, "whoever")]),
        ("a.json", '{"description": "The door said it."}\n', [(1, "door")]),
        ("a.md", "Where it is on, all runs. The path where it is written.\n", [(1, "Where it")]),
    ],
)
def test_the_linter_finds_prose_and_no_code(tmp_path, name, content, expected):
    (tmp_path / name).write_text(content)
    assert sorted((finding.line, finding.word) for finding in findings(tmp_path / name)) == expected
