"""What segmentation_models_pytorch takes of our models: sizes and decoders."""

import pytest
import torch

import vilonghorn  # noqa: F401  (registers the models)

smp = pytest.importorskip("segmentation_models_pytorch", reason="needs smp: pip install vilonghorn[downstream]")
SMALL = dict(encoder_weights=None, classes=3, embed_dim=32)


def maps(decoder, **kwargs):
    pyramid = SMALL | dict(pyramid_channels=16) | kwargs
    return smp.create_model(decoder, "tu-vilonghorn_nano_sfp", **pyramid).eval()


def dpt(**kwargs):
    sizes = dict(decoder_intermediate_channels=(8,) * 4, decoder_fusion_channels=8, num_classes=0)
    return smp.create_model("dpt", "tu-vilonghorn_nano", dynamic_img_size=True, **SMALL, **sizes, **kwargs).eval()


@torch.no_grad()
def test_decoders_of_maps_take_multiples_of_32_or_of_2_to_their_depth_and_unet_any_size():
    for depth, side in ((5, 32), (3, 8)):
        linknet = maps("linknet", encoder_depth=depth)
        height, width = 64 + side, 128 - side
        assert linknet(torch.randn(1, 3, height, width)).shape == (1, 3, height, width)
        with pytest.raises(RuntimeError, match=f"Expected image height and width divisible by {side}"):
            linknet(torch.randn(1, 3, 64, 64 + side // 2))
    assert maps("unet")(torch.randn(1, 3, 70, 90)).shape == (1, 3, 70, 90)


@torch.no_grad()
def test_decoders_of_maps_take_a_hierarchy():
    batch, hierarchy = torch.randn(1, 3, 128, 160), "tu-vilonghornv2_tiny"
    decoders = ("unet", "unetplusplus", "manet", "linknet", "fpn", "pspnet", "upernet", "segformer")
    for decoder in decoders:
        model = smp.create_model(decoder, hierarchy, encoder_weights=None, classes=3).eval()
        assert model(batch).shape == (1, 3, 128, 160), decoder
    pan = smp.create_model("pan", hierarchy, encoder_weights=None, classes=3, encoder_output_stride=32).eval()
    assert pan(torch.randn(1, 3, 256, 256)).shape == (1, 3, 256, 256)
    for decoder in ("deeplabv3", "deeplabv3plus"):
        with pytest.raises(ValueError, match="output_stride is .*, expected 32: vilonghornv2_tiny does not dilate"):
            smp.create_model(decoder, hierarchy, encoder_weights=None)
    nano = dict(encoder_weights=None, classes=3, encoder_depth=4, decoder_channels=(32, 16, 8, 8))
    assert smp.create_model("unet", "tu-vilonghornv2_nano", **nano).eval()(batch).shape == (1, 3, 128, 160)


@torch.no_grad()
def test_dpt_takes_an_even_number_of_patches_in_height_and_width():
    for patch_size, side in ((16, 32), (8, 32)):
        model = dpt(patch_size=patch_size)
        assert model(torch.randn(1, 3, 2 * side, 3 * side)).shape == (1, 3, 2 * side, 3 * side)
        with pytest.raises(RuntimeError, match="The size of tensor a .* must match the size of tensor b"):
            model(torch.randn(1, 3, 2 * side, 2 * side + patch_size))
