"""The directory in the Kademlia DHT: signed entries, their validation, limits, look-ups."""
