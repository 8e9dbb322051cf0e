"""Pure policies about peers: what to pull and from whom, which shards to read, reputation, rate limits.

Facts and the time come in, decisions go out. There is no clock, socket, task or file inside. The loops of `node/` act
on the decisions, and the simulation of large swarms runs the same code in virtual time.
"""

from __future__ import annotations
