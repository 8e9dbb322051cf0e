"""View model of a node: `status`, the dashboard and the report show the facts, answers and texts of this package.

Pure functions: documents in, lines out. They know no widget, clock or file. A line is a tuple of spans. A span's tone
states its meaning; a renderer maps tones to colors and breaks lines. `line` escapes text from peers.
"""
