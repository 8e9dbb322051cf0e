"""Small real things to try it all with: tiny models, the demo swarm, experiments."""

from __future__ import annotations
