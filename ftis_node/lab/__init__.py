"""Small real set-ups: tiny models, the demo swarm, experiments, the simulation of large swarms."""

from __future__ import annotations
