"""The daemon's side of a learner, for a network namespace of a test: `host_program.py BOOT OUT STEPS`.

It runs a LearnerClient with its worker, and prints one JSON object for each event and step.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import msgspec
from learner_rig import random_groups
from ranks_program import SIZES

from ftis_node.backoff import ExponentialBackoff
from ftis_node.errors import FtisError
from ftis_node.learner.client import LearnerClient
from ftis_node.learner.messages import LearnerBoot
from ftis_node.workers.liveness import RestartPolicy
from ftis_node.workers.preload import Timing
from ftis_node.workers.wire import dec_hook


def print_json(**values):
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


async def train(boot, folder, num_steps):
    """Train a step for each line of the standard input. A failed step is trained again after the restart."""
    client = LearnerClient(
        boot,
        sockets_dir=folder / "s",
        log_path=folder / "learner.log",
        timing=Timing(stop_grace_s=30.0),
        restart_policy=RestartPolicy(backoff=ExponentialBackoff(first_s=0.1)),
        on_event=lambda event: print_json(event=type(event).__name__, **msgspec.to_builtins(event)),
    )
    try:
        done = (await client.start()).step
        print_json(step=done, restarts=client.restarts)
        while done < num_steps:
            await asyncio.to_thread(sys.stdin.readline)
            try:
                reply = await client.train(random_groups(seed=done + 1, **SIZES), step=done + 1)
            except FtisError as error:
                print_json(error=str(error))
                done = (await client.start()).step
                print_json(step=done, restarts=client.restarts)
            else:
                done, proof = reply.report.step, list(reply.proof.logprobs)
                print_json(step=done, loss=reply.report.loss, grad_norm=reply.report.grad_norm, proof=proof)
    except FtisError as error:
        print_json(error=str(error), kind=type(error).__name__)
    finally:
        await client.stop()


def main():
    boot = msgspec.convert(json.loads(sys.argv[1]), LearnerBoot, dec_hook=dec_hook)
    asyncio.run(train(boot, Path(sys.argv[2]), int(sys.argv[3])))


if __name__ == "__main__":
    main()
