"""`host`: the time of the host's processor in a step, its dispatches, and on a GPU the kernels that it launches.

The model has the 24 layers and 290 tensors of Qwen2.5-0.5B, each of them tiny. So arithmetic takes little time, and
what remains is Python and dispatch. A dispatch is one call of an ATen operation: views are dispatches without a kernel,
and a CPU takes other branches than a GPU. Kernels are counted by torch's profiler. The attention buckets are those of a
GPU also on a CPU.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ftis_node.lab.card.device_speed import synchronize
from ftis_node.learner.learner import Learner
from ftis_node.learner.messages import TrainGroup
from ftis_node.learner.model import attention
from gpu.cases import Options
from gpu.device import model_folder
from gpu.steps import learner_boot
from learner_sides.batch import even_groups, memory_folder, with_flat_logprobs

SHAPE = "0.5b-narrow"
GROUPS, PROMPT_TOKENS, COMPLETION_TOKENS = 1, 16, range(4, 100, 8)
STEPS = 5  # the first is not counted
PARTS = ("prepare", "forward", "backward", "update_and_publish", "prove")
WAITS = ("aten._local_scalar_dense.default", "aten.nonzero.default")  # on a GPU the host waits for their results


class DispatchCount(TorchDispatchMode):
    """A counter of dispatches, and of waits of the host for the model's device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.total = self.waits = 0
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.total += 1
        if args and isinstance(args[0], torch.Tensor) and args[0].device.type == self._device:
            goes_to_host = self._device != "cpu" and isinstance(result, torch.Tensor) and result.device.type == "cpu"
            self.waits += str(func) in WAITS or goes_to_host
        return result


def step(options: Options) -> dict[str, Any]:
    """Return dispatches and milliseconds of a step of one micro-batch, by part. The fastest of some steps counts."""
    torch.set_num_threads(1)  # a second thread adds processor time, but no work
    attention.BUCKET_PAIRS["cpu"] = attention.BUCKET_PAIRS["cuda"]
    folder = model_folder(SHAPE, options.device)
    made = even_groups(
        num_groups=GROUPS, completion_tokens=list(COMPLETION_TOKENS), prompt_tokens=PROMPT_TOKENS, vocab_size=512
    )
    groups = with_flat_logprobs(made, 512)
    with tempfile.TemporaryDirectory() as home, memory_folder() as weights:
        learner = Learner(learner_boot(options, folder, home=home, weights=weights, tokens=2048))
        rounds = [marked(learner, groups, number, time.process_time) for number in range(1, STEPS + 1)]
        options.note(
            host_ms=round(1e3 * min(sum(each.values()) for each in rounds[1:]), 1),
            **{f"{part}_ms": round(1e3 * min(each[part] for each in rounds[1:]), 1) for part in PARTS},
        )
        if options.device == "cuda":
            options.note(kernels=kernels(learner, groups))
        synchronize(options.device)
        count = DispatchCount(options.device)
        with count:
            dispatches = marked(learner, groups, learner.state().step + 1, lambda: count.total)
        learner.close()
    return {
        "dispatches": sum(dispatches.values()),
        **({"waits": count.waits} if options.device == "cuda" else {}),
        **{f"{part}_dispatches": int(dispatches[part]) for part in PARTS},
    }


def kernels(learner: Learner, groups: Sequence[TrainGroup]) -> int:
    """Return the kernels of one step, without copies and fills of memory."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        learner.train(groups, step=learner.state().step + 1)
        torch.cuda.synchronize()
    on_gpu = [each.name for each in profiled.events() if each.device_type == torch.profiler.DeviceType.CUDA]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in on_gpu)


def marked(learner: Learner, groups: Sequence[TrainGroup], number: int, read: Callable[[], float]) -> dict[str, float]:
    """Do a step, and return the increase of `read` in each part."""
    marks = [read()]

    def mark(*_: object) -> None:
        marks.append(read())

    learner.train(groups, step=number, between=mark, on_published=mark)
    mark()
    edges = [*marks[:4], *marks[-3:-1]]  # the start; before forward, backward and update; published, proven
    return {part: end - begin for part, (begin, end) in zip(PARTS, pairwise(edges), strict=True)}
