"""The norm module beside torch's own."""

import copy

import pytest
import torch
from torch import nn

from vilonghorn.layers.exportable import make_exportable
from vilonghorn.layers.norm import RMSNorm


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float16, 1e-3)], ids=str)
def test_equals_torchs_module_and_reads_its_state(dtype, tolerance):
    ours, torchs = (make(40, eps=1e-5, dtype=dtype) for make in (RMSNorm, nn.RMSNorm))
    x = torch.randn(3, 7, 40, dtype=dtype)
    torchs.weight.data.normal_()
    ours.load_state_dict(torchs.state_dict())
    for norm in (ours, make_exportable(copy.deepcopy(ours))):
        torch.testing.assert_close(norm(x), torchs(x), rtol=tolerance, atol=tolerance)
        with pytest.raises(ValueError, match="expected the last dimension of x"):
            norm(x[..., :1])


def test_keeps_its_input_and_a_number_a_row_for_backward():
    norm, x, kept = RMSNorm(64), torch.randn(5, 64, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm(x)
    kept = {t.data_ptr(): t.numel() for t in kept}
    assert sorted(kept.values()) == [5, 64, 5 * 64]
