"""Announcements over gossipsub: subscriptions, the queue of received messages, forwarding."""

from __future__ import annotations
