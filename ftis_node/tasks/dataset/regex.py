"""Regular expressions of RE2, through pyarrow.

Its time is linear in the text, so no completion can make it backtrack, and it gives the same result on every machine.
It has no look-around and no backreferences. Only child processes call it: a daemon has no other use for pyarrow.
"""

from __future__ import annotations

from ftis_node.errors import TaskError


def finds(pattern: str, text: str) -> bool:
    """Return whether the pattern matches a part of the text, which must be valid Unicode."""
    import pyarrow
    from pyarrow.compute import match_substring_regex

    pool = pyarrow.system_memory_pool()  # the default pool reserves 1 GiB of addresses, all that a scorer has
    found = match_substring_regex(pyarrow.scalar(text, memory_pool=pool), pattern, memory_pool=pool)
    return bool(found.as_py())


def check_pattern(pattern: str) -> None:
    """Raise TaskError for an invalid pattern."""
    try:
        finds(pattern, "")
    except Exception as error:
        reason = " ".join(str(error).split())
        raise TaskError(f"pattern={pattern} cannot be used: {reason} (the syntax is that of RE2)") from None
