"""Clients of the fake worker, stopped at the end of a test, and one process for all tests of vLLM."""

import pytest
import pytest_asyncio
from generation_fake_worker import InProcessLife
from generation_support import SETTINGS
from generation_vllm_support import RemoteEngine

from ftis_node.backoff import ExponentialBackoff
from ftis_node.generation.client import GenerationClient
from ftis_node.generation.messages import GenerationBoot
from ftis_node.workers import supervisor
from ftis_node.workers.liveness import RestartPolicy


@pytest_asyncio.fixture
async def make_client(tmp_path, monkeypatch):
    """`make_client(**options)` makes a client of the fake worker, not started yet."""
    made: list[GenerationClient] = []
    monkeypatch.setattr(supervisor, "WorkerProcess", InProcessLife)

    quick = RestartPolicy(backoff=ExponentialBackoff(first_s=0.05), max_quick_deaths=3)

    def make(*, settings=SETTINGS, **options):
        client = GenerationClient(
            GenerationBoot(model=str(tmp_path), settings=settings),
            sockets_dir=tmp_path / "s",
            log_path=tmp_path / "logs" / "generation.log",
            **{"restart_policy": quick} | options,
        )
        made.append(client)
        return client

    yield make
    for client in made:
        await client.stop()


@pytest.fixture
def problems() -> list[str]:
    """What `client` reports."""
    return []


@pytest_asyncio.fixture
async def client(make_client, problems):
    """A started client of the fake worker."""
    made = make_client(on_problem=problems.append)
    await made.start()
    return made


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm(tmp_path_factory):
    """A process that opens one vLLM engine after the other."""
    engine = RemoteEngine(tmp_path_factory.mktemp("vllm"))
    await engine.start()
    yield engine
    await engine.stop()
