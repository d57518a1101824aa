"""ViTDet's feature pyramid against its equations in float64."""

import pytest
import torch
import torch.nn.functional as F

from vilonghorn.layers import SimpleFeaturePyramid


@torch.no_grad()
def test_the_maps_are_those_of_vitdet():
    torch.manual_seed(0)
    pyramid = SimpleFeaturePyramid(32, 24, stride=16).double()
    x = torch.randn(2, 32, 6, 4, dtype=torch.float64)

    def norm(x, p):
        x = x - x.mean(1, keepdim=True)
        x = x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt()
        return x * p["weight"][:, None, None] + p["bias"][:, None, None]

    def up(x, p):  # a transposed convolution of kernel and stride 2: each position becomes 2 x 2, by a matrix
        y = torch.einsum("bchw,cdij->bdhiwj", x, p["weight"]).reshape(len(x), -1, 2 * x.shape[2], 2 * x.shape[3])
        return y + p["bias"][:, None, None]

    def down(x):
        return x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).amax((3, 5))

    before = {
        "0": lambda x, p: up(F.gelu(norm(up(x, p[0]), p[1])), p[3]),
        "1": lambda x, p: up(x, p[0]),
        "2": lambda x, p: x,
        "3": lambda x, p: down(x),
    }
    maps = pyramid(x)
    assert list(maps) == list(before)
    for name, level in pyramid.levels.items():
        p = [dict(layer.named_parameters()) for layer in level]
        y = before[name](x, p)
        y = norm(F.conv2d(y, p[-4]["weight"]), p[-3])
        y = norm(F.conv2d(y, p[-2]["weight"], padding=1), p[-1])
        torch.testing.assert_close(maps[name], y)


@torch.no_grad()
def test_an_odd_map_is_pooled_with_a_last_cell_of_fewer_positions():
    x = -torch.rand(2, 8, 5, 3) - 1  # below the zeros that a padding could bring
    pooled = SimpleFeaturePyramid(8, 4, stride=16, strides=(64,)).levels["0"][:2](x)
    assert torch.equal(pooled, F.max_pool2d(x, 4, ceil_mode=True))


@torch.no_grad()
def test_what_is_padding_is_cut_off_every_map():
    pyramid, x = SimpleFeaturePyramid(8, 4, stride=16), torch.randn(2, 8, 3, 4)
    whole, cut = pyramid(x), pyramid(x, (48 - 37, 64 - 50))
    for name, (h, w) in {"0": (10, 13), "1": (5, 7), "2": (3, 4), "3": (2, 2)}.items():
        assert torch.equal(cut[name], whole[name][:, :, :h, :w]) and cut[name].shape[2:] == (h, w)


@pytest.mark.parametrize("stride", [12, 6])
def test_strides_that_halving_does_not_reach_are_refused(stride):
    with pytest.raises(ValueError, match=f"strides are {stride} and 4, expected a ratio"):
        SimpleFeaturePyramid(8, 4, stride=stride)
