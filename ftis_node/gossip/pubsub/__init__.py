"""Announcements over gossipsub: subscriptions, the queue of received ones, forwarding."""

from __future__ import annotations
