"""The decisions on restarts and liveness, and the messages between a worker and its owner, without processes."""

import pytest
import torch

from ftis_node import errors
from ftis_node.backoff import ExponentialBackoff
from ftis_node.errors import ConfigError, FtisError, RecordError, WorkerTaskError
from ftis_node.workers.liveness import STALLED, Liveness, RestartCounter, RestartPolicy
from ftis_node.workers.wire import (
    Call,
    Failure,
    Heartbeat,
    Message,
    Ready,
    endpoint_in,
    error_of,
    failure_of,
    pack,
    union_of,
    unpack,
    unpack_body,
)

POLICY = RestartPolicy(ExponentialBackoff(first_s=1.0, ceiling_s=3.0), quick_death_s=30.0, max_quick_deaths=5)


@pytest.mark.parametrize(
    ("is_short", "delays"), [(False, [1.0, 2.0, 3.0, 3.0, None]), (True, [1.0, 2.0, *[3.0] * 17, None])]
)
def test_deaths_and_shortages_back_off_exponentially_up_to_separate_limits(is_short, delays):
    restarts = RestartCounter(POLICY)
    assert [restarts.next_delay_s(served_s=1.0, is_short=is_short) for _ in delays] == delays
    assert restarts.num_deaths == len(delays)


def test_a_shortage_keeps_the_count_of_deaths_and_a_death_resets_that_of_shortages():
    restarts = RestartCounter(POLICY)
    assert [restarts.next_delay_s(served_s=1.0, is_short=short) for short in (False, True, False)] == [1.0, 1.0, 2.0]
    assert restarts.num_shortages == 0


def test_a_long_service_resets_the_count_of_deaths():
    restarts = RestartCounter(POLICY, num_quick_deaths=4)
    assert (restarts.next_delay_s(served_s=30.0), restarts.num_deaths) == (1.0, 0)
    restarts = RestartCounter(POLICY, num_quick_deaths=4)
    assert (restarts.next_delay_s(served_s=29.9), restarts.num_deaths) == (None, 5)


def test_failures_before_a_long_service_that_a_pause_ended_do_not_count():
    restarts = RestartCounter(POLICY, num_quick_deaths=4, num_shortages=19)
    restarts.note_service(29.9)
    assert (restarts.num_quick_deaths, restarts.num_shortages) == (4, 19)
    restarts.note_service(30.0)
    assert (restarts.num_quick_deaths, restarts.num_shortages) == (0, 0)


def beat_and_tick(liveness: Liveness, *, num_in_flight: int, progress: int) -> str:
    liveness.beat(Heartbeat(num_in_flight=num_in_flight, progress=progress))
    return liveness.tick()


def test_a_busy_worker_without_progress_is_stalled_and_an_idle_one_is_not():
    liveness = Liveness(max_silent_ticks=3, max_stalled_ticks=2)
    assert [beat_and_tick(liveness, num_in_flight=0, progress=5) for _ in range(9)] == [""] * 9
    assert [beat_and_tick(liveness, num_in_flight=1, progress=n) for n in range(6, 15)] == [""] * 9
    assert [beat_and_tick(liveness, num_in_flight=1, progress=14) for _ in range(3)] == ["", STALLED, STALLED]


class Numbers(Message, frozen=True):
    values: bytes


class Words(Message, frozen=True):
    values: bytes


def test_control_and_body_are_two_frames():
    control, body = unpack(pack(Call(call_id=7), Numbers(values=b"\x00\xff")))
    assert control == Call(call_id=7)
    assert unpack_body(body, union_of([Numbers, Words])) == Numbers(values=b"\x00\xff")
    assert unpack(pack(Ready())) == (Ready(), b"")


FTIS_ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FtisError)]


@pytest.mark.parametrize("kind", [kind for kind in FTIS_ERRORS if not issubclass(kind, RecordError)])
def test_an_ftis_error_keeps_its_class_and_message(kind):
    error = error_of(failure_of(kind("what to do"), call_id=1), worker="learner")
    assert type(error) is kind
    assert str(error) == "what to do"


OF_TORCH = torch.OutOfMemoryError("oops")  # a class of ours has this name, and would end the node


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        *((Failure(1, kind, "oops"), kind) for kind in ("ValueError", "annotations", "SchemaRecordError")),
        (failure_of(OF_TORCH, call_id=1), "torch.OutOfMemoryError"),
    ],
)
def test_any_other_error_names_the_worker_and_the_class(failure, kind):
    error = error_of(failure, worker="learner")
    assert type(error) is WorkerTaskError
    assert str(error) == f"learner: {kind}: oops"


def test_a_socket_path_above_the_limit_of_the_system_is_refused_with_advice(tmp_path):
    fits = 107 - len(str(tmp_path)) - len("/x.sock") - 1
    assert endpoint_in(tmp_path / ("d" * fits), name="x") == f"ipc://{tmp_path}/{'d' * fits}/x.sock"
    with pytest.raises(ConfigError, match=r"108 bytes long.*limit is 107.*shorter"):
        endpoint_in(tmp_path / ("d" * fits), name="xy")
