"""The trial of vLLM's sleep mode at the first start on a card.

Sleep mode uses the driver's virtual memory. With some new cards and drivers it loses data or ends the process. A node
whose workers take turns finds that at its start, not in the middle of a run. A file in vLLM's cache marks a card that
passed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from ftis_node.errors import EngineError, WorkerTaskError, first_line, says_out_of_memory
from ftis_node.generation.engines.base import Engine

TOLERANCE_NATS = 0.01  # the same computation with the same weights; only another order of sums may differ


def card_marker() -> Path:
    """Return the file that marks this card as tested, with these versions of vLLM and torch."""
    import torch
    import vllm
    from vllm import envs
    from vllm.platforms import current_platform

    name = re.sub(r"\W+", "-", f"{current_platform.get_device_name()}-{vllm.__version__}-{torch.__version__}")
    return Path(envs.VLLM_CACHE_ROOT) / "ftis-node" / f"slept-{name}"


async def try_sleep(engine: Engine, token_ids: Sequence[int], marker: Path) -> None:
    """Let the engine sleep and wake, and compare the log-probs of `token_ids`. Write the marker if they are equal.

    Raises EngineError with the settings that need no sleep, and the engine's own error if memory was short.
    """
    expected = await engine.probe(token_ids)
    try:
        await engine.sleep()
        await engine.wake()
        got = await engine.probe(token_ids)
    except Exception as error:  # a WorkerTaskError: the engine ended, and knows the cause
        ended = isinstance(error, WorkerTaskError)
        reason = await engine.wait_broken() if ended else first_line(error)
        if says_out_of_memory(reason):
            raise
        raise _refused(reason) from error
    difference = float(np.abs(np.subtract(got, expected)).max())
    if not difference <= TOLERANCE_NATS:  # it may be NaN
        raise _refused(f"log-probs differ by {difference:.3g} afterwards")
    _mark(marker)


def _mark(marker: Path) -> None:
    with suppress(OSError):  # a read-only cache: the next start tries again
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()


def _refused(reason: str) -> EngineError:
    return EngineError(
        f"generation cannot sleep while the learner works on this card ({reason}): "
        'set memory.placement = "shared", or give a smaller model or a second GPU'
    )
