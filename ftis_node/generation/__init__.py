"""Generation: the daemon's client, and the worker with its engines.

Importing this room, its client or its evaluation loads no torch; the engines do, in the worker's process.
"""
