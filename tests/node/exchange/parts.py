"""Real components of an exchange node: the arithmetic task, a tiny model's tokenizer, real validation and buffer."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ftis_node.config.manifest import RunManifest, parse_manifest
from ftis_node.config.node import NodeSettings
from ftis_node.models import PromptTokenizer, load_tokenizer, resolve_model
from ftis_node.node.exchange.trainer_exchange import TrainerExchange
from ftis_node.node.exchange.trainer_messages import OwnGroup
from ftis_node.node.http_api.exchange_api import ExchangeApi
from ftis_node.node.http_api.routes import LocalApi
from ftis_node.node.wiring import NodeComponents, Wiring
from ftis_node.records.codec import hash_messages
from ftis_node.tasks.registry import load_task
from ftis_node.tasks.scorer import IsolatedScorer
from tests.node.nodes import components
from tests.node.support import manifest_text
from tests.trained_models import trained_model

GROUP_SIZE = 2
MANIFEST = parse_manifest(manifest_text(foreign_wait_s=1, group_size=GROUP_SIZE), source="test")
PROBLEM = 7


@asynccontextmanager
async def exchanging(
    folder: Path, *, manifest: RunManifest = MANIFEST, **changes: Any
) -> AsyncIterator[tuple[NodeComponents, TrainerExchange]]:
    """Yield an exchange node whose publish and intake loops run."""
    tokenizer, task = load_tokenizer(resolve_model(str(trained_model("s")))), load_task(manifest.task)
    scorer = IsolatedScorer(task)
    given = {"tokenizer": tokenizer, "task": task, "scorer": scorer, "new_peers_scorer": scorer} | changes
    settings = NodeSettings(model="m", role="exchange")
    with components(folder, settings=settings, manifest=manifest, **given) as node:
        wiring = Wiring(node)
        exchange = wiring.exchange
        running = [asyncio.create_task(loop.run()) for loop in (wiring.publish_loop, wiring.intake)]
        try:
            await exchange.resume()
            yield node, exchange
        finally:
            for loop in running:
                loop.cancel()
                with suppress(asyncio.CancelledError):
                    await loop
            await scorer.close()


@asynccontextmanager
async def serving(node: NodeComponents, exchange: TrainerExchange) -> AsyncIterator[tuple[str, ExchangeApi]]:
    """Yield the URL of the local port of an exchange node, and its routes for a trainer."""
    wiring = Wiring(node)
    routes = ExchangeApi(exchange, max_group_bytes=node.context.manifest.wire.max_envelope_bytes)
    status = wiring.status_loop()
    await status.refresh()
    api = LocalApi(status, wiring.swarm, token_file=node.home.control_token, add_exchange=routes.add_routes)
    async with api.serve(port=0) as url:
        yield url, routes


def own_group(tokenizer: PromptTokenizer, texts: Sequence[str], *, problem: int = PROBLEM, **changes: Any) -> OwnGroup:
    """Make the trainer's completions of a problem, each with an end-of-sequence token; `changes` replace fields."""
    ids = [tokenizer_ids(tokenizer, text) for text in texts]
    flat = np.array([token for one in ids for token in one], "<i4")
    messages = load_task("arithmetic")[problem].prompt
    fields: dict[str, Any] = {
        "problem": problem,
        "problem_hash": hash_messages(messages),
        "prompt_ids": np.array(tokenizer.encode_prompt(messages), "<i4").tobytes(),
        "token_ids": flat.tobytes(),
        "logprobs": np.linspace(-0.5, -0.1, len(flat), dtype="<f4").tobytes(),
        "lengths": [len(one) for one in ids],
        "policy_version": 3,
        "tokenizer": tokenizer.fingerprint,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "created_at": time.time(),
    }
    return OwnGroup(**(fields | changes))


def tokenizer_ids(tokenizer: PromptTokenizer, text: str) -> list[int]:
    """Return the token ids of a completion: its text, then the end of sequence."""
    ids = [*tokenizer.encode_text(text), tokenizer.end_ids[0]]
    assert tokenizer.decode(ids) == text
    return ids
