"""A side's end of the protocol: it reads `step` and `peak`, a line each, and answers in JSON.

Memory on the CPU is the process's high-water mark above its resident size after all imports, just before the model is
loaded. On a GPU it is the most that torch allocated. The machine's peak is the fastest of a few products of square
matrices in this process, with its threads. They are float32 on the CPU and bfloat16 on a GPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ftis_node.lab.card.device_speed import PRODUCT_SIZE, product_flops
from learner_sides.job import Job
from process_memory import status_bytes


class Serving:
    """The protocol's state. Create it after all imports and before the model is loaded."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        self._device = job.device
        # Libraries may print, so the standard output is reserved for answers.
        self._answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        reset_peak()
        self._began = 0.0, 0.0
        self._start_bytes = status_bytes("VmRSS")

    def ready(self) -> None:
        """Report that the model is loaded."""
        self._send({"ready": True})

    def wait_for_step(self) -> bool:
        """Wait for the next `step`. Return False at the end of the input. Meanwhile answer requests for the peak."""
        for line in iter(sys.stdin.readline, ""):
            if line.strip() == "step":
                return True
            size, dtype = (2048, torch.float32) if self._device == "cpu" else (PRODUCT_SIZE, torch.bfloat16)
            self._send({"peak_flops": product_flops(self._device, size=size, dtype=dtype)})
        return False

    def begin(self) -> None:
        """Note the begin of a step."""
        self._settle()
        self._began = time.perf_counter(), time.process_time()

    def end(self, *, step_s: float | None = None) -> None:
        """Report the step's figures. Give `step_s` if the caller's time contains more than the step."""
        self._settle()
        call_s, cpu_s = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        figures = {"step_s": call_s if step_s is None else step_s, "call_s": call_s, "cpu_s": cpu_s}
        self._send(figures | {"peak_bytes": self._peak_bytes()})

    def _settle(self) -> None:
        """Wait for the GPU."""
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _peak_bytes(self) -> int:
        if self._device == "cuda":
            return torch.cuda.max_memory_allocated()
        return status_bytes("VmHWM") - self._start_bytes

    def _send(self, figures: dict[str, Any]) -> None:
        self._answers.write(json.dumps(figures) + "\n")
        self._answers.flush()


def reset_peak() -> None:
    """Reset the high-water mark to the current size. Some sandboxes forbid it; then the mark is not reset."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        sys.stderr.write(f"the memory's high-water mark cannot be reset: {error}\n")
