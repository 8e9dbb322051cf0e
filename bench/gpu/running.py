"""Run a case in a separate process, so that a failure or a hang affects that case alone; and store its result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpu.cases import cases_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu.cases import Case, Options

PROGRAM = Path(__file__).parent.parent / "gpu_check.py"
LOG_END = 2000  # characters of a failed case's output that are kept


class OutOfTimeError(Exception):
    """What is left of the piece's time does not suffice for the next case."""


def run_part(part: str, options: Options, out: Path, *, ends_at: float) -> dict[str, Any]:
    """Run the cases of `part` that have no result in `out` yet, and write `out`/`part`.json.

    Raises OutOfTimeError before a case that may take longer than until `ends_at`; what was done is kept.
    """
    results = []
    for case in cases_of(part, options):
        kept = out / "cases" / f"{part}-{case.name}.json"
        if not kept.exists():
            if time.monotonic() + case.limit_s > ends_at:
                raise OutOfTimeError(f"{part} {case.name} may take {case.limit_s:.0f} s")
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(run_case(case, options)))
        results.append(json.loads(kept.read_text()))
    found = {
        "check": part,
        "ok": all(result["ok"] for result in results),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "small": options.small,
        "torch": torch.__version__,
        "cases": results,
    }
    (out / f"{part}.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def run_case(case: Case, options: Options) -> dict[str, Any]:
    """The figures of one case, with `ok` and `error`, by this program again."""
    command = [sys.executable, str(PROGRAM), "case", case.part, "--name", case.name, *flags_of(options)]
    paths = [str(PROGRAM.parent), str(PROGRAM.parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
        ) as process:
            try:
                output, error = process.communicate(timeout=case.limit_s)[0], None
            except subprocess.TimeoutExpired:
                output, error = "", f"took longer than {case.limit_s:.0f} s"
            finally:
                _end_session(process)
        log.seek(0)
        figures = last_object(output)
        if error is None and (process.returncode or figures is None):
            error = f"exit code {process.returncode}: {log.read()[-LOG_END:].strip()}"
    what = {key: case.how.get(key) for key in ("shape", "lora")}
    result = {"check": case.part, "case": case.name, **what, "ok": error is None, "error": error}
    return result | (figures or {}) | {"seconds": round(time.monotonic() - began, 1)}


def flags_of(options: Options) -> list[str]:
    """The flags that mean `options`."""
    peak = [] if options.peak_tflops is None else ["--peak-tflops", str(options.peak_tflops)]
    return ["--device", options.device, *(["--small"] if options.small else []), *peak]


def last_object(output: str) -> dict[str, Any] | None:
    """The last line that is a JSON object; None without one."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            return found if isinstance(found, dict) else None
    return None


def ask_program(command: Sequence[str]) -> dict[str, Any]:
    """What another bench prints last. Raises RuntimeError if it fails. It ends with this process's session."""
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, check=False)
    found = last_object(done.stdout)
    if done.returncode or found is None:
        raise RuntimeError(f"{' '.join(command)} ended with code {done.returncode}")
    return found


def _end_session(process: subprocess.Popen[str]) -> None:
    """The process, and workers that it left behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
