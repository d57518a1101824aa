"""Threads work ahead, but only so far, and a closed iterator leaves no thread behind."""

import threading
import time

from vilonghorn.data.threads import in_order


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
