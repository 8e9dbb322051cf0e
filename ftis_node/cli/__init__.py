"""Command line: `app.py` has the table of commands, `commands/` has one file a command."""
