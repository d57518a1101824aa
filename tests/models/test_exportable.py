"""timm's switch for export: which operators a model's call runs, by when the switch is on."""

import pytest
import timm
import torch
from timm.layers import set_exportable
from torch.utils._python_dispatch import TorchDispatchMode

import vilonghorn  # noqa: F401  (registers the models)


class Seen(TorchDispatchMode):
    """The library's own operators among those that run."""

    def __init__(self):
        super().__init__()
        self.ours = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "vilonghorn":
            self.ours.add(str(function))
        return function(*args, **(kwargs or {}))


def run(model):
    torch.manual_seed(1)
    with torch.no_grad(), Seen() as seen:
        return model(torch.randn(2, 3, 64, 64)), seen.ours


@pytest.mark.parametrize("name", ["vilonghorn_nano", "vilonghorn_nano_shared", "vim_nano"])
def test_timms_switch_makes_models_and_calls_of_torchs_operators_alone(name):
    kwargs = dict(img_size=64, depth=2, num_classes=7)
    torch.manual_seed(0)
    usual = timm.create_model(name, **kwargs).eval()
    made_for_export = timm.create_model(name, exportable=True, **kwargs).eval()
    made_for_export.load_state_dict(usual.state_dict())
    expected, ours = run(usual)
    assert ours  # else this test would prove nothing
    with set_exportable(True):
        called, in_call = run(usual)
    made, in_made = run(made_for_export)
    assert in_call == in_made == set()
    for actual in (called, made):
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)
    assert run(usual)[1] == ours  # the switch is off again
