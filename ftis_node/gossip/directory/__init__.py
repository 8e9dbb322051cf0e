"""The directory in the Kademlia DHT: signed entries, their validation, look-ups."""

from __future__ import annotations
