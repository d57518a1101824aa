"""examples/lite0.py: weights in the order of the package get timm's names."""

import pytest
import timm
import torch


@pytest.fixture
def lite0(script):
    return script("examples/lite0")


def test_the_file_is_loaded_by_timm_and_has_every_weight(lite0, tmp_path, monkeypatch):
    model = timm.create_model(lite0.NAME).eval()
    given = {f"_layer.{i}.{name.split('.')[-1]}": value for i, (name, value) in enumerate(model.state_dict().items())}
    given = {"_conv_stem.weight": given.pop("_layer.0.weight")} | given
    torch.save(given, tmp_path / "lite0.pth")
    output = tmp_path / "lite0.safetensors"
    monkeypatch.setattr("sys.argv", ["lite0.py", str(tmp_path / "lite0.pth"), str(output)])
    lite0.main()
    loaded = timm.create_model(lite0.NAME, pretrained=True, pretrained_cfg_overlay=dict(file=str(output))).eval()
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(loaded(x), model(x))


def test_weights_of_another_model_are_refused(lite0):
    with pytest.raises(ValueError, match="expected the 247 weights of efficientnet_lite_pytorch"):
        lite0.renamed(timm.create_model("mobilenetv4_conv_small").state_dict())
