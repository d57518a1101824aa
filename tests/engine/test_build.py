"""The parts of a run, as the configuration asks for them."""

import math
import re
import warnings

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import DropPath
from toy_run import toy_config

from vilonghorn.engine import Config, build
from vilonghorn.engine.tasks import Classification


def rates(config, updates_per_epoch):
    """The learning rate of every update."""
    model = torch.nn.Linear(2, 2)
    optimizer = build.build_optimizer(config, model)
    scheduler = build.build_scheduler(config, optimizer, updates_per_epoch)
    values = []
    for update in range(config.schedule.epochs * updates_per_epoch):
        scheduler.step_update(update)
        values.append(optimizer.param_groups[0]["lr"])
    return values


def test_the_rate_warms_up_linearly_and_then_follows_half_a_cosine():
    config = Config()
    config.schedule.epochs, config.schedule.warmup_epochs = 10, 2
    values = rates(config, 7)
    low, peak, floor = config.schedule.warmup_lr, config.optimizer.lr, config.schedule.min_lr
    assert len(values) == 70 and values[0] == low
    warm, cool = range(14), range(14, 70)
    assert values[:14] == pytest.approx([low + (peak - low) * t / 14 for t in warm])
    assert values[14:] == pytest.approx([floor + (peak - floor) * (1 + math.cos(math.pi * t / 70)) / 2 for t in cool])


def test_vectors_and_the_models_own_exceptions_take_no_weight_decay(tmp_path):
    config = toy_config(tmp_path, "--optimizer.weight_decay=0.07")
    model = build.build_model(config, 4)
    groups = build.build_optimizer(config, model).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    exempt = {name for name, p in model.named_parameters() if p.ndim <= 1 or name in model.no_weight_decay()}
    assert {"pos_embed", "cls_token", "norm.weight"} <= exempt
    for name, parameter in model.named_parameters():
        assert decays[id(parameter)] == (0 if name in exempt else config.optimizer.weight_decay), name


@pytest.mark.parametrize(("name", "words"), [("adan", "IndexError"), ("adahessian", "second derivatives")])
def test_an_optimizer_that_cannot_follow_these_gradients_is_refused_in_one_sentence(tmp_path, name, words):
    config = toy_config(tmp_path, f"--optimizer.name={name}")
    with pytest.raises(ValueError, match=f"optimizer.name is '{name}'.*{words}") as raised:
        build.build_optimizer(config, torch.nn.Linear(2, 2))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("rate", "expected"), [("0", 0.0), ("0.2", 0.2), ("null", 0.1)])
def test_the_rate_of_stochastic_depth_is_the_configured_one_or_else_the_models_default(tmp_path, rate, expected):
    kwargs = "{embed_dim: 24, depths: [2, 2], num_heads: [2, 2], window_size: 4}"
    model = ["--model.name=swin_tiny_patch4_window7_224", f"--model.kwargs={kwargs}", f"--model.drop_path={rate}"]
    built = build.build_model(toy_config(tmp_path, *model, "--data.image_size=32"), 4)
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
        build.build_model(toy_config(tmp_path, f"--model.{option}"), 4)
    assert "\n" not in str(raised.value)


def test_a_model_that_could_not_be_made_in_time_and_weights_without_a_head_are_refused(tmp_path):
    with pytest.raises(ValueError, match="gives vit_tiny_patch16_224 depth=100000000, expected at most 1,000"):
        build.build_model(toy_config(tmp_path, "--model.kwargs={depth: 100000000}"), 4)
    save_file({"head.weight": torch.tensor(1.0)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="x.safetensors, whose classifier is a single number"):
        build.build_model(toy_config(tmp_path, f"--model.weights={tmp_path}/x.safetensors"), 4)


def test_weights_of_another_model_are_refused_and_what_is_loaded_is_said(tmp_path, capsys):
    vit = timm.create_model("vit_tiny_patch16_224", patch_size=4, depth=2, embed_dim=32, num_heads=2, img_size=16)
    save_file(vit.state_dict(), tmp_path / "vit.safetensors")
    option = f"--model.weights={tmp_path}/vit.safetensors"
    model = build.build_model(toy_config(tmp_path, option), 4)
    loaded = f"model.weights: 30 of 32 tensors are from {tmp_path}/vit.safetensors; random: head.weight, head.bias\n"
    assert capsys.readouterr().out == loaded
    assert torch.equal(model.blocks[1].mlp.fc1.weight, vit.blocks[1].mlp.fc1.weight)
    for other in ("resnet10t", "efficientnet_b0"):
        with pytest.raises(ValueError, match=f"none of its tensors fits {other}: give weights of {other}"):
            build.build_model(toy_config(tmp_path, option, f"--model.name={other}", "--model.kwargs={}"), 4)


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
    model = build.build_model(config, 4)
    with pytest.raises(ValueError, match=rf"{name} .*images \(2, 3, 32, 32\) into scores \(2, 4\).*{words}"):
        build.check_model(config, model, 4, torch.device("cpu"))
    assert model.training


def test_a_batch_of_one_image_is_refused_where_batch_norm_needs_more(tmp_path):
    options = ("--data.batch_size=1", "--augmentation.mixup=0", "--augmentation.cutmix=0", "--model.kwargs={}")
    config = toy_config(tmp_path, *options, "--model.name=regnetx_002", "--data.image_size=32")
    model = build.build_model(config, 4)
    before = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(ValueError, match="regnetx_002 cannot train on one image .*: raise data.batch_size"):
        build.check_model(config, model, 4, torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values()))
    config.data.image_size = 64  # 2 x 2 values for each channel
    build.check_model(config, model, 4, torch.device("cpu"))


