"""The model of a run: its arguments, its initial weights, and what is refused."""

import re
import warnings

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import DropPath
from toy_run import toy_config, toy_trainer

from vilonghorn.engine.model_setup import check_model, model_from_config


@pytest.mark.parametrize(("rate", "expected"), [("0", 0.0), ("0.2", 0.2), ("null", 0.1)])
def test_the_rate_of_stochastic_depth_is_the_configured_one_or_else_the_models_default(tmp_path, rate, expected):
    kwargs = "{embed_dim: 24, depths: [2, 2], num_heads: [2, 2], window_size: 4}"
    model = ["--model.name=swin_tiny_patch4_window7_224", f"--model.kwargs={kwargs}", f"--model.drop_path={rate}"]
    built = model_from_config(toy_config(tmp_path, *model, "--data.image_size=32"), 4)
    rates = [module.drop_prob for module in built.modules() if isinstance(module, DropPath)]
    assert max(rates, default=0.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("kwargs={embed_dim: 32, num_heads: 0}", "ZeroDivisionError"),
        ("kwargs={global_pool: nonsense}", "global_pool.*nonsense"),
        ("kwargs={horns: 2}", "horns"),
        ("name=vit_tiny_patch16_224.mine", "tag .mine."),
    ],
)
def test_what_the_construction_raises_becomes_a_sentence(tmp_path, option, words):
    with pytest.raises(ValueError, match=f"timm cannot make vit_tiny_patch16_224.*{words}") as raised:
        model_from_config(toy_config(tmp_path, f"--model.{option}"), 4)
    assert "\n" not in str(raised.value)


def test_a_model_that_could_not_be_made_in_time_and_weights_without_a_head_are_refused(tmp_path):
    with pytest.raises(ValueError, match="gives vit_tiny_patch16_224 depth=100000000, expected at most 1,000"):
        model_from_config(toy_config(tmp_path, "--model.kwargs={depth: 100000000}"), 4)
    save_file({"head.weight": torch.tensor(1.0)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="x.safetensors, whose classifier is a single number"):
        model_from_config(toy_config(tmp_path, f"--model.weights={tmp_path}/x.safetensors"), 4)


def test_weights_of_another_model_are_refused_and_what_is_loaded_is_said(tmp_path, capsys):
    vit = timm.create_model("vit_tiny_patch16_224", patch_size=4, depth=2, embed_dim=32, num_heads=2, img_size=16)
    save_file(vit.state_dict(), tmp_path / "vit.safetensors")
    option = f"--model.weights={tmp_path}/vit.safetensors"
    model = model_from_config(toy_config(tmp_path, option), 4)
    loaded = f"model.weights: 30 of 32 tensors are from {tmp_path}/vit.safetensors; new: head.weight, head.bias\n"
    assert capsys.readouterr().out == loaded
    assert torch.equal(model.blocks[1].mlp.fc1.weight, vit.blocks[1].mlp.fc1.weight)
    assert not model.head.weight.any() and not model.head.bias.any()
    assert model_from_config(toy_config(tmp_path, option), 1000).head.weight.equal(vit.head.weight)  # as many classes
    for other in ("resnet10t", "efficientnet_b0"):
        with pytest.raises(ValueError, match=f"none of its tensors fits {other}: give weights of {other}"):
            model_from_config(toy_config(tmp_path, option, f"--model.name={other}", "--model.kwargs={}"), 4)
    save_file({f"model.{key}": value for key, value in vit.state_dict().items()}, tmp_path / "vit.safetensors")
    with pytest.raises(
        ValueError, match=r"has cls_token, pos_embed, .*, \.\.\.; these have model\.\w+"
    ):  # in a wrapper
        model_from_config(toy_config(tmp_path, option), 4)


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("resnet18", "{in_chans: 1}", r"\(RuntimeError: .*1 channels"),
        ("resnet18", "{global_pool: ''}", r"\(RuntimeError: .*shapes"),
        ("deit_tiny_patch16_224", "{global_pool: ''}", r"but into \(2, 5, 4\)"),
        ("resnet18", "{features_only: true}", "into a list"),
    ],
)
def test_a_model_that_does_not_score_classes_is_refused(tmp_path, name, kwargs, words):
    config = toy_config(tmp_path, f"--model.name={name}", f"--model.kwargs={kwargs}", "--data.image_size=32")
    model = model_from_config(config, 4)
    with pytest.raises(ValueError, match=rf"{name} .*images \(2, 3, 32, 32\) into scores \(2, 4\).*{words}"):
        check_model(config, model, 4, torch.device("cpu"))
    assert model.training


