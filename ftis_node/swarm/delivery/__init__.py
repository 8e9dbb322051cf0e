"""Delivery of groups: bodies sent to peers, and confirmations that peers owe, sent and claim."""

from __future__ import annotations
