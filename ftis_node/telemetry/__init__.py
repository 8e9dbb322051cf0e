"""Telemetry of the node: log lines, the event log, the status snapshot, metrics."""

from __future__ import annotations
