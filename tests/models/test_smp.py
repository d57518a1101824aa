"""What segmentation_models_pytorch takes of our models: sizes and decoders."""

import pytest
import torch

import vilonghorn  # noqa: F401  (registers the models)

smp = pytest.importorskip("segmentation_models_pytorch", reason="needs smp: pip install vilonghorn[downstream]")


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
    four, channels = dict(encoder_depth=4), dict(encoder_depth=4, decoder_channels=(32, 16, 8, 8))
    nano = dict.fromkeys(("unet", "unetplusplus", "manet"), channels) | dict.fromkeys(("linknet", "upernet"), four)
    for decoder, options in (nano | dict(segformer=four, pspnet={})).items():
        model = smp.create_model(decoder, "tu-vilonghornv2_nano", encoder_weights=None, classes=3, **options).eval()
        assert model(batch).shape == (1, 3, 128, 160), decoder
