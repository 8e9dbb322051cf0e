"""Benchmarks, each run as `python bench/NAME.py`, and stubs that tests use too."""
