"""One widget a file; each takes a reading by `show` and writes what `view/` says."""
