"""Frozen domain records, their wire form, and signatures. `bounds.py` has the bounds of each field of each message."""
