"""Settings: the run manifest that a swarm shares, the settings of one node, and its home. Imports nothing heavy."""

from __future__ import annotations
