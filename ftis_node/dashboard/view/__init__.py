"""Text of the screens as pure functions: documents in, lines and values out. They know no widget, clock or file.

A line is a tuple of spans. A span's tone states its meaning, and the widgets map tones to colors. Text from peers
enters a line only through `printable`.
"""
