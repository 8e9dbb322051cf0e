"""Start a node, print its status until it has used up its steps: `watch_node.py MODEL RUN HOME STEPS`."""

from __future__ import annotations

import asyncio
import sys

from ftis_node import Node


async def main(model: str, run: str, home: str, steps: int) -> None:
    async with Node(model=model, run=run, home=home, steps=steps, engine="torch") as node:
        async for status in node.watch():
            print(status.node.state, "step", status.learner.step, "loss", status.learner.loss)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
