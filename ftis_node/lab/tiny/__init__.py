"""Tiny models for swarms on two CPU cores: real Qwen2 architecture, partly competent in a task, no download.

make.py         builds, trains and saves one
recipes.py      the sizes, for each task
arithmetic.py   what models of `arithmetic` are taught: answers of which most are wrong in one way
sums.py         what models of `sums` are taught: working, of which some columns are wrong
tokenizer.py    the tokenizer that all share; corpus.py is the English that its merges come from
muon.py         the optimiser of the layers' matrices
"""

from __future__ import annotations

from ftis_node.lab.tiny.make import TinyReport, make_tiny
from ftis_node.lab.tiny.recipes import RECIPES, SUMS_RECIPES, Size

__all__ = ["RECIPES", "SUMS_RECIPES", "Size", "TinyReport", "make_tiny"]
