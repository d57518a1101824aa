"""The exported model has the checkpoint's weights, classes and image size."""

import timm
import torch

from vilonghorn.export import load_for_export


def test_a_checkpoint_fits_another_image_size_and_a_state_dict_tells_its_classes(checkpoint, small, images, tmp_path):
    resized, expected = load_for_export("vilonghorn_nano", checkpoint[0], [48, 32]), small()
    expected.set_input_size((48, 32))
    batch = images(2, 3, 48, 32)
    torch.testing.assert_close(resized(batch), expected(batch), rtol=0, atol=1e-6)
    full = timm.create_model("vilonghorn_nano", num_classes=3).eval()
    torch.save(full.state_dict(), tmp_path / "plain.pth")
    batch = images(1, 3, 224, 224)
    loaded = load_for_export("vilonghorn_nano", tmp_path / "plain.pth")
    torch.testing.assert_close(loaded(batch), full(batch).detach(), rtol=0, atol=1e-6)
