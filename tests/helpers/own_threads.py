"""Run by test_scan_operator.py in a process of its own: the pool of the native library, in threads and after a fork."""

import multiprocessing
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from vilonghorn.ops import scan
from vilonghorn.ops.backends import cpu as native

assert native.library.vl_threading() == b"std"
torch.set_num_threads(4)
generator = torch.Generator().manual_seed(0)
x, dt = torch.randn(2, 2, 8, 50, 64, generator=generator)
k, q = torch.randn(2, 2, 8, 50, 16, generator=generator)


def run(_: int = 0) -> torch.Tensor:
    return scan(x, dt, k, q, reverse=(False, True))


expected = run()
with ThreadPoolExecutor(4) as callers:
    assert all(torch.equal(y, expected) for y in callers.map(run, range(200)))
# compared by numpy: torch's own operators hang in a forked child once OpenMP has run in its parent
same = lambda: sys.exit(not (run().numpy() == expected.numpy()).all())  # noqa: E731
child = multiprocessing.get_context("fork").Process(target=same, daemon=True)
child.start()
child.join(60)
assert child.exitcode == 0, child.exitcode
