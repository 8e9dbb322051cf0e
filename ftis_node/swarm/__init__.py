"""Pure policies about peers: what to pull and from whom, which shards to read, reputation, rate limits.

Each takes facts and the current time and returns decisions. None uses a clock, socket, task or file. The loops of
`node/` execute the decisions, and the simulation of large swarms runs the same code in virtual time.
"""
