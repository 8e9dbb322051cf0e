"""A small prose linter that finds banned words and sentences above 25 words.

    python -m tests.documented.words [--long] [PATH ...]

It reads docstrings, comments and texts of Python files, comments and texts of TOML, YAML, JSON and proto files, and the
prose of Markdown pages. It ignores code blocks and inline code. Each finding is one line: FILE:LINE: WORD: SENTENCE.
Without PATH it reads the folders and files of `DEFAULT`.
"""

import argparse
import ast
import re
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
DEFAULT = tuple("ftis_node tests bench examples proto deploy docs README.md CONTRIBUTING.md CHANGELOG.md".split())
EXCLUDED = frozenset(("tests/documented/words.py", "tests/documented/test_words.py"))  # they quote banned words
SUFFIXES = frozenset(".py .md .toml .yaml .yml .service .env .proto .json".split())
LONGEST = 25
SYSTEM_PROMPT = "Write the reasoning inside <think>"  # other words would make another task
BANNED = {  # pattern: what to write
    r"told|tells?|telling": "report, log, send, distinguish",
    r"hears?|heard|hearing": "receive, listen",
    r"doors?": "validation",
    r"lets? go|letting go": "drop, release",
    r"stands?|stood": "is, is written in",
    r"whoever|whosoever": "the peer that, anyone who",
    r"nobody's|somebody's": "name the owner",
    r"in vain": "without result",
    r"ever more": "more and more",
    r"of (?:one's|its|their|his|our) own": "own, separate",
    r"anew": "again",
    r"mend(?:s|ed|ing)?": "fix, repair",
    r"unlike (?:models?|nodes?|sizes?|tokeni[sz]ers?|peers?|ones?|tiny|two)": "different, heterogeneous",
    r"(?:however|how|of|are|is) unlike": "different, heterogeneous",
    r"turn(?:s|ed) over": "rotate",
    r"rooms?": "package, space",
    r"(?:lower|higher|same|which|what|its|upper|the) floors?(?! of| under)": "layer",
    r"the house": "package layout",
    r"well again": "recovered",
    r"told from|told apart": "distinguished",
    r"liars?|lied": "malicious peer, false claim",
    r"meeting points?": "bootstrap node",
    r"strangers?": "unknown peer",
    r"lest|thrice|therein|of late|hitherto|thereof": "modern word",
    r"to the bit": "bit for bit, identical",
    r"learnt": "learned, trained on",
    r"(?:^|(?<=[.;:,] ))[Ww]here (?:a|an|no|it|there|nothing|one|that|this|its|the)": "if",
    r"(?<=, )for (?:it|they|there|we|that would|this is|that is|nothing|nobody|neither)": "because",
}
PATTERN = re.compile(
    r"(?<![\w`./-])(?:" + "|".join(f"(?:{pattern})" for pattern in BANNED) + r")(?![\w`(/=]|-\w|\.\w)", re.IGNORECASE
)
SENTENCE = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[A-Z`\"'(*\[])|\n\s*\n")
CODE = re.compile(r"``[^`]*``|`[^`]*`")
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Text:
    """A piece of prose and the line where it begins."""

    line: int
    content: str
    is_short: bool = False  # a table cell or a text of several lines in a program: its length is not judged


@dataclass(frozen=True)
class Finding:
    """A banned word, or a long sentence with its number of words."""

    path: str
    line: int
    word: str
    sentence: str
    is_long: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word}: {self.sentence}"


def of_python(source: str) -> Iterator[Text]:
    seen: set[int] = set()  # docstrings, and the parts of f-strings
    for node in ast.walk(ast.parse(source)):  # an outer node comes before its inner ones
        if isinstance(node, DOCUMENTED):
            if ast.get_docstring(node) is not None:
                first: Any = node.body[0]
                seen.add(id(first.value))
                yield Text(first.lineno, _without_blocks(first.value.value))
                yield from _cells(first.lineno, first.value.value)
        elif isinstance(node, ast.JoinedStr):
            seen |= {id(part) for part in node.values}
            words = "".join(part.value if isinstance(part, ast.Constant) else "N" for part in node.values)  # type: ignore[misc]
            yield from [_message(node.lineno, words)] if words.count(" ") > 1 else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in seen:
            yield from [_message(node.lineno, node.value)] if node.value.count(" ") > 1 else []
    yield from _comments(source)


def _message(line: int, content: str) -> Text:
    """Return a text of a program. One of several lines is SQL, a style sheet, a template or a table."""
    return Text(line, content, is_short="\n" in content.strip())


def _comments(source: str) -> Iterator[Text]:
    """Yield comments; those of consecutive whole lines are one text."""
    found = [one for one in tokenize.generate_tokens(StringIO(source).readline) if one.type == tokenize.COMMENT]
    texts: list[Text] = []
    last_whole = 0
    for token in found:
        (line, column), text = token.start, token.string.lstrip("#: ")
        is_whole = not token.line[:column].strip()
        if is_whole and last_whole == line - 1:
            texts[-1] = Text(texts[-1].line, f"{texts[-1].content}\n{text}")
        else:
            texts.append(Text(line, text))
        last_whole = line if is_whole else 0
    yield from texts


def _cells(start: int, content: str) -> Iterator[Text]:
    for number, line in enumerate(content.splitlines(), start):
        if line.lstrip().startswith("|"):
            for cell in line.strip().strip("|").split("|"):
                yield Text(number, cell.strip(), is_short=True)


def _without_blocks(content: str) -> str:
    """Blank the lines of a docstring that are code, drawings, tables or lists of files."""
    lines = [
        ""
        if re.match(r"\s*\||\S+(?:\.py|/) {2,}\S", line)
        or len(line) - len(line.lstrip()) >= 4
        and re.search(r"[|=+{}<>\[\]]|  \S", line.strip())
        else line
        for line in content.splitlines()
    ]
    return "\n".join(lines)


def of_markdown(source: str) -> Iterator[Text]:
    tokens = MarkdownIt().enable("table").parse(source)
    for opening, token in pairwise(tokens):
        if token.type == "inline" and token.map:
            mark = f"{opening.markup} " if opening.type == "heading_open" else ""  # a heading may be a question
            yield Text(token.map[0] + 1, mark + token.content, is_short=opening.type in ("th_open", "td_open"))


def of_lines(source: str, comment: str) -> Iterator[Text]:
    held: list[str] = []
    start = 1
    for number, line in enumerate([*source.splitlines(), ""], 1):
        before, mark, after = line.partition(comment) if comment else (line, "", "")
        if mark and not before.strip():
            start = start if held else number
            held.append("" if re.match(r" {3,}\S.*  \S", after) else after.strip())  # a list or a command
            continue
        if held:
            yield Text(start, "\n".join(held))
            held = []
        if mark and before.count('"') % 2 == 0:
            yield Text(number, after.strip(), is_short=True)
            line = before
        for quoted in re.findall(r'"((?:[^"\\]|\\.)*)"', line):
            if quoted.count(" ") > 1:
                yield _message(number, quoted)


def texts(path: Path) -> Iterator[Text]:
    if path.suffix not in SUFFIXES or "_pb2." in path.name:
        return
    source = path.read_text(encoding="utf-8")
    match path.suffix:
        case ".py":
            yield from of_python(source)
        case ".md":
            yield from of_markdown(source)
        case ".toml" | ".yaml" | ".yml" | ".service" | ".env":
            yield from of_lines(source, "#")
        case ".proto":
            yield from of_lines(source, "//")
        case ".json":
            yield from of_lines(source, "")


def sentences(text: Text) -> Iterator[tuple[int, str]]:
    """Yield each sentence with its line; inline code becomes one word, a link its text."""
    # code keeps its newlines, so that lines can be counted
    plain = CODE.sub(lambda match: "`code`" + "\n" * match[0].count("\n"), text.content)
    plain = LINK.sub(lambda match: match[1], plain)
    begin = 0
    for gap in [*SENTENCE.finditer(plain), None]:
        end = gap.start() if gap else len(plain)
        sentence = plain[begin:end]
        lead = len(sentence) - len(sentence.lstrip())
        if sentence.strip():
            yield text.line + plain.count("\n", 0, begin + lead), sentence.strip()
        begin = gap.end() if gap else end


def findings(path: Path) -> Iterator[Finding]:
    name = str(path.resolve().relative_to(ROOT)) if path.resolve().is_relative_to(ROOT) else str(path)
    for text in texts(path):
        for line, sentence in sentences(text):
            shown = " ".join(sentence.split())
            for match in PATTERN.finditer(sentence):
                at = line + sentence.count("\n", 0, match.start())
                yield Finding(name, at, " ".join(match[0].split()), shown, is_long=False)
            num_words = sum(bool(re.search(r"\w", word)) for word in sentence.split())
            if num_words > LONGEST and not text.is_short and not shown.startswith(SYSTEM_PROMPT):
                yield Finding(name, line, f"{num_words} words", shown, is_long=True)


def files(paths: list[str]) -> list[Path]:
    """Return the files below these paths that git knows or would add, in order, without `EXCLUDED`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted({ROOT / name for name in listed if name not in EXCLUDED and (ROOT / name).is_file()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("paths", nargs="*", default=list(DEFAULT))
    parser.add_argument("--long", action="store_true", help="print long sentences too")
    options = parser.parse_args()
    for path in files(options.paths):
        for finding in findings(path):
            if options.long or not finding.is_long:
                print(finding)  # noqa: T201


if __name__ == "__main__":
    main()
