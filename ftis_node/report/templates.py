"""Rendering of this package's templates. The engine escapes every value; a style sheet or script of ours is Markup."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Any

from ftis_node.report.formatting import clean
from ftis_node.telemetry.health_summary import duration
from ftis_node.telemetry.terminal_text import date_time
from ftis_node.view.spans import number, percent, short_id

if TYPE_CHECKING:
    from markupsafe import Markup

STYLE = "page.css"
FILTERS = (number, percent, duration, date_time, short_id, clean)


def render(template: str, **values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("ftis_node.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update({one.__name__: one for one in FILTERS})
    return environment.get_template(template).render(style=text_of(STYLE), **values)


def text_of(file: str) -> Markup:
    """Return a file of this package, which the template does not escape."""
    from markupsafe import Markup

    text = resources.files("ftis_node.report").joinpath(file).read_text(encoding="utf-8")
    return Markup(text)  # nosec B704: a file of this package
