"""Search each line of every tracked file for the forms of keys and tokens.

The mark `not-a-secret` excludes a line that a person has reviewed.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

KINDS = {
    "private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "access token of the hub": re.compile(r"\bhf_[A-Za-z0-9]{30,}"),
    "access token of a forge": re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{50,}|glpat-[\w-]{20,})"),
    "cloud key": re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w-]{35}\b"),
    "API key": re.compile(r"\bsk-[A-Za-z0-9_-]{32,}|\bxox[abprs]-[\w-]{20,}"),
    "web token": re.compile(r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"),
    "password in an address": re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s/:@{}$<]+:[^\s/:@{}$<]{3,}@"),
    "password": re.compile(
        r"(?i)\b(?:password|passwd|secret|token|api_?key)\s*[:=]\s*[\"'](?=[^\"']*\d)[A-Za-z0-9+/=_-]{20,}[\"']"
    ),
}
MARK = "not-a-secret"
MAX_BYTES = 4 << 20


def tracked_files(root: Path) -> list[Path]:
    """Return the files that git tracks, and new ones that it does not ignore."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    return [root / name for name in names if name and (root / name).is_file()]


def secrets_in(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the kind of each line with a secret."""
    for number, line in enumerate(text.splitlines(), start=1):
        if MARK not in line:
            yield from ((number, kind) for kind, pattern in KINDS.items() if pattern.search(line))


def secrets_of(root: Path) -> list[str]:
    """Return one line per secret: its place and kind, not the secret."""
    found = []
    for path in tracked_files(root):
        content = path.read_bytes()
        if len(content) <= MAX_BYTES and b"\0" not in content:
            lines = secrets_in(content.decode("utf-8", errors="replace"))
            found += [f"{path.relative_to(root)}:{number}: {kind}" for number, kind in lines]
    return found
