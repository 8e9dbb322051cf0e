"""The named loops of the daemon, one file each."""
