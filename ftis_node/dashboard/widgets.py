"""Widgets. Each draws what `ftis_node/view` returns for a snapshot. Only this file maps tones to styles.

Styles are the terminal's sixteen colors, bold and dim, so they work on any terminal. A span is never parsed as markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Input, Static

from ftis_node.telemetry.terminal_text import printable
from ftis_node.view.peers import ORDERS, PEER_COLUMNS, is_found, peer_names, peer_row, sorted_peers
from ftis_node.view.snapshot import NodeSnapshot
from ftis_node.view.spans import Line, Span, Tone

STYLES = {
    Tone.PLAIN: "",
    Tone.STRONG: "bold",
    Tone.FAINT: "dim",
    Tone.GOOD: "green",
    Tone.WARN: "yellow",
    Tone.BAD: "bold red",
}
Row = tuple["Span", ...]
MAX_ROWS = 500


class SearchLine(Input):
    """Input that is hidden until `open`. Enter keeps the filter, Escape clears it; both return the focus."""

    DEFAULT_CSS = """
    SearchLine, SearchLine:focus { display: none; height: 1; border: none; padding: 0 1; background: $background; }
    SearchLine.-open { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [("escape", "clear", "clear")]

    def __init__(self, *, back_to: str) -> None:
        """Store `back_to`, the selector of the widget that gets the focus after the search."""
        super().__init__(placeholder="search; Enter keeps, Esc clears", id="search")
        self._back_to = back_to

    def open(self) -> None:
        self.add_class("-open")
        self.focus()

    def action_clear(self) -> None:
        self.value = ""
        self._close()

    def on_input_submitted(self) -> None:
        self._close()

    def _close(self) -> None:
        self.screen.query_one(self._back_to).focus()
        self.remove_class("-open")


def as_text(spans: Line) -> Text:
    text = Text()
    for span in spans:
        text.append(span.text, STYLES[span.tone])
    return text


class TextLines(Static):
    """Lines of text; a line that is too long ends in an ellipsis, or wraps if `wraps`."""

    DEFAULT_CSS = """
    TextLines { width: 1fr; height: auto; text-wrap: nowrap; text-overflow: ellipsis; }
    TextLines.-wraps { text-wrap: wrap; text-overflow: fold; }
    """

    def __init__(self, *, id: str, wraps: bool = False) -> None:
        super().__init__(id=id)
        self.set_class(wraps, "-wraps")
        self.lines: tuple[Line, ...] = ()

    def write(self, lines: Iterable[Line]) -> None:
        shown = tuple(lines)
        if shown != self.lines:
            self.lines = shown
            self.update(Text("\n").join(map(as_text, shown)))


class Scroller(VerticalScroll):
    """Scrolling container that also takes the keys of vi and less."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", show=False),
        Binding("k", "scroll_up", show=False),
    ]


class Keys(Footer):
    """One line of the bindings of the screen and its focused widget; a click presses a key."""

    DEFAULT_CSS = """
    Keys, Keys FooterKey, Keys FooterKey .footer-key--key, Keys FooterKey .footer-key--description {
        color: $foreground; background: $background;
    }
    """

    def __init__(self) -> None:
        super().__init__(id="keys", compact=True)


class RowsTable(DataTable[Text]):
    """Table whose rows are keyed by id."""

    DEFAULT_CSS = """
    RowsTable { width: 1fr; height: 1fr; overflow-x: hidden; background: $background; }
    RowsTable > .datatable--header, RowsTable:ansi > .datatable--header { background: $background; text-style: dim; }
    RowsTable > .datatable--cursor, RowsTable:focus > .datatable--cursor {
        background: $background; color: $foreground; text-style: reverse;
    }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "cursor_down", show=False),
        Binding("k", "cursor_up", show=False),
        Binding("enter", "select_cursor", "open", key_display="Enter"),
    ]

    def __init__(self, columns: Sequence[str], *, id: str, is_dense: bool = False) -> None:
        """`is_dense` leaves one cell between columns if two do not fit."""
        super().__init__(id=id, cursor_type="row", zebra_stripes=False, cell_padding=0 if is_dense else 1)
        self._is_dense = is_dense
        self._labels = columns
        self._widths: tuple[int, ...] = ()
        self._shown: dict[str, Row] = {}

    def on_mount(self) -> None:
        self._refill({})

    def show_rows(self, rows: Mapping[str, Row]) -> None:
        """Replace the rows; update cells in place if ids, order and widths are unchanged."""
        new_rows = dict(rows)
        if list(new_rows.items()) == list(self._shown.items()):
            return
        if list(new_rows) == list(self._shown) and self._widths == self._widths_for(new_rows):
            for key, row in new_rows.items():
                for label, span, former in zip(self._labels, row, self._shown[key], strict=True):
                    if span != former:
                        self.update_cell(key, label, as_text((span,)))
        else:
            self._refill(new_rows)
        self._shown = new_rows

    def on_resize(self) -> None:
        if self._widths != self._widths_for(self._shown):
            self._refill(self._shown)

    def selected_key(self) -> str | None:
        if not self.row_count:
            return None
        return self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value

    def _widths_for(self, rows: Mapping[str, Row]) -> tuple[int, ...]:
        """Return the width of each column, in cells.

        The base class measures later, when it is idle, and until then paints with the previous widths.
        """
        columns = zip(*([cell_len(span.text) for span in row] for row in rows.values()), strict=True)
        widest = [max(column) for column in columns] or [0] * len(self._labels)
        widths = [max(width, cell_len(label)) for width, label in zip(widest, self._labels, strict=True)]
        if not self._is_dense:
            return tuple(widths)
        gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= self.size.width else 1
        return tuple(width + gap for width in widths)

    def _refill(self, new_rows: Mapping[str, Row]) -> None:
        selected, keys = self.selected_key(), list(new_rows)
        self._widths = self._widths_for(new_rows)
        self.clear(columns=True)
        for label, width in zip(self._labels, self._widths, strict=True):
            self.add_column(label, key=label, width=width)
        for key, row in new_rows.items():
            self.add_row(*(as_text((span,)) for span in row), key=key)
        if selected is not None and selected in new_rows:
            self.move_cursor(row=keys.index(selected), animate=False)


