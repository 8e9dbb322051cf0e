"""The tables of docs/train/methods.md, made from `METHODS` and `Settings`.

python -m tests.documented.methods      print them
"""

from dataclasses import fields

from ftis_node.algorithms.methods import METHODS, method_parameters
from ftis_node.algorithms.settings import COMMON_PARAMETERS, TENSORS, Settings


def methods_table() -> str:
    """Return one row per method: filter, advantages, aggregation, defaults, parameters, source."""
    rows = [
        "| method | filter | advantages | mean over | its own defaults | more parameters | source |",
        "|" + "---|" * 7,
    ]
    for name, method in METHODS.items():
        defaults = [f"`{key}` = {value}" for key, value in method.defaults.items() if key != "agg"]
        more = [f"`{key}`" for key in method.takes if key not in TENSORS]
        cells = [
            f"`{name}`", "yes" if method.filtered else "no", f"`{method.advantage_scale}`",
            f"`{method_parameters(name)['agg']}`", ", ".join(defaults) or "-", ", ".join(more) or "-",
            method.source,
        ]  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def parameters_table() -> str:
    rows = ["| parameter | default | methods |", "|---|---|---|"]
    for field in fields(Settings):
        takes = [f"`{name}`" for name in METHODS if field.name in METHODS[name].takes]
        methods = "all" if field.name in COMMON_PARAMETERS else ", ".join(takes)
        rows.append(f"| `{field.name}` | {field.default} | {methods} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(methods_table())  # noqa: T201
    print(parameters_table())  # noqa: T201
