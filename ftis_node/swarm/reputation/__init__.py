"""Reputation: what a peer did, who is at fault for a rejected group, rate limits, duplicates, bans."""

from __future__ import annotations
