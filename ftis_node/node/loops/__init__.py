"""The named loops of the daemon, one or more in a file."""
