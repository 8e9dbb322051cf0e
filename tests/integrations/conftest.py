"""TRL is imported before any test: it warns of each newer release of vLLM, and warnings are errors here."""

import warnings
from importlib import import_module

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import_module("trl.trainer.grpo_trainer")
