"""The choice of a step's groups by a plug-in: a function of the ready groups that returns the chosen ones.

    rule(candidates, own, foreign, step) -> the groups of the step, at most `own` and `foreign` of each

`candidates` are `Candidate`s of `group_choice.py`, which has the built-in rules and their parts. All others stay READY.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from ftis_node.errors import ConfigError
from ftis_node.plugins import CHOICE_GROUP, call_plugin, load_function
from ftis_node.replay.group_choice import Candidate, Selection


@lru_cache(maxsize=16)
def load_choice(name: str) -> Callable[..., Selection]:
    """Return the choice of the plug-in `name`, which takes the arguments of a rule and `step`.

    It checks the result: a group that is not READY, or twice in a step, would corrupt both. Raises ConfigError if there
    is no such plug-in, or for a faulty one.
    """
    plugin, rule = load_function(CHOICE_GROUP, name, error=ConfigError)
    if plugin is None or rule is None:
        raise ConfigError(f"no choice {name!r} is installed")

    def choose(candidates: Sequence[Candidate], own: int, foreign: int, *, step: int) -> Selection:
        chosen = call_plugin(plugin, lambda: tuple(rule(candidates, own, foreign, step)), error=ConfigError)
        known = set(candidates)
        if not all(isinstance(each, Candidate) and each in known for each in chosen):
            raise ConfigError(f"{plugin} gave something that is not one of the ready groups")
        num_own = sum(each.own for each in chosen)
        if len(set(chosen)) < len(chosen) or num_own > own or len(chosen) - num_own > foreign:
            raise ConfigError(
                f"{plugin} gave {num_own} own and {len(chosen) - num_own} foreign groups, {len(set(chosen))} of them "
                f"different: at most {own} and {foreign} may be taken, each once"
            )
        return Selection(chosen)

    return choose
