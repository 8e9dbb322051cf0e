"""Reputation: behavior of peers, attribution of rejected groups, rate limits, duplicates, bans."""

from __future__ import annotations
