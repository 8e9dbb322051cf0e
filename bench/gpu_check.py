"""All checks that need a GPU, in one program.

    python bench/gpu_check.py env [contexts attention parity memory learner transfer generate one_gpu] --out DIR
    python bench/gpu_check.py all --out DIR
    python bench/gpu_check.py memory --cases 3b-full-kept-16384,3b-lora-kept-16384 --out DIR
    python bench/gpu_check.py all --out DIR --device cpu --small   # does the program itself work?

Each part prints one JSON line and writes DIR/PART.json. A part has cases (`gpu/cases.py`). Each case runs in a separate
process and is killed if it takes three times what is expected. Each of its figures is in DIR/cases as soon as it is
measured. A second start keeps the cases that have ended. `--together N` starts N cases at a time, which take turns to
measure.

The parts up to `transfer` need neither vLLM nor hivemind. Exit code: 0 all cases passed, 1 some failed. Half an hour on
a borrowed machine: `gpu/half_hour.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from gpu.cases import PARTS, Options, cases_of
from gpu.running import run_part


def main() -> int:
    options = arguments()
    how = Options(options.device, options.small)
    options.out.mkdir(parents=True, exist_ok=True)
    all_right = True
    for part in options.parts:
        found = run_part(part, how, options.out, only=options.cases, together=options.together)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
        all_right = all_right and found["ok"]
    return 0 if all_right else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", metavar="PART", help=f"all, or some of: {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder of the results")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to check the program")
    parser.add_argument("--cases", default="", help="only these, such as 3b-full-kept-16384,3b-lora-kept-16384")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="cases that start at a time")
    options = parser.parse_args()
    if unknown := set(options.parts) - {*PARTS, "all"}:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}, and all")
    options.parts = list(PARTS) if options.parts == ["all"] else options.parts
    options.cases = options.cases.split(",") if options.cases else []
    known = [case.name for part in options.parts for case in cases_of(part, Options(options.device, options.small))]
    if unknown := set(options.cases) - set(known):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here: --device cpu --small checks the program alone")
    return options


if __name__ == "__main__":
    sys.exit(main())
