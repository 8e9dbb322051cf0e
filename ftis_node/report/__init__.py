"""One self-contained page about a run: settings, results, peers, problems.

The page has no script and loads nothing from a network. All text from peers is bounded and escaped.
"""
