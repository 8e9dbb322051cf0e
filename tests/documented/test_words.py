"""The prose of the project uses the field's words, and its sentences stay short.

`ALLOWED` has the numbers of banned words and of sentences above 25 words that a folder may have. Reduce them, never
increase them; a folder without an entry may have none. `python -m tests.documented.words --count` prints the numbers.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.documented.words import DEFAULT, files, findings, folder

if TYPE_CHECKING:
    from pathlib import Path

    from tests.documented.words import Finding

ALLOWED: dict[str, tuple[int, int]] = {}

LONG_MESSAGES = {
    "ftis_node/tasks": 1,  # the system prompt, which a change would make another task
}
"""The numbers of sentences above 25 words that the messages, help texts and settings of a folder may have."""


@pytest.fixture(scope="module")
def found() -> list[Finding]:
    """All findings in the files of the repository."""
    return [finding for path in files(list(DEFAULT)) for finding in findings(path)]


def test_banned_words_and_long_sentences_do_not_increase(found: list[Finding]) -> None:
    words = Counter(folder(finding.path) for finding in found if not finding.is_long)
    longs = Counter(folder(finding.path) for finding in found if finding.is_long and not finding.is_message)
    above = [
        f"{name}: {words[name]} banned words, {longs[name]} long sentences; allowed {ALLOWED.get(name, (0, 0))}"
        for name in sorted({*words, *longs})
        if words[name] > ALLOWED.get(name, (0, 0))[0] or longs[name] > ALLOWED.get(name, (0, 0))[1]
    ]
    assert not above, "\n".join([*above, "see them: python -m tests.documented.words --long FOLDER"])


def test_long_messages_do_not_increase(found: list[Finding]) -> None:
    longs = Counter(folder(finding.path) for finding in found if finding.is_long and finding.is_message)
    above = [f"{name}: {longs[name]} long messages" for name in longs if longs[name] > LONG_MESSAGES.get(name, 0)]
    assert not above, "\n".join([*above, "see them: python -m tests.documented.words --long FOLDER"])


LONG = "one " * 26 + "end."


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.py", '"""A node\n\nis told it."""\n', [(3, "told")]),
        ("a.py", "x = 1  # nobody tells it\n", [(1, "tells")]),
        ("a.py", 'log(f"{x} was told {y} groups")\n', [(1, "told")]),
        ("a.py", "told = door = 1\nx = 'told'\n", []),
        ("a.py", f'"""{LONG}"""\n', [(1, "27 words")]),
        ("a.py", f'"""Table.\n\n| a | {LONG} |\n| b | is told |\n"""\n', [(4, "told")]),
        ("a.py", f"x = 1  # {LONG[:64]}\n# {LONG[:64]} end.\n", []),
        ("a.md", "# Page\n\nUnlike models of text,\nit is unlike that.\n", [(3, "Unlike models"), (4, "is unlike")]),
        ("a.md", "# Page\n\nSome text with\ntwo unlike models in it.\n", [(4, "unlike models")]),
        ("a.md", "```\nis told\n```\n\n    is told\n\n`told` and `the door`.\n", []),
        ("a.md", "| a | the door |\n|---|---|\n", [(1, "door")]),
        ("a.md", f"- {LONG}\n- Short.\n", [(1, "27 words")]),
        ("a.py", f'log("{LONG}")\n', [(1, "27 words")]),
        ("a.py", f'execute("""\nSELECT\n{LONG}""")\n', []),
        ("a.toml", f'advice = "{LONG}"\n', [(1, "27 words")]),
        ("a.toml", '# it is told\nkey = "it stands here"  # more\n', [(1, "told"), (2, "stands")]),
        ("a.proto", "int32 x = 1;  // whoever it is\n", [(1, "whoever")]),
        ("a.json", '{"description": "The door said it."}\n', [(1, "door")]),
        ("a.md", "Where it is on, all runs. The path where it is written.\n", [(1, "Where it")]),
        ("a.md", "It waits, for there is more. A place for it.\n", [(1, "for there")]),
    ],
)
def test_the_linter_finds_prose_and_no_code(
    tmp_path: Path, name: str, content: str, expected: list[tuple[int, str]]
) -> None:
    (tmp_path / name).write_text(content)
    assert sorted((finding.line, finding.word) for finding in findings(tmp_path / name)) == expected
