"""Topology: how announcements are divided into shards, and which members a node dials."""

from __future__ import annotations
