"""The table of parts, their cases, and the seconds that each case is expected to take."""

from __future__ import annotations

import fcntl
import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

PARTS = (
    "env",
    "contexts",
    "attention",
    "parity",
    "memory",
    "host",
    "learner",
    "transfer",
    "generate",
    "one_gpu",
    "base",
)
NEED_VLLM = ("generate", "one_gpu", "base")
SHAPES = ("0.5b", "3b")
SMALL_SHAPE, SMALL_TOKENS = "2m", 256
SMALL_S = 100.0  # of any case of a small check, on a busy machine
LIMIT_RATIO = 3.0  # a case that takes longer than this times its expected seconds is killed


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a part. `figures` is the file of a case's figures so far, `lock` that of the GPU; None: not shared."""

    device: Literal["cpu", "cuda"]
    small: bool = False
    figures: Path | None = None
    lock: Path | None = None

    def note(self, **figures: object) -> None:
        """Add figures to those of the case, and store them at once: a case that is killed keeps them."""
        assert self.figures is not None
        so_far = json.loads(self.figures.read_text()) if self.figures.exists() else {}
        whole = self.figures.with_suffix(".new")
        whole.write_text(json.dumps(so_far | figures))
        whole.rename(self.figures)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Hold the GPU: of the cases that run together, one measures at a time while others load."""
        if self.lock is None:
            yield
            return
        with self.lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement, in a separate process. `how` are keyword arguments of `function` in `module`."""

    part: str
    name: str
    module: str
    function: str
    expected_s: float
    how: Mapping[str, Any]

    @property
    def limit_s(self) -> float:
        return LIMIT_RATIO * self.expected_s

    def run(self, options: Options) -> None:
        """Store the figures, those that the function returns last. Raises any error of the measurement."""
        function = getattr(import_module(self.module), self.function)
        options.note(**(function(options, **self.how) or {}))


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
        "transfer": _transfer,
        "generate": _generate,
        "one_gpu": _one_gpu,
        "base": _base,
    }[part](shapes)
    return [replace(case, expected_s=SMALL_S) for case in made] if options.small else list(made)


def _env(shapes: tuple[str, ...]) -> Iterator[Case]:
    for name in ("machine", "peak", "copies"):
        yield Case("env", name, "gpu.machine", name, 15.0, {})


def _contexts(shapes: tuple[str, ...]) -> Iterator[Case]:
    for name in ("bare", "daemon"):
        yield Case("contexts", name, "gpu.machine", name, 20.0, {})


def _attention(shapes: tuple[str, ...]) -> Iterator[Case]:
    yield Case("attention", "tests", "gpu.numbers", "attention_tests", 40.0, {})


def _parity(shapes: tuple[str, ...]) -> Iterator[Case]:
    for shape in shapes:
        yield Case("parity", f"{shape}-logprobs", "gpu.numbers", "parity", 60.0, {"shape": shape})
        yield Case("parity", f"{shape}-layouts", "gpu.numbers", "layouts", 30.0, {"shape": shape})


def _memory(shapes: tuple[str, ...]) -> Iterator[Case]:
    sizes = (SMALL_TOKENS,) if shapes == (SMALL_SHAPE,) else (16384, 8192)
    for tokens, shape, lora, recompute in itertools.product(sizes, shapes, (False, True), (True, False)):
        name = f"{shape}-{'lora' if lora else 'full'}-{'recomputed' if recompute else 'kept'}-{tokens}"
        how = {"shape": shape, "lora": lora, "recompute": recompute, "tokens": tokens}
        yield Case("memory", name, "gpu.steps", "memory", 25.0, how)
    for tokens, shape in itertools.product(sizes, shapes):
        how = {"shape": shape, "lora": True, "recompute": False, "tokens": tokens, "quantize": "4bit"}
        yield Case("memory", f"{shape}-4bit-{tokens}", "gpu.steps", "memory", 40.0, how)
    for shape in shapes:
        yield Case("memory", f"{shape}-checkpoint", "gpu.steps", "checkpoint", 60.0, {"shape": shape})


def _host(shapes: tuple[str, ...]) -> Iterator[Case]:
    yield Case("host", "step", "gpu.host", "step", 40.0, {})


def _learner(shapes: tuple[str, ...]) -> Iterator[Case]:
    for shape, lora in itertools.product(shapes, (False, True)):
        how = {"shape": shape, "lora": lora}
        yield Case("learner", f"{shape}-{'lora' if lora else 'full'}", "gpu.programs", "learner", 130.0, how)


def _transfer(shapes: tuple[str, ...]) -> Iterator[Case]:
    for way in ("file", "registered", "ipc"):
        yield Case("transfer", way, "gpu.transfer", way, 40.0, {"shape": shapes[-1]})


def _generate(shapes: tuple[str, ...]) -> Iterator[Case]:
    engines = {"small": (shapes[0], False, "auto"), "inside": (shapes[0], False, "inside")}
    engines |= {"large": (shapes[-1], False, "auto"), "adapter": (shapes[-1], True, "auto")}
    for name, (shape, lora, core) in engines.items():
        how = {"shape": shape, "lora": lora, "core": core}
        yield Case("generate", f"{shape}-{name}", "gpu.engine", "served", 240.0, how)
    raw, how = f"{shapes[0]}-beside-raw", {"shape": shapes[0]}
    yield Case("generate", raw, "gpu.programs", "throughput", 200.0, how | {"max_batch": 256})
    yield Case("generate", f"{shapes[0]}-transfer", "gpu.programs", "engine_transfer", 120.0, how)


def _one_gpu(shapes: tuple[str, ...]) -> Iterator[Case]:
    for shape, lora in dict.fromkeys([(shapes[0], False), (shapes[-1], False), (shapes[-1], True)]):
        how = {"shape": shape, "lora": lora}
        yield Case("one_gpu", f"{shape}-{'lora' if lora else 'full'}", "gpu.programs", "one_gpu", 90.0, how)


def _base(shapes: tuple[str, ...]) -> Iterator[Case]:
    yield Case("base", f"{shapes[-1]}-lora", "gpu.base", "one_base", 220.0, {"shape": shapes[-1]})
