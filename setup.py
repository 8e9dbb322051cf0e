"""Build steps that pyproject.toml cannot express. All other settings are in pyproject.toml.

- The pages of docs/ go into the wheel as ftis_node/_docs.
- With SOURCE_DATE_EPOCH set, two builds of the same files give the same sdist. setuptools does this for wheels only.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tarfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
IGNORED = shutil.ignore_patterns("*.py", "*.csv", "__pycache__", "results")


class BuildWithPages(build_py):
    """Build of the package with its documentation. An editable checkout reads docs/ itself."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "ftis_node/_docs"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(ROOT / "docs", target, ignore=IGNORED)


class ReproducibleSdist(sdist):
    """Source archive whose bytes depend on the files and SOURCE_DATE_EPOCH only."""

    def make_archive(self, base_name: str, format: str, *args: object, **kwargs: object) -> str:
        archive = super().make_archive(base_name, format, *args, **kwargs)
        if format == "gztar" and "SOURCE_DATE_EPOCH" in os.environ:
            rewrite_with_one_time(Path(archive), int(os.environ["SOURCE_DATE_EPOCH"]))
        return archive


def rewrite_with_one_time(archive: Path, seconds: int) -> None:
    """Rewrite `archive` (.tar.gz) with sorted members, one owner, and the time `seconds` since 1970 everywhere."""
    rewritten = archive.with_suffix(".new")
    with (
        tarfile.open(archive) as old,
        rewritten.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=seconds) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = seconds, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    rewritten.replace(archive)


setup(cmdclass={"build_py": BuildWithPages, "sdist": ReproducibleSdist})
