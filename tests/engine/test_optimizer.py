"""The optimizer and the schedule, as the configuration asks for them."""

import math

import pytest
import torch
from toy_run import toy_config

from vilonghorn.engine import Config, model_from_config
from vilonghorn.engine.train_state import build_optimizer, build_scheduler


def rates(config, updates_per_epoch):
    """The learning rate of every update."""
    model = torch.nn.Linear(2, 2)
    optimizer = build_optimizer(config, model)
    scheduler = build_scheduler(config, optimizer, updates_per_epoch)
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
    model = model_from_config(config, 4)
    groups = build_optimizer(config, model).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    exempt = {name for name, p in model.named_parameters() if p.ndim <= 1 or name in model.no_weight_decay()}
    assert {"pos_embed", "cls_token", "norm.weight"} <= exempt
    for name, parameter in model.named_parameters():
        assert decays[id(parameter)] == (0 if name in exempt else config.optimizer.weight_decay), name


@pytest.mark.parametrize(("name", "words"), [("adan", "IndexError"), ("adahessian", "second derivatives")])
def test_an_optimizer_that_cannot_follow_these_gradients_is_refused_in_one_sentence(tmp_path, name, words):
    config = toy_config(tmp_path, f"--optimizer.name={name}")
    with pytest.raises(ValueError, match=f"optimizer.name is '{name}'.*{words}") as raised:
        build_optimizer(config, torch.nn.Linear(2, 2))
    assert "\n" not in str(raised.value)


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
    optimizer = build_optimizer(config, model_from_config(config, 4))
    assert all(group["amsgrad"] for group in optimizer.param_groups)
    assert sorted({group["lr_scale"] for group in optimizer.param_groups}) == pytest.approx([0.05, 0.1, 1])
    config = toy_config(tmp_path, "--optimizer.kwargs={speed: 1}")
    with pytest.raises(ValueError, match="cannot make with {'speed': 1} .TypeError"):
        build_optimizer(config, torch.nn.Linear(2, 2))
