"""Membership: which peers are members of the run, which are connected, and which to dial."""

from __future__ import annotations
