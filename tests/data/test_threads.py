"""Threads work ahead, but only so far; results and errors come in order; a closed iterator leaves no thread behind."""

import threading
import time

import pytest

from vilonghorn.data.threads import in_order


def test_results_and_errors_come_in_order_whatever_takes_longer():
    def slow_at_first(item):
        time.sleep(0.05 if item < 2 else 0)
        return 10 // (4 - item)

    results = in_order(slow_at_first, range(20), 3)
    assert [next(results) for _ in range(4)] == [2, 3, 5, 10]
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
