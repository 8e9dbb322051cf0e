"""Delivery of groups: bodies sent to peers, and confirmations that are pending, repeated or unverified."""

from __future__ import annotations
