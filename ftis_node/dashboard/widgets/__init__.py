"""One widget a file; each takes a snapshot by `show` and writes what `view/` says."""
