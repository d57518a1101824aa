"""Learning classes: the losses."""

import torch
from toy_run import toy_config

from vilonghorn.engine.tasks import Classification


def test_the_binary_loss_is_that_of_each_class_with_smoothed_labels(tmp_path):
    config = toy_config(tmp_path, "--task.loss=binary_cross_entropy", "--task.cutmix=0")
    config.task.mixup, scores, labels = 0.0, torch.randn(3, 4), torch.tensor([0, 3, 1])
    task = Classification(config, 4)
    found = task.loss(lambda _: scores, torch.zeros(3, 3, 8, 8), labels, torch.autocast("cpu", enabled=False))
    target = torch.nn.functional.one_hot(labels, 4) * 0.9 + 0.1 / 4
    expected = -(target * scores.sigmoid().log() + (1 - target) * (1 - scores.sigmoid()).log()).mean()
    torch.testing.assert_close(found, expected)
