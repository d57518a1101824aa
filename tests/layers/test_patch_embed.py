"""Patches of any size, stride and padding, and the class token in the middle."""

import pytest
import timm
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from vilonghorn.layers import PatchEmbed, class_token_first, insert_class_token


@given(patches=st.integers(1, 40))
def test_the_class_token_is_at_half_the_patches_and_comes_out_first(patches):
    tokens = torch.arange(2 * patches * 3.0).reshape(2, patches, 3)
    class_token = torch.full((1, 1, 3), -1.0)
    scanned = insert_class_token(tokens, class_token)
    assert scanned.shape == (2, patches + 1, 3)
    assert torch.equal(scanned[:, patches // 2], class_token[0].expand(2, 3))
    assert torch.equal(class_token_first(scanned), torch.cat([class_token.expand(2, 1, 3), tokens], 1))


def test_without_overlap_it_is_timms_patch_embedding():
    ours, theirs = PatchEmbed(32, 8, embed_dim=12), timm.layers.PatchEmbed(32, 8, embed_dim=12)
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(ours(images), theirs(images))
    assert ours.grid_size == theirs.grid_size and ours.num_patches == theirs.num_patches
    assert ours.feat_ratio() == theirs.feat_ratio() == 8


@given(height=st.integers(1, 40), width=st.integers(1, 40), patch=st.integers(1, 9), stride=st.integers(1, 9))
def test_padding_covers_every_pixel_and_the_grid_is_known_before(height, width, patch, stride):
    assume(stride <= patch)
    embed = PatchEmbed((height, width), patch, stride, in_chans=1, embed_dim=1, dynamic_img_pad=True)
    torch.nn.init.ones_(embed.proj.weight)
    torch.nn.init.zeros_(embed.proj.bias)
    tokens = embed(torch.ones(1, 1, height, width))
    assert tokens.shape[1] == embed.num_patches
    corner = tokens.reshape(embed.grid_size)[-1, -1]
    assert corner > 0  # the last patch still sees image
    reached = [(n - 1) * stride + patch for n in embed.grid_size]
    assert reached[0] >= height and reached[1] >= width


def test_sizes_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ValueError, match="30x32 is not a whole number of 8x8 patches"):
        PatchEmbed((30, 32), 8)
    with pytest.raises(ValueError, match=r"stride is \(9, 9\), expected 1 to the patch size \(8, 8\)"):
        PatchEmbed(32, 8, 9)
    with pytest.raises(AssertionError, match="Input height .40. doesn't match model .32."):
        PatchEmbed(32, 8)(torch.randn(1, 3, 40, 32))
    with pytest.raises(ValueError, match="33x32 is not a whole number"):
        PatchEmbed(32, 8, strict_img_size=False)(torch.randn(1, 3, 33, 32))
    with pytest.raises(ValueError, match="4x32 is not a whole number"):
        PatchEmbed(32, 8, strict_img_size=False)(torch.randn(1, 3, 4, 32))


def test_set_input_size_resamples_the_filters_and_keeps_what_they_see():
    embed = PatchEmbed(32, 8, embed_dim=6).requires_grad_(False)
    with pytest.raises(ValueError, match="30x30"):  # and changes nothing
        embed.set_input_size(img_size=30, patch_size=4)
    assert (embed.img_size, embed.patch_size, embed.stride) == ((32, 32), (8, 8), (8, 8))
    flat = torch.full((1, 3, 32, 32), 0.5)
    before = embed(flat)[0, 0]
    embed.set_input_size(img_size=(64, 48), patch_size=16)
    assert embed.grid_size == (4, 3) and embed.stride == (16, 16)
    assert not embed.proj.weight.requires_grad
    torch.testing.assert_close(embed(torch.full((1, 3, 64, 48), 0.5))[0, 0], before, rtol=1e-3, atol=1e-3)