@pytest.mark.parametrize(("pad", "wrong"), [("false", "32"), ("true", None)])
def test_a_model_that_does_not_take_a_size_on_the_way_to_the_last_is_refused(tmp_path, pad, wrong):
    kwargs = "{patch_size: 14, depth: 1, embed_dim: 32, num_heads: 2, dynamic_img_size: true, dynamic_img_pad: PAD}"
    growing = ("--augmentation.start_size=28", "--augmentation.ramp=[1, 4]", "--data.image_size=56")
    config = toy_config(tmp_path, f"--model.kwargs={kwargs.replace('PAD', pad)}", *growing, "--schedule.epochs=6")
    model = build.build_model(config, 4)
    if wrong is None:
        build.check_model(config, model, 4, torch.device("cpu"))
    else:
        with pytest.raises(ValueError, match=rf"images \(2, 3, {wrong}, {wrong}\).*augmentation.start_size"):
            build.check_model(config, model, 4, torch.device("cpu"))
    config = toy_config(
        tmp_path, f"--model.kwargs={kwargs.replace('PAD', pad)}", *growing[2:], "--augmentation.sizes=[32, 56]"
    )
    if wrong is not None:
        with pytest.raises(ValueError, match=r"images \(2, 3, 32, 32\).*augmentation.sizes"):
            build.check_model(config, model, 4, torch.device("cpu"))


@pytest.mark.parametrize("name", ["vilonghorn_nano", "vilonghorn_nano_exact"])
def test_weights_of_vim_start_a_model_of_longhorn_and_what_is_left_is_said(name, tmp_path, capsys):
    kwargs = dict(patch_size=4, depth=2, embed_dim=32)
    vim = timm.create_model("vim_nano", img_size=16, num_classes=4, **kwargs)
    save_file(vim.state_dict(), tmp_path / "vim.safetensors")
    options = (f"--model.weights={tmp_path}/vim.safetensors", f"--model.name={name}", f"--model.kwargs={kwargs}")
    model = build.build_model(toy_config(tmp_path, *options), 4)
    said = "tensors are from .*vim.safetensors; of Mamba's rule, B is k, C is q .*; A_log is left\n"
    assert re.search(said, capsys.readouterr().out)
    assert torch.equal(model.blocks[1].mixer.dt_bias, vim.blocks[1].mixer.dt_bias)


def test_the_stable_phase_of_wsd_keeps_the_peak_and_its_end_decays():
    config = Config()
    config.schedule.kind, config.schedule.epochs, config.schedule.warmup_epochs = "wsd", 12, 2
    values = rates(config, 10)
    peak, floor = config.optimizer.lr, config.schedule.min_lr
    assert values[20:100] == pytest.approx([peak] * 80)
    decay = [floor + (peak - floor) * (1 - math.sqrt(t / 20)) for t in range(20)]
    assert values[100:] == pytest.approx(decay)


def test_arguments_of_the_optimizer_and_the_floor_of_layer_decay_reach_it(tmp_path):
    options = ["--optimizer.kwargs={amsgrad: true}", "--optimizer.layer_decay=0.1"]
    config = toy_config(tmp_path, *options, "--optimizer.layer_decay_min_scale=0.05")
    optimizer = build.build_optimizer(config, build.build_model(config, 4))
    assert all(group["amsgrad"] for group in optimizer.param_groups)
    assert sorted({group["lr_scale"] for group in optimizer.param_groups}) == pytest.approx([0.05, 0.1, 1])
    config = toy_config(tmp_path, "--optimizer.kwargs={speed: 1}")
    with pytest.raises(ValueError, match="cannot make with {'speed': 1} .TypeError"):
        build.build_optimizer(config, torch.nn.Linear(2, 2))


def test_the_binary_loss_is_that_of_each_class_with_smoothed_labels(tmp_path):
    config = toy_config(tmp_path, "--augmentation.loss=binary_cross_entropy", "--augmentation.cutmix=0")
    config.augmentation.mixup, scores, labels = 0.0, torch.randn(3, 4), torch.tensor([0, 3, 1])
    task = Classification(config, 4)
    found = task.loss(lambda _: scores, torch.zeros(3, 3, 8, 8), labels, torch.autocast("cpu", enabled=False))
    target = torch.nn.functional.one_hot(labels, 4) * 0.9 + 0.1 / 4
    expected = -(target * scores.sigmoid().log() + (1 - target) * (1 - scores.sigmoid()).log()).mean()
    torch.testing.assert_close(found, expected)


def test_auto_takes_the_weights_of_the_package_and_else_random_ones_and_says_so(tmp_path, capsys):
    options = ["--model.kwargs={}", "--model.drop_path=null", "--model.weights=auto"]
    nano = toy_config(tmp_path, "--model.name=vilonghornv2_nano", *options)
    with pytest.warns(UserWarning, match=r"data.mean is .*trained with \[0.5, 0.5, 0.5\]: give --data.mean"):
        build.build_model(nano, 4)
    nano.data.mean = nano.data.std = (0.5, 0.5, 0.5)
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build.build_model(nano, 4)
    found = timm.create_model("vilonghornv2_nano", pretrained=True, num_classes=4)
    assert torch.equal(model.stem.conv1.weight, found.stem.conv1.weight)
    assert "tensors are from" in (said := capsys.readouterr().out) and said.count("\n") == 1
    build.build_model(toy_config(tmp_path, "--model.name=vilonghorn_nano", *options), 4)
    said = capsys.readouterr().out
    assert said == "model.weights: random, because no weights of vilonghorn_nano are on this machine\n"
