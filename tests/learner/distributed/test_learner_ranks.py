"""A learner of two ranks computes what one process computes, and ends as a whole.

Numbers come from two gloo ranks on the CPU. Tests of processes use the client, as a node does.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from learner_rig import make_boot, random_groups
from ranks_program import SIZES, train

import ftis_node
from ftis_node.backoff import ExponentialBackoff
from ftis_node.config.workers import LoraSection
from ftis_node.errors import ModelError, WorkerDiedError, WorkerTaskError
from ftis_node.learner.batch import make_batch, make_micro_batches
from ftis_node.learner.checkpoint.export import export_newest
from ftis_node.learner.client import LearnerClient
from ftis_node.learner.distributed import ranks
from ftis_node.learner.distributed.launch import COMMUNICATION
from ftis_node.learner.distributed.ranks import RankGroup, cut_evenly, empty_micro_batch
from ftis_node.learner.learner import Learner
from ftis_node.learner.messages import CheckpointInProgress
from ftis_node.workers.liveness import RestartPolicy, Timing
from ftis_node.workers.wire import enc_hook
from tests.published import published_tensors

HERE = Path(__file__).parent
LIMIT_S = 240  # seconds on two free cores: about 20 each
NUMBERS = 1e-5
LONG = {"num_groups": 12, "group_size": 8, "max_length": 60}
ADAPTER = {"lora": LoraSection(rank=3, alpha=6), "learning_rate": 1e-2, "recompute_activations": True}
TWO_PASSES = {"filter": "ess"}  # a loss that needs two passes
FORMS = {"full": {"kl_coef": 0.1}, "plain": {}, "lora": ADAPTER | TWO_PASSES}


def run_two_ranks(tasks, folder, program="ranks_program.py"):
    """Run the program and return the results that rank 0 wrote."""
    python_path = f"{HERE}:{HERE.parent}:{Path(ftis_node.__file__).parents[1]}"
    arguments = [json.dumps(msgspec.to_builtins(tasks, enc_hook=enc_hook)), str(folder / "out.json")]
    environment = {**os.environ, **COMMUNICATION, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path}
    environment["MALLOC_MMAP_THRESHOLD_"] = "65536"  # so that freed memory is not resident
    done = subprocess.run(
        [sys.executable, str(HERE / program), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S - 20,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "out.json").read_text())


@pytest.mark.timeout(LIMIT_S)
def test_two_ranks_train_like_one_and_resume_its_checkpoints(model_folder, tmp_path):
    def boot(form, home):
        return make_boot(model_folder, tmp_path / f"{form}-{home}", micro_batch_tokens=60, **FORMS[form])

    alone = {form: Learner(boot(form, "alone")) for form in FORMS}
    expected = {form: train(learner, 1, 2) for form, learner in alone.items()}
    tasks = [(boot(form, "together"), 1, 2) for form in FORMS] + [(boot(form, "alone"), 3, 3) for form in FORMS]
    found = run_two_ranks(tasks, tmp_path)

    third = {form: train(learner, 3, 3) for form, learner in alone.items()}
    for result, figures in zip(found, [*expected.values(), *third.values()], strict=True):
        assert result["packs"] is figures["packs"] is True
        for figure in ("loss", "entropy", "kl_to_start", "kl_from_start", "proof", "checked", "audited"):
            assert result[figure] == pytest.approx(figures[figure], abs=NUMBERS, rel=0)
        assert result["grad_norm"] == pytest.approx(figures["grad_norm"], rel=NUMBERS)
    for form in FORMS:
        home = tmp_path / f"{form}-together"
        published, own = published_tensors(home / "weights", 2), alone[form].policy
        assert set(published) == set(published_tensors(tmp_path / f"{form}-alone" / "weights", 3))
        assert published["model.embed_tokens.weight"].shape == own.causal_lm.get_input_embeddings().weight.shape
        resumed = Learner(boot(form, "together"))
        assert resumed.state().step == 2
        assert list(resumed.state().proof.logprobs) == pytest.approx(expected[form]["proof"], abs=NUMBERS)
        assert train(resumed, 3, 3)["proof"] == pytest.approx(third[form]["proof"], abs=NUMBERS)


@pytest.mark.timeout(LIMIT_S)
async def test_a_killed_rank_ends_all_ranks_and_the_restarted_learner_resumes(model_folder, tmp_path):
    boot = make_boot(model_folder, tmp_path / "home", micro_batch_tokens=60, num_processes=2)
    events = []
    client = LearnerClient(
        boot,
        sockets_dir=tmp_path / "s",
        log_path=tmp_path / "learner.log",
        timing=Timing(stop_grace_s=30.0),
        restart_policy=RestartPolicy(backoff=ExponentialBackoff(first_s=0.1)),
        on_event=events.append,
    )
    groups = random_groups(seed=1, **SIZES)
    try:
        await client.start()
        first = await client.train(groups, step=1)
        assert CheckpointInProgress(step=1) in events, "a checkpoint that takes long is reported when it begins"
        leader = psutil.Process(client.pid)
        (follower,) = leader.children()
        step = asyncio.create_task(client.train(random_groups(**LONG), step=2))
        await asyncio.sleep(0.5)
        assert not step.done()
        follower.send_signal(signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(WorkerDiedError, match="exited with code 1"):
            await step
        assert time.monotonic() - started < 5.0
        assert not leader.is_running()

        state = await client.start()
        assert (client.restarts, state.step) == (1, 1)
        assert state.proof.logprobs == pytest.approx(first.proof.logprobs, abs=NUMBERS)
        second = await client.train(random_groups(seed=2, **SIZES), step=2)
        assert await client.save() == 2
        assert export_newest(boot, tmp_path / "out", merge=True) == 2
        family = [psutil.Process(client.pid), *psutil.Process(client.pid).children()]
        step = asyncio.create_task(client.train(random_groups(**LONG), step=3))
        await asyncio.sleep(0.5)
    finally:
        await client.stop()
    with pytest.raises(WorkerDiedError, match="was stopped"):
        await step
    assert len(family) == 2
    assert not any(process.is_running() for process in family)
    exported = Learner(make_boot(tmp_path / "out", tmp_path / "new")).state()
    assert exported.proof.logprobs == pytest.approx(second.proof.logprobs, abs=NUMBERS)
    assert Learner(make_boot(model_folder, tmp_path / "home")).state().step == 2


@pytest.mark.timeout(LIMIT_S)
async def test_a_missing_model_is_a_user_error_with_two_ranks(tmp_path):
    boot = make_boot(tmp_path / "nowhere", tmp_path, num_processes=2)
    client = LearnerClient(boot, sockets_dir=tmp_path / "s", log_path=tmp_path / "learner.log")
    try:
        with pytest.raises(ModelError, match="no such folder"):
            await client.start()
    finally:
        await client.stop()
    assert client.restarts == 0


def test_an_error_of_one_rank_ends_its_process_and_an_error_of_all_does_not(monkeypatch, caplog):
    ended = []
    monkeypatch.setattr(ranks.os, "_exit", ended.append)
    monkeypatch.setattr(ranks.logging, "shutdown", lambda: None)
    group = group_of(1, 2)
    for agreed in (WorkerTaskError("stopped"), OSError("disk full")):
        with pytest.raises(type(agreed)), group.in_step():
            raise agreed
    assert not ended
    with group.in_step():
        raise torch.OutOfMemoryError("no memory")
    assert ended == [ranks.BROKEN_EXIT_CODE]
    assert "rank 1 of the learner failed" in caplog.text
    assert "no memory" in caplog.text


def group_of(rank, size):
    group = object.__new__(RankGroup)
    group.rank, group.size, group._on_broken = rank, size, lambda: None
    return group


def test_micro_batches_are_dealt_in_rounds_of_similar_size():
    batch = make_batch(random_groups(seed=3, **SIZES))
    micro_batches = make_micro_batches(batch, max_tokens=40)
    dealt = [group_of(rank, 3).deal(micro_batches[::-1]) for rank in range(3)]
    assert len({len(own) for own in dealt}) == 1
    sizes = [micro_batch.token_ids.numel() for round_ in zip(*dealt, strict=True) for micro_batch in round_]
    num_empty = sum(micro_batch.cell_index.numel() == 0 for own in dealt for micro_batch in own)
    assert (sizes, num_empty) == (sorted(sizes, reverse=True), -len(micro_batches) % 3)
    cells = torch.cat([micro_batch.cell_index for own in dealt for micro_batch in own])
    assert sorted(cells.tolist()) == batch.mask.view(-1).nonzero().view(-1).tolist()


@pytest.mark.parametrize(
    ("max_tokens", "size", "expected"),
    [
        (1000, 1, [80]), (1000, 2, [40, 40]), (1000, 3, [30, 30, 20]), (30, 2, [20] * 4), (45, 2, [40, 40]),
        (5, 2, [10] * 8),
    ],
)  # fmt: skip
def test_micro_batches_are_cut_so_that_every_rank_has_work(max_tokens, size, expected):
    def cut(budget):
        """Pack eight pieces of 10 tokens into micro-batches of at most `budget` tokens, or of one piece."""
        per_cut = max(1, budget // 10)
        sizes = [10 * min(per_cut, 8 - start) for start in range(0, 8, per_cut)]
        return [replace(empty_micro_batch(), token_ids=torch.zeros(1, size)) for size in sizes]

    found = cut_evenly(cut, max_tokens=max_tokens, size=size)
    assert [micro_batch.token_ids.numel() for micro_batch in found] == expected
