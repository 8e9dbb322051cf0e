"""Two TRL trainers of different models learn from each other: `trl_exchange.py FOLDER MODEL MODEL STEPS`.

Each trainer has its exchange node. `ftis-node tiny --size s --out MODEL` makes a model for a CPU.
"""

from __future__ import annotations

import asyncio
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from ftis_node import Node

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

RUN = "arithmetic-ftis"


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


async def address_of(node: Node) -> str:
    """Wait until the node is up and connected where it can be, and return its address."""
    async for status in node.watch():
        if status.node.state == "running" and status.node.addresses:
            return status.node.addresses[0]
    raise RuntimeError("the node ended")


async def main(folder: str, first: str, second: str, steps: int) -> None:
    """Run two exchange nodes and, as processes, their trainers."""
    spawn = get_context("spawn")
    both = spawn.Barrier(2)
    common = {"run": RUN, "role": "exchange", "listen": ["/ip4/127.0.0.1/tcp/0"]}
    async with Node(model=first, home=f"{folder}/first", **common) as one:
        address = await address_of(one)
        async with Node(model=second, home=f"{folder}/second", peers=[address], **common) as other:
            await address_of(other)
            trainers = [
                spawn.Process(target=train, args=(model, str(node.home), steps, both))
                for model, node in ((first, one), (second, other))
            ]
            for trainer in trainers:
                trainer.start()
            for trainer in trainers:
                await asyncio.to_thread(trainer.join)
    if any(trainer.exitcode for trainer in trainers):
        raise SystemExit("a trainer failed")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
