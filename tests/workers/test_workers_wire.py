"""The encoding of messages and of errors."""

import pytest
import torch

from ftis_node import errors
from ftis_node.errors import ConfigError, FtisError, RecordError, WorkerTaskError
from ftis_node.workers.wire import (
    Call,
    Failure,
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


class Numbers(Message, frozen=True):
    """A body with bytes."""

    values: bytes


class Words(Message, frozen=True):
    """Another body with the same fields."""

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


@pytest.mark.parametrize("kind", ["ValueError", "annotations", "SchemaRecordError"])
def test_any_other_error_names_the_worker_and_the_class(kind):
    error = error_of(Failure(call_id=1, kind=kind, message="oops"), worker="learner")
    assert type(error) is WorkerTaskError
    assert str(error) == f"learner: {kind}: oops"


def test_an_error_of_another_library_is_not_taken_for_ours_of_the_same_name():
    """Callers handle a WorkerError; an error of this machine would end the node."""
    error = error_of(failure_of(torch.OutOfMemoryError("CUDA out of memory."), call_id=1), worker="generation")
    assert type(error) is WorkerTaskError
    assert str(error) == "generation: torch.OutOfMemoryError: CUDA out of memory."


def test_a_socket_path_above_the_limit_of_the_system_is_refused_with_advice(tmp_path):
    fits = 107 - len(str(tmp_path)) - len("/x.sock") - 1
    assert endpoint_in(tmp_path / ("d" * fits), name="x") == f"ipc://{tmp_path}/{'d' * fits}/x.sock"
    with pytest.raises(ConfigError, match=r"108 bytes long.*limit is 107.*shorter"):
        endpoint_in(tmp_path / ("d" * fits), name="xy")
