"""The cost of a node's start: processor time and resident memory of each of its processes.

    python bench/node_start.py [--runs 3] [--model FOLDER] [--engine torch|vllm]

Each run starts `ftis-node join` alone on a new data directory with a tiny model. The run ends when both workers are
ready. Processor time includes that of processes that have ended. `scoring` also holds the Python processes that
multiprocessing adds.

With `--engine vllm` each run starts the node twice. The first start has empty caches of vLLM, and the second uses those
of the first. `start_` are the seconds of the phases of the engine's start.

The baseline of each run is a process that imports only what a worker needs: torch and the model's class
in transformers. `cpu_ratio` is the processor time of a start divided by that of the baseline.

Medians over the runs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from urllib.request import urlopen

import psutil

from ftis_node.config.home import Home
from ftis_node.errors import FtisError
from ftis_node.lab.child_processes import ChildProcess, children
from soaking.sampling import role_of

START_LIMIT_S = 300.0
POLL_S = 0.1
BASELINE = "import torch; from transformers import Qwen2ForCausalLM"
MEBI = 1 << 20
LIGHT_PROCESSES = ("daemon", "scoring", "p2pd")


def main() -> None:
    """Print one line per figure, then JSON."""
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="node-start-") as scratch:
        folder = Path(scratch)
        model = options.model or make_model(folder / "tiny", options.engine)
        runs = [one_run(folder / str(number), model, options.engine) for number in range(options.runs)]
    figures = {name: round(statistics.median(run.get(name, 0.0) for run in runs), 2) for name in runs[0]}
    for name, value in figures.items():
        sys.stdout.write(f"{name:40} {value}\n")
    result = {"runs": options.runs, "engine": options.engine, "cores": os.cpu_count()}
    sys.stdout.write(json.dumps(result | figures) + "\n")


def arguments() -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="starts to take the median of (default: 3)")
    parser.add_argument("--model", type=Path, help="folder of a model (default: a new tiny one with random weights)")
    parser.add_argument("--engine", choices=["torch", "vllm"], default="torch")
    return parser.parse_args()


def make_model(folder: Path, engine: str) -> Path:
    """Write a model of 2 million parameters with random weights, for vLLM one of 12 million. Returns its folder."""
    from stubs.random_models import SHAPES, save_random_model

    SHAPES["tiny"] = SHAPES["12m"] | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    save_random_model("tiny" if engine == "torch" else "12m", folder)  # vLLM needs heads of 32 dimensions on a CPU
    return folder


def one_run(folder: Path, model: Path, engine: str) -> dict[str, float]:
    """Start a node, with vLLM twice, and the baseline process. Returns seconds and MiB by name."""
    os.environ["VLLM_CACHE_ROOT"] = str(folder / "vllm-cache")
    if engine == "torch":
        figures = one_start(folder, model, engine)
        return figures | baseline(figures["cpu_s"])
    first, second = one_start(folder, model, engine), one_start(folder, model, engine)
    figures = {
        f"{name}_{key}": value for name, run in (("first", first), ("second", second)) for key, value in run.items()
    }
    ratios = {f"{key}_ratio": second[key] / first[key] for key in ("wall_s", "cpu_s")}
    return figures | ratios | baseline(second["cpu_s"])


def one_start(folder: Path, model: Path, engine: str) -> dict[str, float]:
    """Start a node, and stop it when it is ready. Returns seconds and MiB by name."""
    home = Home(folder / "home")
    began_at, began_s = time.time(), time.monotonic()
    with children(folder / "logs") as started:
        node = started.start(
            *("node", "join", "--model", str(model), "--run", "arithmetic-ftis", "--engine", engine),
            *("--listen", "/ip4/127.0.0.1/tcp/0", "--home", str(home.root)),
        )
        wait_until_ready(node, home)
        figures = {"wall_s": time.monotonic() - began_s} | process_figures(node.process.pid)
    return figures | phase_figures(home, since=began_at)


def phase_figures(home: Home, *, since: float) -> dict[str, float]:
    """Return the seconds of each phase of the engine's start, from the event log."""
    events = map(json.loads, home.events.read_text().splitlines())
    return {
        f"start_{event['phase'].partition(' (')[0].replace(' ', '_')}_s": event["duration_s"]
        for event in events
        if event["event"] == "engine_start" and event["time"] >= since
    }


def wait_until_ready(node: ChildProcess, home: Home) -> None:
    """Wait until both workers take requests. Raises FtisError if the node ends or takes more than START_LIMIT_S."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if node.exit_code is not None:
            raise FtisError(f"the node ended with exit code {node.exit_code}: {node.last_words()}")
        if (url := home.running_url()) is not None:
            with urlopen(f"{url}/status", timeout=START_LIMIT_S) as answer:
                status = json.loads(answer.read())
            if status["generation"]["state"] == status["learner"]["state"] == "ready":
                return
        time.sleep(POLL_S)
    raise FtisError(f"the workers were not ready within {START_LIMIT_S:.0f} s: {node.last_words()}")


def process_figures(daemon: int) -> dict[str, float]:
    """Return seconds and MiB of a node's processes by role, and their sums."""
    cpu_s: dict[str, float] = defaultdict(float)
    rss_mib: dict[str, float] = defaultdict(float)
    node = psutil.Process(daemon)
    for process in (node, *node.children(recursive=True)):
        role = role_of(process, daemon=daemon)
        role = "scoring" if role in ("other", "tracker") else role
        times = process.cpu_times()
        ended_s = times.children_user + times.children_system
        cpu_s[role] += times.user + times.system + ended_s
        rss_mib[role] += process.memory_info().rss / MEBI
    return {
        "cpu_s": sum(cpu_s.values()),
        **{f"{role}_cpu_s": seconds for role, seconds in cpu_s.items()},
        "rss_mib": sum(rss_mib.values()),
        **{f"{role}_rss_mib": size for role, size in rss_mib.items()},
        "light_rss_mib": sum(rss_mib[role] for role in LIGHT_PROCESSES),
    }


def baseline(start_cpu_s: float) -> dict[str, float]:
    """Run a process that only imports torch and the model's class. Returns its figures beside those of a start."""
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", BASELINE], os.environ)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise FtisError(f"`{BASELINE}` failed: check the installation")
    cpu_s = usage.ru_utime + usage.ru_stime
    return {"baseline_cpu_s": cpu_s, "baseline_rss_mib": usage.ru_maxrss / 1024, "cpu_ratio": start_cpu_s / cpu_s}


if __name__ == "__main__":
    main()
