"""Widgets, one a file. Each draws what `view/` returns for a snapshot."""
