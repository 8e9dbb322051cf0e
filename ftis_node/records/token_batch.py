"""The tokens of several completions as flat arrays, the single representation from the sampler to the loss.

A completion is a slice of the flat arrays. Tokens are copied only when they leave the process: a message of a worker
contains the batch itself (`workers/wire.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ftis_node.errors import RecordError

Value = TypeVar("Value", np.int32, np.float32)
Ids: TypeAlias = "Sequence[int] | NDArray[Any]"
Logprobs: TypeAlias = "Sequence[float] | NDArray[Any]"

BYTES_PER_VALUE = 4
NO_LOGPROBS = np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """The n tokens of G completions, one completion after the other.

    token_ids  int32 [n]
    logprobs   float32 [n], nats; or [0], if no log-prob of these tokens is known
    lengths    int32 [G], tokens of each completion, each at least 1; their sum is n
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    lengths: NDArray[np.int32]

    @classmethod
    def from_bytes(cls, token_ids: bytes, logprobs: bytes, lengths: Sequence[int]) -> TokenBatch:
        """Return a read-only view of little-endian arrays. Raises RecordError (`malformed`) if the sizes disagree."""
        num_bytes = BYTES_PER_VALUE * sum(lengths)
        if len(token_ids) != num_bytes or len(logprobs) not in (num_bytes, 0):
            raise RecordError("malformed", f"the arrays do not have the {num_bytes} bytes that the lengths need")
        return cls(np.frombuffer(token_ids, "<i4"), np.frombuffer(logprobs, "<f4"), np.array(lengths, dtype=np.int32))

    @classmethod
    def from_parts(cls, token_ids: Sequence[Ids], logprobs: Sequence[Logprobs] = ()) -> TokenBatch:
        """Return the batch of one sequence of ids per completion, with as many log-probs or none."""
        flat_ids = [np.asarray(ids, dtype=np.int32) for ids in token_ids]
        flat_logprobs = [np.asarray(values, dtype=np.float32) for values in logprobs]
        return cls(
            np.concatenate(flat_ids) if flat_ids else np.empty(0, dtype=np.int32),
            np.concatenate(flat_logprobs) if flat_logprobs else NO_LOGPROBS,
            np.array([len(ids) for ids in flat_ids], dtype=np.int32),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenBatch):
            return NotImplemented
        return self.has_same_ids(other) and np.array_equal(self.logprobs, other.logprobs, equal_nan=True)

    __hash__ = None  # type: ignore[assignment]

    def has_same_ids(self, other: TokenBatch) -> bool:
        """Return whether both are the same completions, whatever their log-probs."""
        return np.array_equal(self.lengths, other.lengths) and np.array_equal(self.token_ids, other.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def ends(self) -> NDArray[np.int64]:
        """Return the end offset `[G]` of each completion in the flat arrays."""
        return np.cumsum(self.lengths, dtype=np.int64)

    def ids_of_each(self) -> list[NDArray[np.int32]]:
        return self._split(self.token_ids)

    def logprobs_of_each(self) -> list[NDArray[np.float32]]:
        """Return one view of log-probs per completion; empty views if none is known."""
        return self._split(self.logprobs)

    def mean_logprobs(self) -> NDArray[np.float64]:
        """Return the mean log-prob `[G]` of each completion, in nats per token."""
        return np.add.reduceat(self.logprobs.astype(np.float64), self.ends - self.lengths) / self.lengths

    def _split(self, values: NDArray[Value]) -> list[NDArray[Value]]:
        return [
            values[end - length : end] for length, end in zip(self.lengths.tolist(), self.ends.tolist(), strict=True)
        ]
