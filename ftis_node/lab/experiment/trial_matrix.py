"""Trials of an experiment: all combinations of pairing, method, sharing, delay, number of nodes, attack and seed.

Fairness: an update takes the same number of completions in every trial, except with `sapo` and `newest:J`.
`alone` generates all of them itself. In a swarm of n nodes each generates 1/n and receives the others. The controls
(`specs.py`) generate as much as a node of the swarm and have no peers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from pydantic import ValidationError

from ftis_node.algorithms.methods import find_method, method_parameters
from ftis_node.config.manifest import RunManifest
from ftis_node.config.section import first_problem
from ftis_node.config.step import FILTERS_OF, NOT_OF_THE_LOSS, MethodSection
from ftis_node.config.workers import LoraSection
from ftis_node.errors import UsageError
from ftis_node.lab.experiment.byzantine import LIES
from ftis_node.lab.experiment.pairs import COPY_MARK, LATE_MARK, Pair, TrialMember
from ftis_node.lab.experiment.runner import options_of
from ftis_node.lab.experiment.specs import ALONE, CONTROLS, delay_alone, is_alone, parse_alone, parse_delays
from ftis_node.lab.experiment.trial import Trial
from ftis_node.plugins import CHOICE_GROUP, find_plugins
from ftis_node.records.codec import CODECS

SAPO = re.compile(r"sapo:(\d+)/(\d+)(?:/(\d+))?")  # own and remote groups to draw, and own ones to generate
CHOICE = re.compile(r"([\w-]+)(?::(\d+))?")  # newest or a plug-in, vertical; the number of remote groups to take
FILLED = "filled"  # vertical, and own groups replace refused remote ones
FILTER_PARAMETERS = ("kl_estimator", "kl_threshold", "filter", "keep_share", "rank_own")
FOREVER_VERSIONS, FOREVER_S = 100_000, 86_400.0


@dataclass(frozen=True, slots=True)
class Experiment:
    """Parameters of `compare`. Axes with one value do not appear in the labels of the results.

    `num_nodes` empty: a node for each model of the pairing, and two at least. `speeds` has one for each node of an
    asynchronous swarm. `steps` are then those of the fastest node.
    """

    base: RunManifest
    pairs: tuple[Pair, ...]
    methods: tuple[str, ...]
    task_spec: str
    eval_specs: tuple[str, ...]
    steps: int
    seeds: range
    lora_adapter: LoraSection
    shares: tuple[str, ...] = ("vertical",)
    delays: tuple[str, ...] = ("none",)
    num_nodes: tuple[int, ...] = ()
    speeds: tuple[int, ...] = ()
    attacks: tuple[str, ...] = ("none",)
    num_attackers: int = 1
    codecs: tuple[str, ...] = ("exact",)
    controls: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @property
    def completions_per_update(self) -> int:
        """Return the completions per update of one learner; `sapo` and `newest:J` set other numbers."""
        step = self.base.step
        return (step.own_groups + step.foreign_groups) * self.base.sampling.group_size

    def trials(self) -> list[Trial]:
        """Return all trials. Seeds are the outer loop, so that early results show all methods.

        Of equal trials under several methods, the first remains. Each pairing keeps its own, and a control remains for
        each of several swarms.
        Raises UsageError for a setting that does not fit.
        """
        found: dict[tuple[str, str, str, int], Trial] = {}
        for seed, setting in product(self.seeds, list(self._settings())):
            for trial in setting.trials(seed):
                found.setdefault((options_of(trial), setting.pair.name, setting.share, setting.num_nodes), trial)
        return list(found.values())

    @property
    def all_methods(self) -> tuple[str, ...]:
        """Return the given methods. The controls come first if they are requested and a method uses a swarm."""
        has_swarm = any(not is_alone(method) for method in self.methods)
        controls = (ALONE, *CONTROLS) if self.controls and has_swarm else ()
        return tuple(dict.fromkeys((*controls, *self.methods)))

    def steps_at(self, place: int) -> int:
        """Return the steps of the node in this place of the swarm, and of its model alone: equal time for both."""
        return max(1, round(self.steps * self.speeds[place] / max(self.speeds))) if self.speeds else self.steps

    def _nodes(self, pair: Pair) -> tuple[int, ...]:
        """Return the sizes of the swarms. Raises UsageError for speeds that do not fit."""
        sizes = self.num_nodes or (max(2, len(pair.members)),)
        if self.speeds and {len(self.speeds)} != {len(pair.members), *sizes}:
            raise UsageError(
                f"--speeds has {len(self.speeds)} values, and the pairing {pair.name} {len(pair.members)} models: give "
                "one for each model, and no other --nodes"
            )
        if self.speeds and self.attacks != ("none",):
            raise UsageError("--speeds with --attack: an attacker has no speed")
        return sizes

    def _settings(self) -> Iterator[TrialSetting]:
        for pair, method, delay in product(self.pairs, self.all_methods, self.delays):
            sizes = self._nodes(pair)
            if is_alone(method):
                own_delay = delay_alone(delay)
                if not parse_alone(method).own:
                    yield TrialSetting(self, pair, method, own_delay)
                    continue
                for share, num_nodes in product(self.shares, sizes):
                    yield TrialSetting(self, pair, method, own_delay, share=share, num_nodes=num_nodes)
                continue
            for share, num_nodes, lie, codec in product(self.shares, sizes, self.attacks, self.codecs):
                yield TrialSetting(self, pair, method, delay, share=share, num_nodes=num_nodes, lie=lie, codec=codec)


@dataclass(frozen=True, slots=True)
class TrialSetting:
    experiment: Experiment
    pair: Pair
    method: str
    delay: str
    share: str = "vertical"
    num_nodes: int = 1
    lie: str = "none"
    codec: str = "exact"

    def __post_init__(self) -> None:
        if self.lie not in ("none", *LIES):
            raise UsageError(f"no lie {self.lie!r}: use none, {', '.join(LIES)}")
        if self.codec not in CODECS:
            raise UsageError(f"no codec {self.codec!r}: use {', '.join(CODECS)}")

    @property
    def labels(self) -> dict[str, Any]:
        return {
            "pair": self.pair.name,
            "method": self.method,
            "share": self.share,
            "delay": self.delay,
            "nodes": self.num_nodes,
            "lie": self.lie,
            "codec": self.codec,
            "model_seed": self.pair.model_seed,
        }

    def trials(self, seed: int) -> Iterator[Trial]:
        """Yield one swarm, or for `alone` one run for every model of the pairing."""
        if is_alone(self.method):
            for place, member in enumerate(self.pair.members):
                trial = self.trial([member], seed, first_place=place)
                yield replace(trial, steps=self.experiment.steps_at(place))
            return
        members = self.pair.swarm(self.num_nodes)
        if self.lie != "none":
            num_honest = self.num_nodes - self.experiment.num_attackers
            if num_honest < 1:
                raise UsageError(
                    f"--attackers {self.experiment.num_attackers}: one node at least of {self.num_nodes} is honest"
                )
            for index, node in enumerate(members[num_honest:], start=num_honest):
                members[index] = replace(node, name="attacker", lie=self.lie)  # type: ignore[arg-type]  # checked
        members[-1] = self._late(members[-1])
        if not self.experiment.speeds:
            yield self.trial(members, seed)
            return
        paced = [replace(member, steps=self.experiment.steps_at(place)) for place, member in enumerate(members)]
        yield replace(self.trial(paced, seed), is_asynchronous=True)

    def _late(self, last: TrialMember) -> TrialMember:
        """Return the last node with the delay that applies only to it, if any. A copy of a model then gets another
        name.
        """
        _, delay = parse_delays(self.delay)
        if delay is None:
            return last
        if last.lie is not None:
            raise UsageError(
                f"{self.delay} with --attack {self.lie}: the last node is an attacker, which has no new weights"
            )
        model, mark, _ = last.name.partition(COPY_MARK)
        return replace(last, name=model + LATE_MARK if mark else model, delay=delay)

    def trial(self, members: Sequence[TrialMember], seed: int, *, first_place: int = 0) -> Trial:
        experiment = self.experiment
        return Trial(
            labels=self.labels,
            manifest=self._manifest(),
            members=tuple(members),
            task_spec=experiment.task_spec,
            eval_specs=experiment.eval_specs,
            delay=parse_delays(self.delay)[0],
            seed=seed,
            steps=experiment.steps,
            device=experiment.device,
            lora_adapter=experiment.lora_adapter,
            codec=self.codec,  # type: ignore[arg-type]  # checked
            first_place=first_place,
        )

    def _manifest(self) -> RunManifest:
        base = self.experiment.base
        method = parse_alone(self.method).method if is_alone(self.method) else self.method
        step = base.step.model_dump() | {
            "max_async_level": 0,
            "max_version_lag": FOREVER_VERSIONS,
            "max_age_s": FOREVER_S,
        }
        sampling = base.sampling.model_dump()
        optimizer = base.optimizer.model_dump()
        self._share_out(step, sampling)
        if is_alone(self.method):
            own = step.pop("generated_groups", None) or step["own_groups"]
            step.update(
                own_groups=own,
                foreign_groups=0,
                prompt_sharing="vertical",
                group_selection="newest",
                backfill_with_own=False,
            )
            optimizer["updates_per_batch"] = parse_alone(self.method).updates or base.optimizer.updates_per_batch
        document = base.model_dump() | {
            "step": step,
            "sampling": sampling,
            "optimizer": optimizer,
            "method": parse_method(method, base.method).model_dump(),
        }
        document["wire"] = base.wire.model_dump() | {"codecs": (*base.wire.codecs, self.codec)}
        try:
            return RunManifest.model_validate(document)
        except ValidationError as error:
            raise UsageError(f"{self.method} with {self.num_nodes} nodes: {first_problem(error)}") from None

    def _share_out(self, step: dict[str, Any], sampling: dict[str, Any]) -> None:
        """Set the part of an update that each node generates. Raises UsageError for a number of nodes that does not
        fit.
        """
        base, nodes = self.experiment.base, self.num_nodes
        total = base.step.own_groups + base.step.foreign_groups
        plugins = [plugin.name for plugin in find_plugins(CHOICE_GROUP)]
        if match := SAPO.fullmatch(self.share):
            if int(match[1]) == 0:
                raise UsageError(f"{self.share}: every node must generate something, so I is at least 1")
            step.update(own_groups=int(match[1]), foreign_groups=int(match[2]), group_selection="sapo")
            if match[3]:
                step.update(generated_groups=int(match[3]))
        elif (match := CHOICE.fullmatch(self.share)) and match[1] in ("newest", *plugins):
            self._share_evenly(step)
            made, target = step["foreign_groups"], int(match[2] or step["foreign_groups"])
            if target > made:
                raise UsageError(f"{self.share}: the others of {nodes} nodes make {made} groups an update")
            step.update(foreign_groups=target, group_selection=match[1])
        elif self.share == "horizontal":
            if sampling["group_size"] % nodes:
                raise UsageError(f"{nodes} nodes cannot share groups of {sampling['group_size']} completions evenly")
            sampling["group_size"] //= nodes
            step.update(own_groups=total, foreign_groups=total * (nodes - 1), prompt_sharing="horizontal")
        elif self.share in ("vertical", FILLED):
            self._share_evenly(step)
            step.update(backfill_with_own=base.step.backfill_with_own or self.share == FILLED)
        else:
            known = f"vertical, {FILLED}, horizontal, newest[:J], sapo:I/J[/G] or an installed choice[:J]"
            raise UsageError(f"no sharing {self.share!r}: use {known}")

    def _share_evenly(self, step: dict[str, Any]) -> None:
        total = self.experiment.base.step.own_groups + self.experiment.base.step.foreign_groups
        if total % self.num_nodes:
            raise UsageError(f"{self.num_nodes} nodes cannot share {total} prompts an update evenly")
        own = total // self.num_nodes
        step.update(own_groups=own, foreign_groups=total - own)


def parse_method(text: str, base: MethodSection) -> MethodSection:
    """Parse `NAME` or `NAME:parameter=value:...`. Raises UsageError.

    Parameters of the base apply to every method that has them. Parameters of the filter apply to methods that filter,
    by a filter that reads them. A method with its own scale of advantages keeps it.
    """
    name, *pairs = text.split(":")
    try:
        method = find_method(name)
        known = [*NOT_OF_THE_LOSS, *(each for each in method_parameters(name) if each in MethodSection.model_fields)]
        inherited = base.given() | {name: getattr(base, name) for name in NOT_OF_THE_LOSS}
        given: dict[str, Any] = {}
        for pair in pairs:
            key, separator, value = pair.partition("=")
            if not separator or key not in known:
                raise UsageError(f"{text!r}: {key!r} is not a parameter of {name}; it takes {', '.join(known)}")
            given[key] = value
        rule = given.get("filter", base.filter)
        unread = [key for key in FILTER_PARAMETERS if not method.filtered or rule not in FILTERS_OF.get(key, (rule,))]
        if method.advantage_scale not in ("std", "mean"):
            unread.append("advantage_scale")
        given = {key: value for key, value in inherited.items() if key in known and key not in unread} | given
        return MethodSection.model_validate({"name": name} | given)
    except ValidationError as error:
        raise UsageError(f"{text!r}: {first_problem(error)}") from None
    except ValueError as error:
        raise UsageError(str(error)) from None
