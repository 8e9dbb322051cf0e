"""Text of the screens as pure functions: documents in, lines and values out. They know no widget, clock or file.

A line is a tuple of spans. A span's tone is its meaning; the widgets decide its look. Text from peers enters a line
only through `sanitized`.
"""
