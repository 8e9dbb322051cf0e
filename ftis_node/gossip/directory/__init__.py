"""The directory in the Kademlia DHT: signed entries, their validation, limits, look-ups."""

from __future__ import annotations
