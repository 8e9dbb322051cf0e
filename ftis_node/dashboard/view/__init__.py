"""What is written where, as pure functions: documents in, lines and values out; no widget, clock or file is known here.

A line is a tuple of spans. A span's tone says what it means, the widgets say how that looks. Texts from peers enter a
line through `sanitized` only.
"""
