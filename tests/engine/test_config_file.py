"""Configurations of earlier versions are read; what they asked for that is gone is refused in one sentence."""

from pathlib import Path

import pytest
import yaml
from toy_run import toy_trainer

from vilonghorn.engine import Config, Interrupted, build_parser, load_config, parse
from vilonghorn.engine.checkpoint import load_state, save_state
from vilonghorn.engine.config import FIELDS, flatten
from vilonghorn.engine.config_file import MOVED, changed_keys, translate

OLD = Path(__file__).with_name("old_config.yaml")  # of a run with teachers, as version 0.1 wrote it


def old_sections(**augmentation) -> dict:
    sections = yaml.safe_load(OLD.read_text())
    sections["augmentation"] |= augmentation
    return sections


def test_the_configuration_of_an_old_run_is_read_with_each_of_its_values():
    config = load_config(OLD)
    assert config.task.kind == "classification" and config.task.teacher == ["runs/a", "vim_tiny"]
    assert (config.task.loss, config.task.mixup, config.task.teacher_temperature) == ("binary_cross_entropy", 0.3, 2.0)
    old, new = flatten(yaml.safe_load(OLD.read_text())), flatten(config.to_dict())
    gone = {"augmentation.mask_ratio", "augmentation.next_cluster", "run.wandb"}  # null or false: not asked for
    assert {MOVED.get(key, key): value for key, value in old.items() if key not in gone}.items() <= new.items()
    assert set(new) == set(FIELDS) and set(MOVED.values()) <= set(FIELDS)
    assert changed_keys(old_sections(), config.to_dict()) == []
    assert changed_keys(old_sections(mixup=0.5), config.to_dict()) == ["task.mixup"]
    assert translate(config.to_dict()) == config.to_dict()


@pytest.mark.parametrize("task", ["", "task: {}\n"])
def test_a_configuration_that_asks_for_weights_and_biases_is_read_with_a_sentence_on_what_to_type(tmp_path, task):
    (tmp_path / "a.yaml").write_text(f"{task}run: {{wandb: true, seed: 3}}")
    with pytest.warns(UserWarning, match=r'run.wandb is gone: .* python -c "import wandb; .*" train --resume RUN'):
        assert load_config(tmp_path / "a.yaml").run.seed == 3


def test_old_keys_of_layers_override_each_other_as_before(tmp_path):
    (tmp_path / "a.yaml").write_text("augmentation: {mask_ratio: 0.5, mask_unit: 8, erase: 0}\nteacher: {weight: 0.1}")
    (tmp_path / "b.yaml").write_text("base: a.yaml\naugmentation: {mask_unit: 4}")
    config = load_config(tmp_path / "b.yaml", "--task.label_smoothing=0")
    task = config.task
    assert (task.kind, task.mask_ratio, task.mask_unit, task.teacher_weight) == ("masked", 0.5, 4, 0.1)
    assert config.augmentation.erase == task.label_smoothing == 0
    (tmp_path / "c.yaml").write_text("base: b.yaml\naugmentation: {mask_ratio: null}")
    assert load_config(tmp_path / "c.yaml").task.kind == "classification"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("augmentation: {next_cluster: 2}", "augmentation.next_cluster is gone: learn from masked images by task.kind"),
        ("task: {}\naugmentation: {next_cluster: 2}", "no key augmentation.next_cluster; .* is gone: learn from"),
        ("task: {}\naugmentation: {mixup: 1}", "no key augmentation.mixup; augmentation.mixup is task.mixup now"),
        ("teacher: {wieght: 1}", "there is no key teacher.wieght; did you mean"),
    ],
)
def test_what_is_gone_or_never_was_is_refused_in_one_sentence(tmp_path, text, message):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        load_config(tmp_path / "a.yaml")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "--augmentation.label_smoothing=0",
            "no option --augmentation.label_smoothing; .* is task.label_smoothing now",
        ),
        ("--augmentation.mask_ratio=0.5", "is task.mask_ratio now with task.kind masked"),
        ("--teacher.weights=[a]", "teacher.weights is task.teacher now"),
        ("--augmentation.next_cluster=2", "augmentation.next_cluster is gone"),
        ("--run.wandb=true", "there is no option --run.wandb; run.wandb is gone: to log on Weights & Biases, start"),
    ],
)
def test_an_old_option_is_refused_with_its_present_name(option, message):
    with pytest.raises(ValueError, match=message):
        parse(build_parser(), [option])


def test_a_run_that_an_earlier_version_left_is_resumed_bit_for_bit(tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    toy_trainer(whole).fit()
    trainer = toy_trainer(stopped)
    trainer.evaluate_epoch = lambda stop: (_ for _ in ()).throw(Interrupted(15, "stopped"))
    with pytest.raises(Interrupted):
        trainer.fit()
    for file, sections in ((stopped / "config.yaml", None), (stopped / "last.pt", load_state(stopped / "last.pt"))):
        config = yaml.safe_load(file.read_text()) if sections is None else sections["config"]
        task = config.pop("task")
        old = {key: task[new.partition(".")[2]] for key, new in MOVED.items()} | {"augmentation.mask_ratio": None}
        for key, value in (old | {"augmentation.next_cluster": None}).items():
            config.setdefault(key.partition(".")[0], {})[key.partition(".")[2]] = value
        file.write_text(yaml.safe_dump(config)) if sections is None else save_state(file, sections)
    config = load_config(stopped / "config.yaml")
    assert config.task == Config().task.__class__(**trainer.config.to_dict()["task"])
    toy_trainer(stopped, resume=True).fit()
    assert (stopped / "last.safetensors").read_bytes() == (whole / "last.safetensors").read_bytes()
    assert "task" in yaml.safe_load((stopped / "config.yaml").read_text())
