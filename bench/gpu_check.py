"""All checks that need a GPU, in one program.

    python bench/gpu_check.py env [contexts attention parity memory learner handover generate one_gpu] --out DIR
    python bench/gpu_check.py all --out DIR [--limit-s 540]      # again and again, until it exits with 0 or 1
    python bench/gpu_check.py all --out DIR --device cpu --small   # does the program itself work?

Each part prints one JSON line and writes DIR/PART.json. A part has cases (`gpu/cases.py`). Each case runs in a separate
process with a time limit, and its result is kept in DIR/cases, so that an interrupted part resumes. `all` begins no
case that may not end within `--limit-s`.

The parts up to `handover` need neither vLLM nor hivemind. Exit code: 0 all cases passed, 1 some failed, 75 the time is
over; the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

import torch

from gpu.cases import PARTS, Options
from gpu.device import MODELS
from gpu.running import OutOfTimeError, run_part

GOES_ON = 75  # EX_TEMPFAIL


def main() -> int:
    options = arguments()
    how = Options(options.device, options.small, options.peak_tflops)
    options.out.mkdir(parents=True, exist_ok=True)
    ends_at = time.monotonic() + options.limit_s
    all_right = True
    for part in PARTS if options.parts == ["all"] else options.parts:
        try:
            found = run_part(part, how, options.out, ends_at=ends_at)
        except OutOfTimeError as error:
            sys.stderr.write(f"{error}, and the piece's time is nearly over: the same command continues\n")
            return GOES_ON
        print_line(found)
        all_right = all_right and found["ok"]
    shutil.rmtree(MODELS, ignore_errors=True)
    return 0 if all_right else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", metavar="PART", help=f"all, or some of: {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder of the results")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to check the program")
    parser.add_argument("--limit-s", type=float, default=540.0, help="of one invocation")
    parser.add_argument("--peak-tflops", type=float, help="the chip's own bfloat16 figure; measured by default")
    options = parser.parse_args()
    if unknown := set(options.parts) - {*PARTS, "all"}:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}, and all")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here: --device cpu --small checks the program alone")
    return options


def print_line(found: object) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
