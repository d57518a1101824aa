"""fvcore and thop count what torch's counter counts, once they have our handles."""

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

import vilonghorn  # noqa: F401  (registers the models)
from vilonghorn.layers import Mixer
from vilonghorn.tools.counters import fvcore_handles, thop_ops

NAMES = ["vilonghorn_nano", "vilonghorn_nano_shared", "vim_nano"]


def counted(function, *args) -> float:
    """Multiply-adds by torch's counter."""
    with FlopCounterMode(display=False) as counter:
        function(*args)
    return counter.get_total_flops() / 2


def a_mixer(name: str) -> tuple[Mixer, torch.Tensor]:
    model = timm.create_model(name, img_size=48, depth=1, d_state=5, expand=3).eval()
    return model.blocks[0].mixer, torch.randn(2, 7, 96)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_handle_of_fvcore_counts_a_traced_mixer(name):
    mixer, x = a_mixer(name)
    [(op, handle)] = fvcore_handles().items()
    graph, _ = torch.jit._get_trace_graph(mixer, (x,))
    [node] = [node for node in graph.nodes() if node.kind() == op]
    count = handle(list(node.inputs()), list(node.outputs()))
    projections = 2 * 7 * (96 * 2 * 288 + 288 * 96)
    assert count + projections == counted(mixer, x)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_handle_of_thop_counts_a_mixer(name):
    mixer, x = a_mixer(name)
    expected = counted(mixer, x)
    mixer.total_ops = torch.zeros(1, dtype=torch.float64)
    [(kind, count)] = thop_ops().items()
    count(mixer, (x,), mixer(x))
    assert kind is Mixer and mixer.total_ops.item() == expected


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_fvcore_counts_a_model_as_torch_does(name):
    nn = pytest.importorskip("fvcore.nn", reason="needs fvcore: pip install fvcore")
    model, images = timm.create_model(name, img_size=48).eval(), torch.randn(2, 3, 48, 48)
    analysis = nn.FlopCountAnalysis(model, images).set_op_handle(**fvcore_handles())
    assert analysis.total() == counted(model, images)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_thop_counts_a_model_as_torch_does(name):
    thop = pytest.importorskip("thop", reason="needs thop: pip install thop")
    model, images = timm.create_model(name, img_size=48).eval(), torch.randn(2, 3, 48, 48)
    expected = counted(model, images)
    assert thop.profile(model, (images,), custom_ops=thop_ops(), verbose=False)[0] == expected