def test_a_batch_of_one_image_is_refused_where_batch_norm_needs_more(tmp_path):
    options = ("--data.batch_size=1", "--task.mixup=0", "--task.cutmix=0", "--model.kwargs={}")
    config = toy_config(tmp_path, *options, "--model.name=regnetx_002", "--data.image_size=32")
    model = model_from_config(config, 4)
    before = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(ValueError, match="regnetx_002 cannot train on one image .*: raise data.batch_size"):
        check_model(config, model, 4, torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values()))
    config.data.image_size = 64  # 2 x 2 values for each channel
    check_model(config, model, 4, torch.device("cpu"))


@pytest.mark.parametrize(("pad", "wrong"), [("false", "32"), ("true", None)])
def test_a_model_that_does_not_take_a_size_on_the_way_to_the_last_is_refused(tmp_path, pad, wrong):
    kwargs = "{patch_size: 14, depth: 1, embed_dim: 32, num_heads: 2, dynamic_img_size: true, dynamic_img_pad: PAD}"
    growing = ("--augmentation.start_size=28", "--augmentation.ramp=[1, 4]", "--data.image_size=56")
    option = f"--model.kwargs={kwargs.replace('PAD', pad)}"
    config = toy_config(tmp_path, option, *growing, "--schedule.epochs=6")
    model = model_from_config(config, 4)
    if wrong is None:
        check_model(config, model, 4, torch.device("cpu"))
    else:
        with pytest.raises(ValueError, match=rf"images \(2, 3, {wrong}, {wrong}\).*augmentation.start_size"):
            check_model(config, model, 4, torch.device("cpu"))
    config = toy_config(tmp_path, option, *growing[2:], "--augmentation.sizes=[32, 56]")
    if wrong is not None:
        with pytest.raises(ValueError, match=r"images \(2, 3, 32, 32\).*augmentation.sizes"):
            check_model(config, model, 4, torch.device("cpu"))


@pytest.mark.parametrize("name", ["vilonghorn_nano", "vilonghorn_nano_exact"])
def test_weights_of_vim_start_a_model_of_longhorn_and_what_is_left_is_said(name, tmp_path, capsys):
    kwargs = dict(patch_size=4, depth=2, embed_dim=32)
    vim = timm.create_model("vim_nano", img_size=16, num_classes=4, **kwargs)
    save_file(vim.state_dict(), tmp_path / "vim.safetensors")
    options = (f"--model.weights={tmp_path}/vim.safetensors", f"--model.name={name}", f"--model.kwargs={kwargs}")
    model = model_from_config(toy_config(tmp_path, *options), 4)
    said = "tensors are from .*vim.safetensors; of Mamba's rule, B is k, C is q .*; A_log is left\n"
    assert re.search(said, capsys.readouterr().out)
    assert torch.equal(model.blocks[1].mixer.dt_bias, vim.blocks[1].mixer.dt_bias)


def test_images_that_are_normalised_in_another_way_than_those_of_the_weights_are_named(tmp_path):
    trained = tmp_path / "run"
    toy_trainer(trained, "--data.mean=[0.5, 0.4, 0.3]", "--schedule.epochs=2").fit()
    sentence = f"data.mean is [0.485, 0.456, 0.406], but the weights of {trained} were trained with [0.5, 0.4, 0.3]"
    with pytest.warns(UserWarning, match=f"^{re.escape(sentence)}: give --data.mean '"):
        model_from_config(toy_config(tmp_path, f"--model.weights={trained}"), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model_from_config(toy_config(tmp_path, f"--model.weights={trained}", "--data.mean=[0.5, 0.4, 0.3]"), 4)


def test_auto_takes_the_weights_of_the_package_and_else_random_ones_and_says_so(tmp_path, capsys):
    options = ["--model.kwargs={}", "--model.drop_path=null", "--model.weights=auto"]
    nano = toy_config(tmp_path, "--model.name=vilonghornv2_nano", *options)
    with pytest.warns(UserWarning, match=r"data.mean is .*trained with \[0.5, 0.5, 0.5\]: give --data.mean"):
        model_from_config(nano, 4)
    nano.data.mean = nano.data.std = (0.5, 0.5, 0.5)
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = model_from_config(nano, 4)
    wrong = toy_config(tmp_path, "--model.name=vilonghornv2_nano", *options, "--model.kwargs={rule: mamba}")
    with pytest.raises(ValueError, match="num_heads is 4, expected None: rule 'mamba' has no heads.$"):
        model_from_config(wrong, 4)  # without a hint on model.weights, which are not the cause
    found = timm.create_model("vilonghornv2_nano", pretrained=True, num_classes=4)
    assert torch.equal(model.stem.conv1.weight, found.stem.conv1.weight)
    assert "tensors are from" in (said := capsys.readouterr().out) and said.count("\n") == 1
    model_from_config(toy_config(tmp_path, "--model.name=vilonghorn_nano", *options), 4)
    said = capsys.readouterr().out
    assert said == "model.weights: random, because no weights of vilonghorn_nano are on this machine\n"
