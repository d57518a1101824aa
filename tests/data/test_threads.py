"""Threads work ahead, but only so far; results and errors come in order; a closed iterator leaves no thread behind."""

import threading
import time

import pytest

from vilonghorn.data.threads import in_order


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_order_whatever_takes_longer(workers):
    def slow_at_first(item):
        time.sleep(0.05 if item < 2 else 0)
        return 10 * item

    assert list(in_order(slow_at_first, range(20), workers)) == [10 * item for item in range(20)]


def test_an_error_comes_in_the_place_of_its_result():
    results = in_order(lambda item: 1 // (3 - item), range(9), 2)
    assert [next(results) for _ in range(3)] == [0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_the_threads_work_ahead_by_a_limited_number_and_end_when_the_iterator_is_closed():
    threads, done = threading.active_count(), []
    results = in_order(done.append, range(100), 2)
    next(results)
    deadline = time.monotonic() + 20
    while len(done) < 9 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)  # in which a thread without a limit would do more
    assert sorted(done) == list(range(9))
    results.close()
    assert threading.active_count() == threads and len(done) == 9
