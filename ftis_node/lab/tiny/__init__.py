"""Tiny models for swarms on two CPU cores: real Qwen2 architecture, partly competent in a task, no download.

make.py        builds, trains and saves one model, with Muon for the matrices of its layers
recipes.py     the sizes for each task
arithmetic.py  training data for `arithmetic`; most answers are wrong in one way
sums.py        training data for `sums`; some columns of the working are wrong
tokenizer.py   the tokenizer of all tiny models, with the English text for its merges
"""

from __future__ import annotations

from ftis_node.lab.tiny.make import TinyReport, make_tiny
from ftis_node.lab.tiny.recipes import RECIPES, SUMS_RECIPES, Size

__all__ = ["RECIPES", "SUMS_RECIPES", "Size", "TinyReport", "make_tiny"]
