"""Pulling: which announced groups this node fetches, from which peer, and when."""

from __future__ import annotations
