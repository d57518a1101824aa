"""Cases of the convolution for the tests of its GPU kernels, which an emulator or a GPU runs."""

from functools import partial

import torch
from oracle import compare, conv_inputs, convolution

from vilonghorn.ops import conv_silu

# (G, B, L, D, K) and the reverse flags: pairs of directions and single ones, both kinds first, lengths below the taps
# and around the segments, channels that are not a multiple of a vector
CASES = [
    ((1, 1, 1, 1, 4), (False,)),
    ((2, 2, 3, 5, 4), (False, True)),
    ((2, 1, 2, 8, 4), (True, False)),
    ((2, 3, 33, 40, 4), (True, False)),
    ((1, 2, 21, 24, 4), (True,)),
    ((1, 1, 9, 12, 4), (False,)),
    ((2, 1, 19, 6, 4), (True, False)),
    ((2, 1, 17, 33, 4), (False, True)),
]
# Relative errors: of rounding the result for the short types
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def check(backend: str | None, shape, reverse, dtype=torch.float32, device: str = "cpu") -> None:
    """Values and gradients agree with torch's convolution in float64."""
    run = partial(conv_silu, backend=backend)
    compare(run, conv_inputs(*shape, dtype), TOLERANCE[dtype], device, truth=convolution, reverse=reverse)
