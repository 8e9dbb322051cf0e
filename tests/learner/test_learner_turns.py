"""A learner that shares its GPU with a generator: when it releases memory, and when it checks groups."""

import asyncio
import threading

import msgspec
import pytest
import torch
from learner_rig import Emit, make_boot, random_groups, sample_group

from ftis_node.errors import FtisError
from ftis_node.learner import learner as learner_module
from ftis_node.learner.messages import CheckRequest, GiveMemoryBack, StateRequest, TrainRequest
from ftis_node.learner.step.train_step import Passes
from ftis_node.learner.worker import build
from ftis_node.models import load_causal_lm, resolve_model
from ftis_node.workers.weight_store import PublishedWeights
from ftis_node.workers.wire import Done


@pytest.fixture
def released(monkeypatch):
    """Return a list with an item for each release of free blocks."""
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    return calls


@pytest.mark.parametrize(("takes_turns", "times"), [(True, [1, 2, 3, 4, 5]), (False, [0, 0, 0, 0, 1])])
async def test_free_blocks_are_released_before_every_reply_and_error(
    model_folder, tmp_path, released, takes_turns, times
):
    """Without turns only on request."""
    seen = []
    async with build(make_boot(model_folder, tmp_path, takes_turns=takes_turns), Emit()) as handlers:
        await handlers[StateRequest](StateRequest(), Emit())
        seen.append(len(released))
        train = TrainRequest(step=1, groups=tuple(random_groups(num_groups=1)))

        def on_event(event):
            if isinstance(event, PublishedWeights):  # the generator may wake after it
                seen.append(len(released))

        await handlers[TrainRequest](train, Emit(on_event))
        seen.append(len(released))
        with pytest.raises(FtisError, match="cannot do step 9"):
            await handlers[TrainRequest](TrainRequest(step=9, groups=()), Emit())
        seen.append(len(released))
        assert await handlers[GiveMemoryBack](GiveMemoryBack(), Emit()) == Done()
        seen.append(len(released))
    assert seen == times


@pytest.mark.parametrize("takes_turns", [True, False])
async def test_a_check_waits_for_the_step_and_is_in_its_report(model_folder, tmp_path, monkeypatch, takes_turns):
    moments = []
    model = load_causal_lm(resolve_model(str(model_folder)), dtype="float32", device="cpu")
    group = sample_group(model, group_size=3, length=5, reward=lambda index: float(index == 0))
    async with build(make_boot(model_folder, tmp_path, takes_turns=takes_turns), Emit()) as handlers:
        compute = Passes.logprobs

        def noticed(passes):
            moments.append("measured")
            return compute(passes)

        monkeypatch.setattr(Passes, "logprobs", noticed)
        await handlers[CheckRequest](CheckRequest(group=group), Emit())
        moments.append("answered")
        peers = tuple(msgspec.structs.replace(each, own=False) for each in random_groups())
        reply = await handlers[TrainRequest](TrainRequest(step=1, groups=peers), Emit())
    assert moments == (["answered", "measured"] if takes_turns else ["measured", "answered"])
    assert reply.report.mismatch_tokens == 15


async def test_a_check_during_a_step_is_measured_before_its_update(model_folder, tmp_path, monkeypatch):
    loop, begun, offered = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    model = load_causal_lm(resolve_model(str(model_folder)), dtype="float32", device="cpu")
    group = sample_group(model, group_size=3, length=5, reward=lambda index: float(index == 0))
    take_step = learner_module.take_step

    def late(*arguments, **options):
        loop.call_soon_threadsafe(begun.set)
        assert offered.wait(30)
        return take_step(*arguments, **options)

    monkeypatch.setattr(learner_module, "take_step", late)
    peers = tuple(msgspec.structs.replace(each, own=False) for each in random_groups())
    async with build(make_boot(model_folder, tmp_path), Emit()) as handlers:
        training = asyncio.create_task(handlers[TrainRequest](TrainRequest(step=1, groups=peers), Emit()))
        await begun.wait()
        checking = asyncio.create_task(handlers[CheckRequest](CheckRequest(group=group), Emit()))
        await asyncio.sleep(0)
        offered.set()
        assert (await training).report.mismatch_tokens == 15
        assert await checking == Done()
