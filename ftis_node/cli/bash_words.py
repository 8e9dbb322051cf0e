"""Word breaks of bash in completion. Bash splits `arithmetic:a` at the colon, and Typer's script does not rejoin it.

This file joins the words of the request before Typer reads them, and removes from each suggestion the part that bash
keeps. `__ltrim_colon_completions` of the bash-completion package does the same. This is Python, so it also works with
scripts that were installed earlier.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

INSTRUCTION = "_FTIS_NODE_COMPLETE"
BREAKS = re.compile(r"[:=]+")  # the characters of COMP_WORDBREAKS in names of tasks and options


@contextlib.contextmanager
def joined_words() -> Iterator[None]:
    """Handle a completion request of bash as if it split words only at spaces. Does nothing for other commands."""
    words = os.environ.get("COMP_WORDS", "").split("\n")
    if os.environ.get(INSTRUCTION) != "complete_bash" or len(words) < 2:
        yield
        return
    joined, kept = join_words(words[: int(os.environ["COMP_CWORD"]) + 1])
    os.environ |= {"COMP_WORDS": "\n".join(joined), "COMP_CWORD": str(len(joined) - 1)}
    answer = io.StringIO()
    try:
        with contextlib.redirect_stdout(answer):
            yield
    finally:
        for line in answer.getvalue().splitlines():
            typer.echo(line.removeprefix(kept))


def join_words(words: Sequence[str]) -> tuple[list[str], str]:
    """Return the words as typed, and the start of the last word's value that bash keeps on the line."""
    joined: list[str] = []
    after_break, kept = False, ""
    for index, word in enumerate(words):
        is_break = BREAKS.fullmatch(word) is not None
        if joined and (is_break or (after_break and word and not word.startswith("-"))):
            joined[-1] += word
        else:
            joined.append(word)
        after_break = is_break
        if index == len(words) - 1 and (broken := BREAKS.search(joined[-1])):
            kept = joined[-1] if is_break else joined[-1].removesuffix(word)
            if kept.startswith("-"):  # Typer's answer is the value without `--option=`
                kept = kept[broken.end() :]
    return joined, kept
