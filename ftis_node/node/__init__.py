"""The daemon: the state of a node, its named loops, and what commands do to a home.

Files and folders:

    daemon.py     the loops and the task group that runs them; draws the pipeline
    context.py    what the loops share            state.py      counts and gauges
    startup/      from a command line to a running daemon
    loops/        the named loops, one file each
    training/     when a step starts, with which groups, and what follows
    weights/      versions of weights between nodes
    peers/        what the node knows of peers, and what it sends them
    http_api/     local HTTP ports
    supervision/  stuck tasks, blocking work, the end of the node
    storage/      the size and the upkeep of a home
"""
