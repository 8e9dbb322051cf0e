"""The child process p2pd: start, supervision, its control socket, one session from start to exit."""
