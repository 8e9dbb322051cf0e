"""Weight sync: the delivery of the weights of one step to this node's generator, or to those that follow it.

The learner publishes the weights, then computes their proof (log-probs of fixed probe tokens), then writes its
checkpoint. The generator loads the weights meanwhile, so that its first new token does not wait for the checkpoint.

    learner    | step | publish | prove | checkpoint ........ | reply
    generator  |   old weights  | load | probe | new weights
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import TypeAlias

from ftis_node.errors import WorkerError
from ftis_node.generation.weight_loader import ProofToCome
from ftis_node.learner.messages import TrainReply
from ftis_node.node.context import NodeContext
from ftis_node.node.protocols import Generation
from ftis_node.workers.weight_store import PublishedWeights, WeightProof

Proof: TypeAlias = "ProofToCome | WeightProof | None"
DeliverWeights: TypeAlias = "Callable[[PublishedWeights, Proof], Coroutine[None, None, None]]"
"""Receiver of new weights: `update_engine`, or `OfferLoop.take` of a learner node."""

WEIGHT_SYNC = "the weight sync"


class WeightSync:
    """Weight sync of one step: call `take` with weights and proof, then `finish` with the reply, or `abandon`."""

    def __init__(self, deliver: DeliverWeights) -> None:
        self._deliver = deliver
        self._proof: ProofToCome = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    def take(self, news: PublishedWeights | WeightProof) -> None:
        """Take the published weights, or their proof, as the learner reports them."""
        if not isinstance(news, PublishedWeights):
            self._proof.set_result(news)
        elif self._task is None:
            self._task = asyncio.create_task(self._deliver(news, self._proof), name="deliver-weights")

    async def finish(self, reply: TrainReply) -> None:
        """Wait until the generator serves the new weights and has verified them."""
        if self._task is not None:
            await self._task
        elif reply.weights is not None:  # a repeated step: the learner reported no progress
            await self._deliver(reply.weights, reply.proof)

    async def abandon(self) -> None:
        """Finish the transfer without a proof after the learner died."""
        if not self._proof.done():
            self._proof.set_result(None)
        if self._task is not None:
            await self._task

    def cancel(self) -> None:
        """Cancel the transfer, because the step ended without it or the node stops."""
        if self._task is not None and not self._task.cancel() and not self._task.cancelled():
            self._task.exception()  # asyncio reports an error that no code has seen


async def update_engine(
    weights: PublishedWeights, proof: Proof, *, context: NodeContext, generation: Generation
) -> None:
    """Wait until the generator serves a version and has verified it. A worker that dies restarts with that version."""
    try:
        await generation.update_weights(weights, proof)
        context.failures.succeeded(WEIGHT_SYNC)
    except WorkerError as error:
        if context.failures.failed(WEIGHT_SYNC, error):
            context.events.write("weight_sync_failed", version=weights.version, error=str(error))
        await generation.start()
    done_at_s = weights.step_done_at_s
    after_step_s = None if done_at_s is None else round(time.monotonic() - done_at_s, 4)
    transfer = generation.weight_transfer
    context.events.write("served", version=weights.version, after_step_s=after_step_s, transfer=transfer)
