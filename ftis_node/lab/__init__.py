"""Small real setups: tiny models, the demo swarm, and experiments."""

from __future__ import annotations
