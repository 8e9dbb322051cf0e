"""The commands of `ftis-node`, one file each; `app.py` has the table."""
