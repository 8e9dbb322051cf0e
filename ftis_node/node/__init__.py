"""The daemon: the state of a node, its named loops, and the storage of its home (the data directory).

Files and folders:

    daemon.py     the loops and the task group that runs them, with a diagram of the pipeline
    context.py    the context that loops share, and the state on which they decide
    wiring.py     the parts of a node, and the loops and components made of them
    startup/      from a command line to a running daemon
    loops/        the named loops
    training/     policy of a training step: start, groups, limits, report
    weights/      delivery of new weights, and their download
    peers/        registry and reputation of peers, their announcements and requests
    exchange/     a trainer on this machine
    http_api/     local HTTP ports
    supervision/  stuck tasks, blocking work, shutdown
    storage/      the home: its buffer, quota and cleanup
    hub/          exports for the Hugging Face hub
"""
