"""Two TRL trainers of different models learn from each other: `trl_exchange.py FOLDER MODEL MODEL STEPS`.

Each trainer has its exchange node. `ftis-node tiny --size s --out MODEL` makes a model for a CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.synchronize import Barrier

RUN = "arithmetic-ftis"
FTIS_NODE = (sys.executable, "-m", "ftis_node")


def train(model: str, home: str, steps: int, both: Barrier) -> None:
    """Train one model on its own groups and those of the other trainer."""
    from trl import GRPOConfig

    from ftis_node.integrations.trl import SwarmExchange, SwarmGRPOTrainer, swarm_dataset

    exchange = SwarmExchange(home, per_batch=1)
    prompts, reward = swarm_dataset(RUN, num_prompts=1024)
    options = exchange.grpo_options()
    trainer = SwarmGRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            **options,
            output_dir=f"{home}/trl",
            per_device_train_batch_size=4 * options["num_generations"],
            max_steps=steps,
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=False,
        ),
        train_dataset=prompts,
        exchange=exchange,
    )
    both.wait()  # else one could end before the other begins
    trainer.train()
    log = [line for line in trainer.state.log_history if "foreign_groups" in line]
    totals = {name: int(sum(line[name] for line in log)) for name in ("shared_groups", "foreign_groups")}
    print(f"{Path(home).name}: {totals['shared_groups']} shared, {totals['foreign_groups']} foreign groups")


@contextmanager
def exchange_node(home: Path, model: str, *options: str) -> Iterator[str]:
    """Run an exchange node until the end of the block, and yield its address as soon as it is up."""
    join = ("join", "--role", "exchange", "--run", RUN, "--listen", "/ip4/127.0.0.1/tcp/0")
    with home.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            [*FTIS_NODE, *join, "--home", str(home), "--model", model, *options], stdout=log, stderr=log
        )
    try:
        yield address_of(home, process)
    finally:
        process.terminate()
        process.wait()


def address_of(home: Path, process: subprocess.Popen[bytes]) -> str:
    """Wait until the node is up and connected where it can be, and return its address."""
    status = [*FTIS_NODE, "status", "--json", "--home", str(home)]
    while process.poll() is None:
        time.sleep(1.0)
        done = subprocess.run(status, capture_output=True, check=False)
        if done.returncode:  # it has not locked its home yet
            continue
        node = json.loads(done.stdout)["node"]
        if node["state"] == "running" and node["addresses"]:
            return str(node["addresses"][0])
    raise SystemExit(f"a node ended with exit code {process.returncode}: see {home.with_suffix('.log')}")


def main(folder: Path, first: str, second: str, steps: int) -> None:
    """Run two exchange nodes and, as processes, their trainers."""
    folder.mkdir(parents=True, exist_ok=True)
    spawn = get_context("spawn")
    both = spawn.Barrier(2)
    homes = folder / "first", folder / "second"
    with exchange_node(homes[0], first) as address, exchange_node(homes[1], second, "--peers", address):
        trainers = [
            spawn.Process(target=train, args=(model, str(home), steps, both))
            for model, home in zip((first, second), homes, strict=True)
        ]
        for trainer in trainers:
            trainer.start()
        for trainer in trainers:
            trainer.join()
    if any(trainer.exitcode for trainer in trainers):
        raise SystemExit("a trainer failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
