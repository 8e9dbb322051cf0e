"""Evaluation of experiments: tables, plots, comparison with a node without peers."""

from __future__ import annotations
