"""Generation: the daemon's client, and the worker with its engines.

Importing this package, its client or its evaluation loads no torch; the engines load it, in the worker's process.
"""
