"""Tiny models for swarms on two CPU cores: real Qwen2 architecture, partly competent in a task, no download.

make.py        builds, trains and saves one
recipes.py     the sizes, for each task
arithmetic.py  training data for `arithmetic`: answers of which most are wrong in one way
sums.py        training data for `sums`: working, of which some columns are wrong
tokenizer.py   the tokenizer that all share; corpus.py is the English for its merges
muon.py        the optimizer of the layers' matrices
"""

from __future__ import annotations

from ftis_node.lab.tiny.make import TinyReport, make_tiny
from ftis_node.lab.tiny.recipes import RECIPES, SUMS_RECIPES, Size

__all__ = ["RECIPES", "SUMS_RECIPES", "Size", "TinyReport", "make_tiny"]
