"""A node of a swarm that shares GRPO rollouts between unlike models."""

from __future__ import annotations

__version__ = "0.1.0"
