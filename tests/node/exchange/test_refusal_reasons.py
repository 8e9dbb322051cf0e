"""The refusal reasons of the exchange routes: equal in validation, code and page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from ftis_node.node.exchange import group_exchange
from ftis_node.node.exchange.group_exchange import PASSING, REQUEST_REASONS, GroupReason, RequestReason
from ftis_node.node.http_api import exchange_api
from ftis_node.node.http_api.exchange_api import BODY_S, MAX_PENDING
from ftis_node.swarm.reasons import AFTER_VALIDATION, REFUSALS

ROOT = Path(__file__).parents[3]
GROUP, REQUEST = set(get_args(GroupReason)), set(get_args(RequestReason))


def test_a_group_is_refused_under_the_names_of_validation() -> None:
    assert set(REFUSALS) - AFTER_VALIDATION >= GROUP


def test_exactly_the_listed_reasons_are_used() -> None:
    texts = [Path(str(module.__file__)).read_text("utf-8") for module in (group_exchange, exchange_api)]
    assert set(re.findall(r'refuse\(\s*"(\w+)"', "".join(texts))) == GROUP | REQUEST
    assert PASSING <= GROUP | REQUEST
    assert group_exchange.refuse("busy", "why").reason == "busy"


def test_the_page_has_each_reason_of_a_request() -> None:
    page = (ROOT / "docs/train/trl.md").read_text("utf-8")
    table = page[page.index("| reason | the request is refused") :].partition("\n\n")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.+?) \|$", table, flags=re.MULTILINE)) == REQUEST_REASONS
    assert set(REQUEST_REASONS) == REQUEST
    assert f"{MAX_PENDING} groups" in REQUEST_REASONS["busy"] and f"{BODY_S:.0f} s" in REQUEST_REASONS["slow"]
