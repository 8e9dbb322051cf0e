"""The decisions on restarts and liveness, without processes or waiting."""

from ftis_node.backoff import ExponentialBackoff
from ftis_node.workers.liveness import STALLED, Liveness, RestartCounter, RestartPolicy
from ftis_node.workers.wire import Heartbeat

POLICY = RestartPolicy(ExponentialBackoff(first_s=1.0, ceiling_s=3.0), quick_death_s=30.0, max_quick_deaths=5)


def test_quick_deaths_back_off_exponentially_and_then_end_the_restarts():
    restarts = RestartCounter(POLICY)
    assert [restarts.next_delay_s(served_s=1.0) for _ in range(5)] == [1.0, 2.0, 3.0, 3.0, None]
    assert restarts.num_deaths == 5


def test_memory_shortages_back_off_too_and_have_a_separate_limit():
    restarts = RestartCounter(POLICY)
    delays = [restarts.next_delay_s(served_s=1.0, is_short=True) for _ in range(20)]
    assert delays == [1.0, 2.0, *[3.0] * 17, None]
    assert restarts.num_deaths == 20


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
