"""Whether the groups of this node arrived at peers: bodies sent, confirmations received and owed."""

from __future__ import annotations
