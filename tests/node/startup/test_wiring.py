"""The parts that `Wiring.make` passes to a component by name have the type that the component declares.

mypy does not see these arguments, because `make` reads the names of the fields.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass

from ftis_node.node.components import NodeComponents
from ftis_node.node.startup import wiring

EXPLICIT = {("StatusLoop", "buffer"), ("TrainLoop", "peers")}  # `Wiring` passes these arguments itself
WIDER = {("Evaluator", "eval_tasks"): "Sequence[Task]"}  # the node has a tuple


def test_a_component_gets_parts_of_the_types_that_it_declares() -> None:
    parts = {part.name: part.type for part in fields(NodeComponents)}
    kinds = [kind for kind in vars(wiring).values() if isinstance(kind, type) and is_dataclass(kind)]
    checked = [
        (kind.__name__, each.name, each.type)
        for kind in kinds
        if kind is not NodeComponents and kind.__module__.startswith("ftis_node.node.")
        for each in fields(kind)
        if each.name in parts and each.default is MISSING and each.default_factory is MISSING
    ]
    assert len(checked) > 100
    wrong = [
        (kind, name, declared, parts[name])
        for kind, name, declared in checked
        if (kind, name) not in EXPLICIT and declared not in (parts[name], WIDER.get((kind, name)))
    ]
    assert not wrong
