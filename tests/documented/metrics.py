"""The table of docs/reference/metrics.md, made from `metrics.toml`.

python -m tests.documented.metrics      write it into the page
"""

from ftis_node.telemetry.metrics import Metric, all_metrics
from tests.documented.pages import ROOT, as_links, write_table

PAGE = ROOT / "docs/reference/metrics.md"
HEAD = """| metric | kind | labels | meaning | what is normal | what to do when it is not |
|---|---|---|---|---|---|
"""


def metrics_table() -> str:
    rows: dict[str, list[Metric]] = {}
    for metric in all_metrics():
        rows.setdefault(metric.name, []).append(metric)
    return as_links(HEAD + "".join(map(_row, rows.values())))


def _row(parts: list[Metric]) -> str:
    first = parts[0]
    columns = (
        f"`{first.name}`", first.kind, ", ".join(f"`{name}`" for name in first.label_names) or "-", first.help,
        _each(parts, "normal"), _each(parts, "advice") or "-",
    )  # fmt: skip
    return f"| {' | '.join(columns)} |\n"


def _each(parts: list[Metric], column: str) -> str:
    """Return one text for all parts, or one for each part if they differ."""
    texts = [str(getattr(part, column)) for part in parts]
    if len(set(texts)) == 1:
        return texts[0]
    return "; ".join(f"{part.part[1]}: {text}" for part, text in zip(parts, texts, strict=True) if part.part)


if __name__ == "__main__":
    write_table(PAGE, HEAD, metrics_table())
