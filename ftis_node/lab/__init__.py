"""Small real setups: tiny models, the demo swarm, experiments, and nodes without a model for large swarms."""

from __future__ import annotations
