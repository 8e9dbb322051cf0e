"""All kinds of attackers, each with the actions a day that the endurance run assumes of it.

An action is one visit, one lie, one announcement, one request or one entry, as the kind has it. A day's rates are what
a busy public node may meet: hundreds of foreign hosts, thousands of lies, and floods of what costs its sender nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tests.attacks.endurance import floods, lies
from tests.attacks.visitors import js_host
from tests.attacks.visitors.connections import ComesAndGoes, ManyStreams, SaysNothing
from tests.attacks.visitors.crawlers import Crawler, HivemindClient, PlainHost
from tests.attacks.visitors.foreign import ForeignAuthor, ForeignKeyHost
from tests.attacks.visitors.host import FOREIGN

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.attacks.endurance.target import Scene
    from tests.attacks.visitors.host import Visitor


@dataclass(frozen=True, slots=True)
class Kind:
    """`act` attacks once and returns its actions. Of members that lie no group may be accepted."""

    name: str
    per_day: int
    act: Callable[[Scene], Awaitable[int]]
    limit_s: float = 90.0
    is_liar: bool = False


async def _visit(visitor: Visitor, scene: Scene, *, actions: int = 1) -> int:
    done = await visitor.visit(await scene.target(), scene.folder())
    return actions or done


def _visitors() -> list[Kind]:
    """Visits count one each, connections that come and go are counted singly."""
    kinds = [
        *(Kind(f"{kind} host", 200, partial(_visit, ForeignKeyHost(kind))) for kind in FOREIGN),
        Kind("foreign author", 100, partial(_visit, ForeignAuthor())),
        Kind("foreign author by a meeting point", 50, partial(_visit, ForeignAuthor(by_meeting_point=True))),
        Kind("hivemind DHT client", 50, partial(_visit, HivemindClient())),
        Kind("crawler", 200, partial(_visit, Crawler())),
        Kind("go-libp2p host", 100, partial(_visit, PlainHost())),
        Kind("thousand streams", 12, partial(_visit, ManyStreams())),
        Kind("silent peer", 200, partial(_visit, SaysNothing())),
        Kind("connections that come and go", 5_000, partial(_visit, ComesAndGoes(num_times=100), actions=0)),
    ]
    if not js_host.missing():
        kinds.append(Kind("js-libp2p host", 100, partial(_visit, js_host.JsHost())))
    return kinds


def all_kinds() -> list[Kind]:
    """In no order that matters."""
    told = [
        *(Kind(f"lie: {name}", 240, partial(lies.tell, name), is_liar=True) for name in lies.LIES),
        *(Kind(f"lie: {name}", 240, partial(lies.hand_over, name), is_liar=True) for name in lies.BODIES),
        Kind("copies", 240, lies.copies),
        Kind("used numbers", 240, lies.used_numbers),
        Kind("forged senders", 240, lies.forged_senders, is_liar=True),
        Kind("padded groups", 400, lies.padded_groups),
        *(Kind(f"server: {name}", 50, partial(floods.serve_wrongly, name), is_liar=True) for name in floods.SERVERS),
        Kind("announcements of nothing", 200_000, floods.announcements_of_nothing, is_liar=True),
        Kind("announcements that are none", 5_000, floods.announcements_that_are_none, is_liar=True),
        Kind("requests", 20_000, floods.requests, is_liar=True),
        Kind("questions", 5_000, floods.questions, is_liar=True),
        Kind("rubbish on streams", 2_000, floods.rubbish_on_streams, is_liar=True),
        Kind("slow requests", 200, floods.slow_requests, is_liar=True),
        Kind("false confirmations", 2_000, floods.false_confirmations, is_liar=True),
        Kind("answers from the end of time", 50, floods.late_answers, is_liar=True),
        Kind("records out of bounds", 300, floods.records_out_of_bounds, is_liar=True),
        Kind("records of others", 200, floods.records_of_others, is_liar=True),
        Kind("addresses that are none", 1_000, floods.addresses_that_are_none, is_liar=True),
        Kind("members that do not exist", 5_000, floods.unreal_members, is_liar=True),
        Kind("identities of one hand", 2_000, floods.identities_of_one_hand),
        Kind("connections to the status port", 2_000, floods.status_port),
    ]
    return [*_visitors(), *told]
