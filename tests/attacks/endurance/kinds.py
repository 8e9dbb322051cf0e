"""All kinds of attackers, each with its assumed actions per day.

An action is one visit, false group, announcement, request or entry, depending on the kind. The rates are those of a
busy public node: hundreds of foreign hosts, thousands of false groups, and floods of cheap messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tests.attacks.endurance import false_groups, floods
from tests.attacks.visitors import js_host
from tests.attacks.visitors.connections import ManyStreams, ReconnectingPeer, SilentPeer
from tests.attacks.visitors.crawlers import Crawler, HivemindClient, PlainHost
from tests.attacks.visitors.foreign import ForeignAuthor, ForeignKeyHost
from tests.attacks.visitors.host import FOREIGN

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.attacks.endurance.target import Scene
    from tests.attacks.visitors.host import Visitor


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of attacker. `act` attacks once and returns its actions. No group of a malicious kind may be accepted."""

    name: str
    per_day: int
    act: Callable[[Scene], Awaitable[int]]
    limit_s: float = 90.0
    is_malicious: bool = False


async def _visit(visitor: Visitor, scene: Scene, *, actions: int = 1) -> int:
    done = await visitor.visit(await scene.target(), scene.folder())
    return actions or done


def _visitors() -> list[Kind]:
    """Return the kinds of visitors. A visit counts as one action, except that each repeated connection counts."""
    kinds = [
        *(Kind(f"{kind} host", 200, partial(_visit, ForeignKeyHost(kind))) for kind in FOREIGN),
        Kind("foreign author", 100, partial(_visit, ForeignAuthor())),
        Kind("foreign author through a forwarder", 50, partial(_visit, ForeignAuthor(is_forwarded=True))),
        Kind("hivemind DHT client", 50, partial(_visit, HivemindClient())),
        Kind("crawler", 200, partial(_visit, Crawler())),
        Kind("go-libp2p host", 100, partial(_visit, PlainHost())),
        Kind("thousand streams", 12, partial(_visit, ManyStreams())),
        Kind("silent peer", 200, partial(_visit, SilentPeer())),
        Kind("repeated connections", 5_000, partial(_visit, ReconnectingPeer(num_times=100), actions=0)),
    ]
    if not js_host.missing():
        kinds.append(Kind("js-libp2p host", 100, partial(_visit, js_host.JsHost())))
    return kinds


def all_kinds() -> list[Kind]:
    """Return all kinds, in arbitrary order."""
    members = [
        *(
            Kind(f"false group: {name}", 240, partial(false_groups.send_false_claims, name), is_malicious=True)
            for name in false_groups.FALSE_CLAIMS
        ),
        *(
            Kind(f"false body: {name}", 240, partial(false_groups.send_invalid_bodies, name), is_malicious=True)
            for name in false_groups.BODIES
        ),
        Kind("copied completions", 240, false_groups.copied_completions),
        Kind("used numbers", 240, false_groups.used_numbers),
        Kind("forged senders", 240, false_groups.forged_senders, is_malicious=True),
        Kind("padded groups", 400, false_groups.padded_groups),
        *(
            Kind(f"server: {name}", 50, partial(floods.invalid_server, name), is_malicious=True)
            for name in floods.SERVERS
        ),
        Kind("announcements of nonexistent groups", 200_000, floods.nonexistent_groups, is_malicious=True),
        Kind("invalid announcements", 5_000, floods.invalid_announcements, is_malicious=True),
        Kind("requests", 20_000, floods.requests, is_malicious=True),
        Kind("questions", 5_000, floods.questions, is_malicious=True),
        Kind("malformed frames", 2_000, floods.malformed_frames, is_malicious=True),
        Kind("slow requests", 200, floods.slow_requests, is_malicious=True),
        Kind("false confirmations", 2_000, floods.false_confirmations, is_malicious=True),
        Kind("answers with the largest time", 50, floods.late_answers, is_malicious=True),
        Kind("records out of bounds", 300, floods.records_out_of_bounds, is_malicious=True),
        Kind("invalid records", 200, floods.invalid_records, is_malicious=True),
        Kind("invalid addresses", 1_000, floods.invalid_addresses, is_malicious=True),
        Kind("invented members", 5_000, floods.invented_members, is_malicious=True),
        Kind("identities of one peer", 2_000, floods.relayed_identities),
        Kind("connections to the status port", 2_000, floods.status_port),
    ]
    return [*_visitors(), *members]
