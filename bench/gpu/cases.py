"""The table of parts, their cases, and the time limit of each case."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal

PARTS = ("env", "contexts", "attention", "parity", "memory", "host", "learner", "handover", "generate", "one_gpu")
NEED_VLLM = ("generate", "one_gpu")
SHAPES = ("0.5b", "3b")
SMALL_SHAPE, SMALL_TOKENS = "12m", 256
SMALL_LIMIT_S = 300.0  # of any case of a small check, which is slow on a busy machine
MODEL_S = 120.0  # of the first case of a shape, which creates its model


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a part. If `peak_tflops` is None, it is measured when a share of it is needed."""

    device: Literal["cpu", "cuda"]
    small: bool = False
    peak_tflops: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement, in a separate process. `how` are keyword arguments of `function` in `module`."""

    part: str
    name: str
    module: str
    function: str
    limit_s: float
    how: dict[str, Any]

    def run(self, options: Options) -> dict[str, Any]:
        """Return the figures. Raises any error of the measurement."""
        function = getattr(import_module(self.module), self.function)
        figures: dict[str, Any] = function(options, **self.how)
        return figures


def cases_of(part: str, options: Options) -> list[Case]:
    """Return the cases of `part` in their order."""
    shapes = (SMALL_SHAPE,) if options.small else SHAPES
    made = {
        "env": _env,
        "contexts": _contexts,
        "attention": _attention,
        "parity": _parity,
        "memory": _memory,
        "host": _host,
        "learner": _learner,
        "handover": _handover,
        "generate": _generate,
        "one_gpu": _one_gpu,
    }[part](shapes)
    return [replace(case, limit_s=SMALL_LIMIT_S) for case in made] if options.small else list(made)


def _env(shapes: tuple[str, ...]) -> Iterator[Case]:
    for name in ("machine", "peak", "copies"):
        yield Case("env", name, "gpu.machine", name, 60.0, {})


def _contexts(shapes: tuple[str, ...]) -> Iterator[Case]:
    for name in ("bare", "daemon"):
        yield Case("contexts", name, "gpu.machine", name, 60.0, {})


def _attention(shapes: tuple[str, ...]) -> Iterator[Case]:
    yield Case("attention", "tests", "gpu.numbers", "attention_tests", 120.0, {})


def _parity(shapes: tuple[str, ...]) -> Iterator[Case]:
    for shape in shapes:
        yield Case("parity", f"{shape}-logprobs", "gpu.numbers", "parity", MODEL_S + 60.0, {"shape": shape})
        yield Case("parity", f"{shape}-layouts", "gpu.numbers", "layouts", 90.0, {"shape": shape})


def _memory(shapes: tuple[str, ...]) -> Iterator[Case]:
    sizes = (SMALL_TOKENS,) if shapes == (SMALL_SHAPE,) else (16384, 8192)
    for shape, lora, recompute, tokens in itertools.product(shapes, (False, True), (True, False), sizes):
        name = f"{shape}-{'lora' if lora else 'full'}-{'recomputed' if recompute else 'kept'}-{tokens}"
        how = {"shape": shape, "lora": lora, "recompute": recompute, "tokens": tokens}
        # Only one case of each kind saves a checkpoint, which has 37 GB for all weights of 3B.
        how["saves"] = recompute and tokens == sizes[0]
        yield Case("memory", name, "gpu.steps", "memory", 90.0 + MODEL_S * how["saves"], how)


def _host(shapes: tuple[str, ...]) -> Iterator[Case]:
    yield Case("host", "step", "gpu.host", "step", 120.0, {})


def _learner(shapes: tuple[str, ...]) -> Iterator[Case]:
    for shape, lora in itertools.product(shapes, (False, True)):
        how = {"shape": shape, "lora": lora}
        yield Case("learner", f"{shape}-{'lora' if lora else 'full'}", "gpu.programs", "learner", 400.0, how)


def _handover(shapes: tuple[str, ...]) -> Iterator[Case]:
    for way in ("file", "registered", "ipc"):
        yield Case("handover", way, "gpu.transfer", way, 120.0, {"shape": shapes[-1]})


def _generate(shapes: tuple[str, ...]) -> Iterator[Case]:
    for shape, lora in itertools.product(shapes, (False, True)):
        how = {"shape": shape, "lora": lora}
        name = f"{shape}-{'adapter' if lora else 'model'}"
        yield Case("generate", f"{name}-served", "gpu.engine", "served", 300.0, how)
    for max_batch, core in ((64, "auto"), (256, "auto"), (512, "auto"), (256, "inside")):
        how = {"shape": shapes[0], "max_batch": max_batch, "core": core}
        yield Case("generate", f"{shapes[0]}-{max_batch}-{core}", "gpu.programs", "throughput", 300.0, how)
    yield Case("generate", f"{shapes[0]}-hand-over", "gpu.programs", "engine_hand_over", 300.0, {"shape": shapes[0]})


def _one_gpu(shapes: tuple[str, ...]) -> Iterator[Case]:
    for shape, lora in dict.fromkeys([(shapes[0], False), (shapes[-1], False), (shapes[-1], True)]):
        how = {"shape": shape, "lora": lora}
        yield Case("one_gpu", f"{shape}-{'lora' if lora else 'full'}", "gpu.programs", "one_gpu", 300.0, how)
