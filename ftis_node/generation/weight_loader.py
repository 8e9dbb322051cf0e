"""Loads of weights into the generation worker, each followed by a proof that the worker serves them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

from ftis_node.errors import FtisError, ModelError, SharingError
from ftis_node.generation.messages import LoadWeights, Probe, Probed, WeightsLoaded
from ftis_node.workers.weight_store import PublishedWeights, WeightProof

Reply = TypeVar("Reply")
CallWorker: TypeAlias = "Callable[[Any, type[Reply]], Awaitable[Reply]]"
ProofToCome: TypeAlias = "asyncio.Future[WeightProof | None]"  # None: the learner could not compute it
PROOF_ATTEMPTS = 2
# The largest root mean square, in nats, of the differences between two correct forward passes of the probe. The
# float32 bound is ten times the measured difference between vLLM and torch. Published differences in bfloat16: vLLM
# and a trainer, a standard deviation of 0.050 and at most 0.477 among 3,916 tokens. A trainer and itself: 0.055 and
# 0.656 (https://github.com/huggingface/trl/issues/6789), and a root mean square of 0.039
# (https://github.com/ServiceNow/Fast-LLM/pull/525). The bfloat16 bound is more than five times that, to cover other
# models. With those tails, 1 version in 75,000 exceeds it. It detects gross errors only: checksums detect small ones.
PROOF_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.25}
logger = logging.getLogger(__name__)
DIED = "the generation worker died when it read weights in the learner's memory"
NO_FILES = "no local process writes weight files"


class WeightLoader:
    """The loader of one worker's weights, from shared memory or from files that it requests from the learner.

    `newest` are the weights to serve, with their proof; None: the base model. `served_version` is the version that the
    worker has proved, `load_s` the seconds that it took to load it, `how` the transfer method in words.
    If a worker dies during a load from shared memory, that memory may be the cause: all later loads use files.
    """

    def __init__(
        self,
        *,
        proof_tolerance: float,
        on_problem: Callable[[str], None] | None = None,
        write_weights: Callable[[str], Awaitable[PublishedWeights | None]] | None = None,
        on_fall_back: Callable[[str], None] | None = None,
    ) -> None:
        """Start without weights. `proof_tolerance` is an RMS in nats. `on_problem` receives a sentence for each failed
        proof, `on_fall_back` once the reason why shared memory is not used. `write_weights` makes the learner write a
        file; with a reason, it writes all later versions to files, too.
        """
        self.newest: tuple[PublishedWeights, ProofToCome] | None = None
        self.served_version = 0
        self.load_s: float | None = None
        self.how = ""
        self._proof_tolerance = proof_tolerance
        self._on_problem = on_problem
        self._write_weights = write_weights
        self._on_fall_back = on_fall_back
        self._is_sharing = False  # a load from shared memory began and has not ended
        self._last_reason = ""

    async def serve_newest(self, call: CallWorker[Any], *, is_new_life: bool = False) -> str | None:
        """Serve the newest weights as `load` does, from shared memory or from a file.

        For a new process the learner's memory may have changed: it then gets a file. Raises SharingError if no copy of
        the weights exists.
        """
        newest = self.newest
        assert newest is not None, "called with weights to serve"
        weights, to_come = newest
        reason = DIED if self._is_sharing else ""
        if not reason or weights.shared is None:
            self._is_sharing = weights.shared is not None
            try:
                problem = await self.load(call, weights, to_come)
            except SharingError as error:
                reason = str(error)
            except ModelError:
                self._is_sharing = False
                raise
            else:
                self._end_load(weights)
                if problem is None or weights.shared is None or not is_new_life:
                    return problem
        self._is_sharing = False
        self._report_fall_back(reason)
        written = await self._write(weights.version, reason)
        if written.version != weights.version:
            to_come = known(None)  # its checksums prove it; the log-probs arrive with its own update
        if self.newest is newest:  # a later update may already be queued
            self.newest = written, to_come
        problem = await self.load(call, written, to_come)
        self._end_load(written)
        return problem

    async def _write(self, version: int, reason: str) -> PublishedWeights:
        """Return the learner's present weights in a file. Raises SharingError if none will be written."""
        if self._write_weights is None:
            raise SharingError(f"weights in the learner's memory are not served: {reason or NO_FILES}")
        try:
            written = await self._write_weights(reason)
        except FtisError as error:
            raise SharingError(f"the learner cannot write weights: {error}") from error
        if written is None:  # it has the starting model
            raise SharingError(f"the learner withdrew weights {version}")
        return written

    def _end_load(self, weights: PublishedWeights) -> None:
        self._is_sharing = False
        self.how = weights.how()
        self._report_fall_back(weights.fell_back)

    def _report_fall_back(self, reason: str) -> None:
        """Report each reason in one line, once."""
        if not reason or reason == self._last_reason:
            return
        self._last_reason = reason
        logger.warning("fast weight transfer failed, using files: %s", reason)
        if self._on_fall_back is not None:
            self._on_fall_back(reason)

    async def load(self, call: CallWorker[Any], weights: PublishedWeights, to_come: ProofToCome) -> str | None:
        """Load and prove, at most twice. Returns None, or the fault of the served weights."""
        problem: str | None = None
        for _ in range(PROOF_ATTEMPTS):
            load = LoadWeights(
                path=weights.path,
                version=weights.version,
                checksums=weights.checksums,
                shared=weights.shared,
                is_locked=weights.transfer == "pinned",
            )
            loaded = await call(load, WeightsLoaded)
            self.load_s, problem = loaded.load_s, loaded.difference
            if loaded.version != weights.version:
                problem = f"says it serves version {loaded.version}"
            proof = await asyncio.shield(to_come)
            if problem is None and proof is not None:
                problem = await self.find_difference(partial(call, Probe(token_ids=proof.probe_ids), Probed), proof)
            if problem is None:
                self.served_version = weights.version
                return None
            problem = f"{problem} after it was given version {weights.version}"
            self.report(problem)
        return problem

    async def find_difference(self, probe: Callable[[], Awaitable[Probed]], proof: WeightProof) -> str | None:
        """Return how the worker's log-probs differ from the proof, in words; None if they do not."""
        difference = proof.rms_difference((await probe()).logprobs)
        if difference <= self._proof_tolerance:
            return None
        return (
            f"differs from the learner by {difference:.2g} nats (RMS) on the probe, more than {self._proof_tolerance:g}"
        )

    def report(self, problem: str) -> None:
        """Log a fault of the worker, as words that follow "the generation worker", and pass it to `on_problem`."""
        logger.warning("the generation worker %s", problem)
        if self._on_problem is not None:
            self._on_problem(problem)


def known(proof: WeightProof | None) -> ProofToCome:
    to_come: ProofToCome = asyncio.get_running_loop().create_future()
    to_come.set_result(proof)
    return to_come