class PeersTable(RowsTable):
    """Table of peers, those with the most accepted groups first unless another order is selected."""

    DEFAULT_CSS = "PeersTable { border-top: solid $foreground 40%; }"

    def __init__(self, *, id: str) -> None:
        super().__init__(PEER_COLUMNS, id=id, is_dense=True)
        self.border_title = "peers"
        self._order, self._search_text = "accepted", ""
        self._snapshot: NodeSnapshot | None = None

    def show(self, snapshot: NodeSnapshot) -> None:
        self._snapshot = snapshot
        found = [row for row in snapshot.peers if is_found(row, self._search_text)]
        order = "" if self._order == "accepted" else f", by {self._order}"
        search = f", {len(found)} with {printable(self._search_text)!r}" if self._search_text else ""
        connected = f"{snapshot.status.swarm.peers_connected} connected, " if snapshot.is_live else ""
        self.border_title = Text(f"peers: {connected}{len(snapshot.peers)} known{order}{search}")
        shown = sorted_peers(found, self._order)[:MAX_ROWS]
        names = peer_names(snapshot.peers, snapshot.status.node)
        named = [{**row, "name": names[row["peer_id"]]} for row in shown]
        self.show_rows({row["peer_id"]: peer_row(row, now=snapshot.taken_at) for row in named})

    def search(self, text: str) -> None:
        self._search_text = text
        self._again()

    def sort_next(self) -> None:
        orders = list(ORDERS)
        self._order = orders[(orders.index(self._order) + 1) % len(orders)]
        self._again()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        if event.column_key.value in ORDERS:
            self._order = event.column_key.value
            self._again()

    def _again(self) -> None:
        if self._snapshot is not None:
            self.show(self._snapshot)
