"""Patches of any size, stride and padding, and the class token in the middle."""

import pytest
import timm
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from vilonghorn.layers import PatchEmbed, insert_class_token, prefix_first


@given(patches=st.integers(1, 40))
def test_the_class_token_is_at_half_the_patches_and_comes_out_first(patches):
    tokens = torch.arange(2 * patches * 3.0).reshape(2, patches, 3)
    class_token = torch.full((1, 1, 3), -1.0)
    scanned = insert_class_token(tokens, class_token)
    assert scanned.shape == (2, patches + 1, 3)
    assert torch.equal(scanned[:, patches // 2], class_token[0].expand(2, 3))
    assert torch.equal(prefix_first(scanned), torch.cat([class_token.expand(2, 1, 3), tokens], 1))


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


def test_overlapping_patches_make_vims_stride_8_grid():
    embed = PatchEmbed(224, 16, 8, embed_dim=4, device="meta")
    assert embed.grid_size == (27, 27)
    assert embed(torch.empty(1, 3, 224, 224, device="meta")).shape == (1, 729, 4)
    assert embed.feat_ratio() == 8


def test_sizes_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ValueError, match="30x32 is not a whole number of 8x8 patches"):
        PatchEmbed((30, 32), 8)
    with pytest.raises(ValueError, match=r"stride is \(9, 9\), expected 1 to the patch size \(8, 8\)"):
        PatchEmbed(32, 8, 9)
    with pytest.raises(ValueError, match="image is 40x32, expected 32x32"):
        PatchEmbed(32, 8)(torch.randn(1, 3, 40, 32))
    with pytest.raises(ValueError, match="33x32 is not a whole number"):
        PatchEmbed(32, 8, strict_img_size=False)(torch.randn(1, 3, 33, 32))
    with pytest.raises(ValueError, match="4x32 is not a whole number"):
        PatchEmbed(32, 8, strict_img_size=False)(torch.randn(1, 3, 4, 32))


@pytest.mark.parametrize(
    ("images", "error", "words"),
    [
        (
            torch.zeros(2, 32, 32, 3),
            ValueError,
            r"channels come first.*permute\(0, 3, 1, 2\).*shape is \[2, 32, 32, 3\]",
        ),
        (torch.zeros(3, 32, 32), ValueError, r"shape \[3, 32, 32\].*a batch of one.*images\[None\]"),
        (torch.zeros(2, 1, 32, 32), ValueError, "images have 1 channels, expected 3; give in_chans=1"),
        (torch.zeros(0, 3, 32, 32), ValueError, r"shape \[0, 3, 32, 32\], expected at least one image"),
        (torch.zeros(2, 3, 0, 8), ValueError, r"shape \[2, 3, 0, 8\], expected at least one image"),
        (torch.zeros(2, 3, 32, 32).byte(), TypeError, r"torch.uint8.*convert to float in \[0, 1\] and normalise"),
        (torch.zeros(2, 3, 32, 32).bool(), TypeError, "torch.bool"),
        (torch.zeros(2, 3, 32, 32).double(), TypeError, r"torch.float64.*torch.float32.*\.float\(\).*\.double\(\)"),
    ],
)
def test_images_of_another_layout_or_dtype_are_refused_with_what_to_do(images, error, words):
    with pytest.raises(error, match=words):
        PatchEmbed(32, 8)(images)


def test_images_have_the_dtype_of_the_weights():
    images = torch.randn(2, 3, 32, 32)
    for dtype in (torch.float64, torch.bfloat16):
        assert PatchEmbed(32, 8, dtype=dtype)(images.to(dtype)).dtype == dtype
    with pytest.raises(TypeError, match="images are torch.float32 and the weights of the model torch.float64"):
        PatchEmbed(32, 8).double()(images)
    with torch.autocast("cpu", torch.bfloat16):
        assert PatchEmbed(32, 8)(images).dtype == PatchEmbed(32, 8)(images.bfloat16()).dtype == torch.bfloat16


def test_set_input_size_resamples_the_filters_and_keeps_what_they_see():
    embed = PatchEmbed(32, 8, embed_dim=6).requires_grad_(False)
    flat = torch.full((1, 3, 32, 32), 0.5)
    before = embed(flat)[0, 0]
    embed.set_input_size(img_size=(64, 48), patch_size=16)
    assert embed.grid_size == (4, 3) and embed.stride == (16, 16)
    assert not embed.proj.weight.requires_grad
    torch.testing.assert_close(embed(torch.full((1, 3, 64, 48), 0.5))[0, 0], before, rtol=1e-3, atol=1e-3)


def test_a_refused_input_size_leaves_the_embedding_as_it_was():
    embed = PatchEmbed(32, 8, embed_dim=6)
    with pytest.raises(ValueError, match="30x30"):
        embed.set_input_size(img_size=30, patch_size=4)
    assert embed(torch.randn(1, 3, 32, 32)).shape == (1, 16, 6)
    assert (embed.img_size, embed.patch_size, embed.stride) == ((32, 32), (8, 8), (8, 8))
