"""Rendering of this package's templates. The engine escapes every value; a style sheet or script of ours is Markup.

Untrusted text is also bounded, and without control characters and paths.
"""

from __future__ import annotations

import re
from importlib import resources
from typing import TYPE_CHECKING, Any

from ftis_node.telemetry.health_summary import duration
from ftis_node.telemetry.terminal_text import ELLIPSIS, date_time, printable
from ftis_node.view.formats import number, percent, short_id

if TYPE_CHECKING:
    from markupsafe import Markup

PATH = re.compile(r"(?<![\w:/])/(?:[^\s/'\")]+/)+")
STYLE = "page.css"


def clean(text: object, *, limit: int = 120) -> str:
    """Return untrusted text in at most `limit` characters, with control and direction characters escaped."""
    shown = printable(str(text)[: limit + 1], keep_newlines=True)
    return shown if len(shown) <= limit else shown[: limit - 1] + ELLIPSIS


def without_paths(text: object) -> str:
    """Shorten absolute paths and addresses (`/ip4/...`) to their last part, because users share reports."""
    return PATH.sub("…/", str(text))


def render(template: str, **values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("ftis_node.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (number, percent, duration, date_time, short_id, clean)
    environment.filters.update({one.__name__: one for one in filters})
    return environment.get_template(template).render(style=own_file(STYLE), **values)


def own_file(name: str) -> Markup:
    """Return a file of this package, which the template does not escape."""
    from markupsafe import Markup

    text = resources.files("ftis_node.report").joinpath(name).read_text(encoding="utf-8")
    return Markup(text)  # nosec B704: a file of this package
