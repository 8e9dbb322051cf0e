"""A node with random weights of a real size, as a user runs it: doctor, join, resume, export, load.

    python bench/shaped_run.py --shape 3b --lora --out DIR [--engine torch|vllm] [--rank 16] [--model DIR]
    python bench/shaped_run.py --shape 0.5b --lora --adapters serve --out DIR         # one base for both workers

Each part is the command itself in a separate process. The parts are `doctor`, `join` for two steps, `join` again for
one more, and `export`, of an adapter also with `--merge`. Then transformers loads the export and generates from it. The
memory of each process is read four times a second. `hwm_gib` is VmHWM, which counts mapped files whose pages the kernel
may reclaim; `own_gib` is what it may not reclaim (RssAnon and RssShmem). `pss_gib` counts a page of
several processes in equal parts, so that those of `all`, read at the same time, add up. The folder of published weights
in /dev/shm and the machine's lowest `MemAvailable` are read too.

The reward is for an even number of characters, so that random completions have a signal. Lines of the commands, with
the seconds since their start, are in DIR/*.log. The folder is removed at the end unless `--keep`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from soaking.sampling import role_of
from stubs.random_models import SHAPES

SAMPLE_EVERY_S = 0.25
GIB = 1 << 30
ROOT = Path(__file__).parent.parent
NODE = [sys.executable, "-m", "ftis_node"]
STEPS = 2
REWARD = '''"""A reward that random text has half of the time."""


def even(item, completion_text):
    return float(len(completion_text) % 2 == 0)
'''
RUN_TOML = """name = "shaped"
task = "arithmetic@even"

[sampling]
group_size = 4
max_prompt_tokens = 64
max_completion_tokens = 16
max_total_tokens = 80

[step]
own_groups = 2
foreign_groups = 0

[eval]
every_steps = 0
"""
NODE_TOML = """dtype = "bfloat16"

[generation]
max_batch = 8
adapters = "{adapters}"

[learner]
micro_batch_tokens = 128
recompute_activations = true

[lora_adapter]
rank = {rank}
alpha = {alpha}
"""
LOAD = """import sys, time, torch
began = time.monotonic()
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("25-15=", return_tensors="pt")
made = model.generate(**ids, max_new_tokens=4, do_sample=False)
print(f"loaded by {type(model).__name__}, {made.shape[1] - ids.input_ids.shape[1]} tokens made")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b")
    parser.add_argument("--out", type=Path, required=True, help="folder of all outputs; new or empty")
    parser.add_argument("--model", type=Path, help="a folder that bench/shaped_model.py made")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", choices=["auto", "merge", "serve"], default="auto", help="as generation.adapters")
    parser.add_argument("--engine", choices=["torch", "vllm"], default="torch")
    parser.add_argument("--only", nargs="+", help="only these parts, in a folder with the outputs of the earlier ones")
    parser.add_argument("--keep", action="store_true", help="keep the folder")
    options = parser.parse_args()
    out = options.out.absolute()
    prepare(out, rank=options.rank, adapters=options.adapters)
    model = options.model.absolute() if options.model else out / "model"
    figures = {}
    try:
        for name, command in parts(out, model, options):
            if options.only is None or name in options.only:
                figures[name] = measured(name, command, out)
                sys.stderr.write(f"{name}: {json.dumps(figures[name])}\n")
    finally:
        if not options.keep:
            shutil.rmtree(out)
    what = {"shape": options.shape, "lora": options.lora, "rank": options.rank, "engine": options.engine}
    sys.stdout.write(json.dumps({"bench": "shaped_run", **what, "parts": figures}) + "\n")


