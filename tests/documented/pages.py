"""The commands in README and docs/.

A command is a line of a code block that begins with a program of `PROGRAMS`, or any line of a block marked as `sh`.
Code blocks are fenced, or indented after an empty line. Inline code that begins with `ftis-node` is a command too.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent != ROOT / "docs/results"),
]
PROGRAMS = frozenset(
    """apt-get bash cd chmod chown cp crontab curl docker export for ftis-node git helm journalctl kubectl ln
    loginctl make mkdir mv nvidia-smi openssl pip podman prometheus promtool python python3 rm scp source ssh sudo
    systemctl tensorboard tmux unshare useradd wget""".split()
)
ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=")
NAMED = re.compile(r"`?ftis-node docs ([a-z-]+/[a-z-]+)(#[\w-]+)?`?")
INLINE = re.compile(r"(?<!`)`(ftis-node [^`]+)`(?!`)")
SHELL = {"sh", "bash", "shell", "console"}


@dataclass(frozen=True)
class Block:
    """A code block: its language, or "" for none, and its lines without indentation."""

    page: str
    language: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """One simple command: assignments before it, its words, and its line of the page."""

    page: str
    settings: tuple[str, ...]
    words: tuple[str, ...]
    line: str
    is_inline: bool = False

    @property
    def text(self) -> str:
        return " ".join(self.words)


def blocks(path: Path) -> Iterator[Block]:
    """Yield the code blocks of a page."""
    for token in MarkdownIt().parse(path.read_text()):
        if token.type in ("fence", "code_block"):
            yield Block(path.name, token.info.strip(), tuple(token.content.splitlines()))


def commands(path: Path) -> Iterator[Command]:
    for block in blocks(path):
        for line in "\n".join(block.lines).replace("\\\n", "").splitlines():
            if block.language in {"", *SHELL} and (_begins_with_a_program(line) or block.language in SHELL):
                yield from _simple_commands(path.name, line)
    outside = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for match in INLINE.finditer(outside):
        yield from _simple_commands(path.name, match[1], is_inline=True)


def _begins_with_a_program(line: str) -> bool:
    words = [word for word in line.split() if not ASSIGNMENT.match(word)]
    return bool(words) and not line.startswith(" ") and words[0] in PROGRAMS


def _simple_commands(page: str, line: str, *, is_inline: bool = False) -> Iterator[Command]:
    """Yield the commands of a line, which `;`, `&&`, `|` and brackets separate."""
    lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=";&|()")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set(";&|()"):
            settings = tuple(takewhile(ASSIGNMENT.match, words))
            if rest := tuple(words[len(settings) :]):
                yield Command(page, settings, rest, line, is_inline)
            words = []
        else:
            words.append(word)


def as_links(text: str) -> str:
    """Return Markdown of a page in `docs/reference/`, in which pages that are named by their command are links."""
    return NAMED.sub(lambda found: f"[{found[1]}](../{found[1]}.md{found[2] or ''})", text)


def write_table(path: Path, head: str, table: str) -> None:
    """Replace the table of a page that begins with `head` and ends at the first empty line."""
    before, _, rest = path.read_text(encoding="utf-8").partition(head)
    after = rest.partition("\n\n")[2]
    path.write_text(f"{before}{table}\n{after}", encoding="utf-8")
