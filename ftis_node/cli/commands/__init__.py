"""The commands of `ftis-node`, one a file; `cli/app.py` lists them."""
