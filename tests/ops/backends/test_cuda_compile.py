"""The CUDA kernels compile to what was intended: states in registers, few instructions a step. Needs nvcc, not a GPU.

Run with -s to read what each kernel uses; `python -m vilonghorn.bench.kernels` keeps it for docs/performance.md.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from vilonghorn.bench import compile_cuda, sass

if compile_cuda.nvcc() is None:
    pytest.skip("nvcc is not installed", allow_module_level=True)
if sass.cuobjdump() is None:
    pytest.skip("no cuobjdump: neither the CUDA toolkit's nor Triton's", allow_module_level=True)

LIMITS = {
    "forward": dict(longhorn=130, longhorn_exact=120, mamba=165),
    "backward": dict(longhorn=410, longhorn_exact=350, mamba=550),
}


@pytest.fixture(scope="module")
def compilations():
    """A row for each kernel of each architecture, compiled side by side."""
    with ThreadPoolExecutor(2) as pool:
        yield {a: pool.submit(compile_cuda.reports, a) for a in compile_cuda.ARCHITECTURES}


@pytest.mark.parametrize("architecture", compile_cuda.ARCHITECTURES)
def test_no_kernel_spills_and_a_step_takes_no_more_instructions_than_it_should(architecture, compilations):
    rows = compilations[architecture].result()
    # Three rules: both ways for three types up to 16 states and one above, a split's summaries for three, its joins.
    assert len(rows) == 3 * (2 * 4 + 3 + 1)
    counted = [row for row in rows if "instructions" in row]
    assert len(counted) == 3 * 2 * 3
    for row in rows:
        print(row)
        spilled = max(row["stack"], row["local"], row["spilled"] // 2)  # what is spilled is stored, then loaded
        assert spilled <= (64 if row["kernel"] == "backward" else 0), row
    for row in counted:
        assert row["instructions"] <= LIMITS[row["kernel"]][row["rule"]], row
