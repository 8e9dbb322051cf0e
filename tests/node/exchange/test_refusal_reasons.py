"""The reasons for which the exchange routes refuse a request: equal in code and page."""

import re
from pathlib import Path
from typing import get_args

from ftis_node.node.exchange.group_exchange import REQUEST_REASONS, RequestReason
from ftis_node.node.http_api.exchange_api import BODY_S, MAX_PENDING

ROOT = Path(__file__).parents[3]


def test_the_page_has_each_reason_of_a_request():
    page = (ROOT / "docs/train/trl.md").read_text("utf-8")
    table = page[page.index("| reason | the request is refused") :].partition("\n\n")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.+?) \|$", table, flags=re.MULTILINE)) == REQUEST_REASONS
    assert set(REQUEST_REASONS) == set(get_args(RequestReason))
    assert f"{MAX_PENDING} groups" in REQUEST_REASONS["busy"] and f"{BODY_S:.0f} s" in REQUEST_REASONS["slow"]
