"""Commands of `ftis-node`, one per file; `cli/app.py` lists them."""
