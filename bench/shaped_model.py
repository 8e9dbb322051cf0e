"""Generator of a model folder with a real shape and random weights: no download, meaningless text.

    python bench/shaped_model.py --shape 3b --out models/3b [--dtype bfloat16]

The folder has Qwen2's configuration at that size (`0.5b` and `3b` are Qwen2.5's) and safetensors in shards of 2 GB. Its
small tokenizer has an entry for each row of the embedding. Memory holds the weights once.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

import torch

from stubs.random_models import SHAPES, save_random_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b")
    parser.add_argument("--out", type=Path, required=True, help="must be new or empty")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    options = parser.parse_args()
    if options.out.exists() and not (options.out.is_dir() and not any(options.out.iterdir())):
        parser.error(f"{options.out} exists and is not an empty folder: choose another with --out")
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, options.dtype)
    parameters = save_random_model(options.shape, options.out, dtype=dtype, pads_tokenizer=True)
    figures = {
        "bench": "shaped_model",
        "shape": options.shape,
        "parameters": parameters,
        "bytes": sum(path.stat().st_size for path in options.out.iterdir()),
        "seconds": round(time.monotonic() - began, 1),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