def prepare(out: Path, *, rank: int, adapters: str) -> None:
    """Write the home with its settings, the run, and the reward as an installed package."""
    (out / "home").mkdir(parents=True, exist_ok=True)
    (out / "home/node.toml").write_text(NODE_TOML.format(rank=rank, alpha=2 * rank, adapters=adapters))
    (out / "run.toml").write_text(RUN_TOML)
    installed = out / "packages/even_reward-1.0.dist-info"
    installed.mkdir(parents=True, exist_ok=True)
    (out / "packages/even_reward.py").write_text(REWARD)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: even-reward\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[ftis_node.rewards]\neven = even_reward:even\n")


def parts(out: Path, model: Path, options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Return the commands in order."""
    home, way = ["--home", str(out / "home")], ["--lora"] if options.lora else ["--full"]
    join = [*NODE, "join", "--model", str(model), "--run", str(out / "run.toml"), *home, *way]
    join += ["--engine", options.engine, "--listen", "/ip4/127.0.0.1/tcp/0"]
    if options.model is None:
        made = [sys.executable, str(ROOT / "bench/shaped_model.py"), "--shape", options.shape, "--out", str(model)]
        yield "model", made
    run = ["--run", str(out / "run.toml"), "--verbose", "--only", "model"]
    yield "doctor", [*NODE, "doctor", "--model", str(model), *run, *home, *way]
    yield "join", [*join, "--steps", str(STEPS)]
    yield "resume", [*join, "--steps", str(STEPS + 1)]
    for name, merge in (("export", []), ("export_merged", ["--merge"])) if options.lora else (("export", []),):
        yield name, [*NODE, "export", *home, "--out", str(out / name), *merge]
        yield f"load_{name}", [sys.executable, "-c", LOAD, str(out / name)]


def measured(name: str, command: list[str], out: Path) -> dict[str, Any]:
    """Run a command to its end. Return its exit code, seconds, and peaks by process."""
    paths = [str(out / "packages"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    environment |= {"HF_HUB_OFFLINE": "1"}
    peaks: dict[str, dict[str, float]] = {}
    least, shared = psutil.virtual_memory().available, 0
    began = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        copying = threading.Thread(target=copy_lines, args=(process.stdout, out / f"{name}.log", began))
        copying.start()
        while process.poll() is None:
            note_peaks(peaks, process.pid)
            least = min(least, psutil.virtual_memory().available)
            shared = max(shared, psutil.virtual_memory().shared)
            time.sleep(SAMPLE_EVERY_S)
        copying.join()
    return {
        "exit_code": process.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "least_available_gib": round(least / GIB, 2),
        "most_shared_gib": round(shared / GIB, 2),
        "processes": {
            kind: {key: round(value / GIB, 2) for key, value in peak.items()} for kind, peak in peaks.items()
        },
    }


def copy_lines(stream: Any, path: Path, began: float) -> None:
    with path.open("w") as file:
        for line in stream:
            file.write(f"{time.monotonic() - began:7.1f} {line}")
            file.flush()


def note_peaks(peaks: dict[str, dict[str, float]], pid: int) -> None:
    """Raise the peaks of each kind of process below `pid`, itself included, and of all together."""
    together = 0
    try:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            kind = "command" if process.pid == pid else role_of(process, daemon=pid)
            status = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
            kib = {key: int(status[key].split()[0]) * 1024 for key in ("VmHWM", "RssAnon", "RssShmem")}
            shares = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            pss = sum(int(line.split()[1]) * 1024 for line in shares.splitlines() if line.startswith("Pss:"))
            together += pss
            peak = peaks.setdefault(kind, {"hwm_gib": 0, "own_gib": 0, "pss_gib": 0})
            peak["pss_gib"] = max(peak["pss_gib"], pss)
            peak["hwm_gib"] = max(peak["hwm_gib"], kib["VmHWM"])
            peak["own_gib"] = max(peak["own_gib"], kib["RssAnon"] + kib["RssShmem"])
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError, KeyError):
        return  # it has ended, or is a zombie
    of_all = peaks.setdefault("all", {"pss_gib": 0})
    of_all["pss_gib"] = max(of_all["pss_gib"], together)


if __name__ == "__main__":
    main()
