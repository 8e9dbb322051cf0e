"""The daemon: what a node keeps, the named loops over it, and what commands do to a home.

daemon.py     the loops and what runs them; draws the pipeline
context.py    what the loops share            state.py      counts and gauges
startup/      from a command line to a running daemon
loops/        the named loops, one file each
training/     when a step starts, with what, and what follows
weights/      versions of weights between nodes
peers/        what is known of peers, and what they are sent
http_api/     local HTTP ports
supervision/  stuck tasks, blocking work, the end of the node
storage/      the size and the upkeep of a home
"""
