"""From a command line to a running daemon: plan, checks, recovery, construction."""
