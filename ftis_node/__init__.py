"""A node of a swarm whose members train different models and share GRPO rollouts."""

from __future__ import annotations

import os

__version__ = "0.1.0"

# Before torch is imported, in every process: else torch counts the fastest GPU first, and vLLM and nvidia-smi do not.
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
