"""Benchmarks, each run as `python bench/NAME.py`, and stand-ins that tests use too."""
