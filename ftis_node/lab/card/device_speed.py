"""Speed of the first GPU, or of the CPU: times of work, and operations per second."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from ftis_node.memory.step_time import SPEEDS

PRODUCT_SIZE, CPU_PRODUCT_SIZE = 8192, 512
PRODUCTS = 10


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], device: str, *, rounds: int = 1) -> float:
    """Return the seconds of the fastest of `rounds`, after all earlier work of the device."""
    best = math.inf
    for _ in range(rounds):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best


@torch.no_grad()
def product_flops(device: str, *, size: int, dtype: torch.dtype) -> float:
    """Return the operations per second of the fastest of a few products of square matrices."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds(lambda: left @ right, device, rounds=PRODUCTS)


def peak_flops(device: str) -> dict[str, float]:
    """Return `product_tflops`, which was measured, and `peak_tflops`: the data sheet's, else the measured one."""
    size, dtype = (PRODUCT_SIZE, torch.bfloat16) if device == "cuda" else (CPU_PRODUCT_SIZE, torch.float32)
    measured = product_flops(device, size=size, dtype=dtype) / 1e12
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    known = max((card for card in SPEEDS if card in name), key=len, default=None)
    peak = measured if known is None else SPEEDS[known].tflops
    return {"product_tflops": round(measured, 4), "peak_tflops": round(peak, 4)}
