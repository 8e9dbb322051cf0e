"""TRL is imported before any test: it warns of each newer release of vLLM, and warnings are errors here."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl import GRPOTrainer

__all__ = ["GRPOTrainer"]
