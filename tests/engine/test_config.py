"""Configuration: read, overridden, refused in one sentence."""

import re
import shlex
from pathlib import Path

import pytest

from vilonghorn.engine import Config, build_parser, load_config, parse
from vilonghorn.engine.config import FIELDS, SECTIONS, check


def read(*argv):
    return parse(build_parser(), list(argv))[0]


def test_options_win_over_the_file_wherever_they_stand(tmp_path):
    assert read() == Config()
    file = tmp_path / "run.yaml"
    file.write_text("schedule: {epochs: 7, warmup_epochs: 1}\noptimizer: {lr: 1e-4}\nmodel: {kwargs: {patch_size: 4}}")
    assert load_config(file).optimizer.lr == 1e-4
    for argv in (["--schedule.epochs", "9", "--config", str(file)], ["--config", str(file), "--schedule.epochs=9"]):
        config = read(*argv, "--model.kwargs.depth=2", "--augmentation.scale=[0.5, 1]")
        assert (config.schedule.epochs, config.schedule.warmup_epochs, config.data.batch_size) == (9, 1, 128)
        assert config.model.kwargs == {"patch_size": 4, "depth": 2}
        assert tuple(config.augmentation.scale) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--epochs=3"], ["--epochs", "--schedule.epochs"]),
        (["--model.name=vilonghorn_nanoo"], ["'vilonghorn_nanoo'", "vilonghorn_nano"]),
        (["--optimizer.name=adamww"], ["'adamww'", "adamw"]),
        (["--schedule.epochs=0"], ["schedule.epochs is 0", "[1, 1000000]"]),
        (["--optimizer.lr=.nan"], ["optimizer.lr is nan", "(0, inf)"]),
        (["--optimizer.betas=[0.9, 1.0]"], ["optimizer.betas", "[0, 1)"]),
        (["--data.workers=5000"], ["data.workers is 5000", "[0, 1024]"]),
        (["--run.dir=runs/caf\udce9"], [r"run.dir is runs/caf\udce9, which is not UTF-8", "PYTHONUTF8=1"]),
        (["--schedule.epochs=ten"], ["schedule.epochs is ten, expected int in [1, 1000000]"]),
        (["--task.mask_ratio=nan"], ["task.mask_ratio is nan, expected float in (0, 1)"]),
        (["--task.mask_ratio=.nan"], ["task.mask_ratio is nan; it must lie in (0, 1)"]),
        (["--task.mask_ratio=1"], ["task.mask_ratio is 1.0; it must lie in (0, 1)"]),
        (["--optimizer.betas=[nan, 0.9]"], ["optimizer.betas is nan, expected tuple[float, float] in [0, 1)"]),
        (["--schedule.kind=step"], ["schedule.kind is step, expected Literal['cosine', 'wsd']"]),
        ("task: {mask_ratio: NaN}", ["task.mask_ratio is NaN, expected float in (0, 1)"]),
        (["--schedule.epochs=5", "--schedule.warmup_epochs=5"], ["schedule.warmup_epochs", "5", "null"]),
        (["--run.compile=reduce-overhead", "--optimizer.accumulate=2"], ["'reduce-overhead'", "is 2", "'default'"]),
        (["--run.compile=max-autotune", "--optimizer.accumulate=3"], ["'max-autotune'", "is 3", "'default'"]),
        (["--data.batch_size=31"], ["data.batch_size is 31", "even"]),
        (["--run.dir="], ["run.dir is ''", "'runs/default'"]),
        ("optimizer: {learning_rate: 1}", ["optimizer.learning_rate"]),
        ("optimiser: {lr: 1}", ["optimiser.lr", "optimizer.lr"]),
        ("run: {seed: null}", ["run.seed is null"]),
    ],
)
def test_a_bad_option_or_file_is_refused_in_one_sentence_with_what_would_do(tmp_path, argv, words):
    if isinstance(argv, str):
        (tmp_path / "run.yaml").write_text(argv)
        argv = ["--config", str(tmp_path / "run.yaml")]
    with pytest.raises(ValueError) as raised:
        read(*argv)
    message = str(raised.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_tilde_is_the_home_folder_wherever_a_path_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.yaml").write_text("data: {val: ~/val}")
    (tmp_path / "run.yaml").write_text("base: ~/base.yaml")
    config = read("--config=~/run.yaml", "--run.dir=~/x", "--data.train=~/train.beton", "--model.weights", "~/w.pth")
    found = [config.run.dir, config.data.train, config.data.val, config.model.weights]
    assert found == [f"{tmp_path}/{name}" for name in ("x", "train.beton", "val", "w.pth")]
    (tmp_path / "x").mkdir()
    sections = "".join(f"{name}: {{}}\n" for name in SECTIONS if name != "run")
    (tmp_path / "x" / "config.yaml").write_text(sections + "run: {dir: elsewhere}")
    assert read("--resume=~/x").run.dir == f"{tmp_path}/x"
    (tmp_path / "x" / "config.yaml").write_text(sections)
    with pytest.raises(ValueError, match="x/config.yaml is cut off: it has no section run; copy it again"):
        read("--evaluate=~/x")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("run: {dir: &a x}\nmodel: {name: *a}", "in line 2: aliases"),
        ("ema: {decay: 0}\nrun: {seed: 1, dir: x, seed: 2}", "in line 2: the key seed is there twice"),
        ("data: {batch_size: 8}\nrun: {seed: 1}\ndata: {val: x}\n", "in line 1: the key data is there twice"),
        ("model: {kwargs: " + "{a: " * 5000, "nested too deeply"),
        ("\n".join(" " * i + "hunter2:" for i in range(40)), "nested too deeply"),  # whatever Python's own limit is
        ("# hunter2\n" * 20_000, "more than 100,000 bytes"),
        ("hunter2:x:0:0:root:/root:/bin/sh\nx:y", "it has no keys"),
        ("[hunter2]", "it has no keys"),
        ("model: hunter2", "there are no keys in model"),
        ("run: %hunter2", "in line 1"),
        ("\0hunter2", "unacceptable character"),
        ("base: [hunter2]", "its base is not the name"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_at_once_and_not_quoted(tmp_path, text, reason):
    (tmp_path / "a.yaml").write_text(text)
    (tmp_path / "b.yaml").write_text("base: a.yaml")
    with pytest.raises(ValueError, match=f"a.yaml is no configuration: .*{reason}") as raised:
        load_config(tmp_path / "b.yaml")
    assert "hunter2" not in str(raised.value) and "\n" not in str(raised.value)


def test_every_key_is_documented():
    for section in {key.partition(".")[0] for key in FIELDS}:
        docs = "".join(base.__doc__ or "" for base in type(getattr(Config(), section)).__mro__)
        for key in (k.partition(".")[2] for k in FIELDS if k.startswith(section + ".")):
            assert f"        {key}: " in docs, f"{section}.{key} is not documented"


@pytest.mark.parametrize("page", ["README.md", "docs/training.md", "docs/distributed.md", "docs/imagenet.md"])
def test_every_command_of_the_pages_names_options_that_there_are(page):
    text = (Path(__file__).parents[2] / page).read_text().replace("\\\n", " ")
    parser = build_parser()
    if page != "README.md":
        known = {option for action in parser._actions for option in action.option_strings}
        assert set(re.findall(r"`(--[a-z][a-z_.-]*)", text)) - {"--help", "--requeue", "--class-map"} <= known
    commands = re.findall(r"vilonghorn train (--config [^#`\n]+)", text)
    assert commands
    for command in commands:
        if "..." not in command:
            parse(parser, shlex.split(command))


def test_null_and_an_empty_list_are_no_teacher(tmp_path):
    (tmp_path / "a.yaml").write_text("task:\n  teacher: null\n")
    found = [parse(build_parser(), given)[0] for given in (["--task.teacher=null"], [f"--config={tmp_path}/a.yaml"])]
    assert [config.task.teacher for config in [*found, Config()]] == [[]] * 3


def test_a_run_without_labels_takes_no_teacher():
    config = Config()
    config.task.kind, config.task.teacher = "masked", ["runs/a"]
    with pytest.raises(ValueError, match="a run without labels learns from none: make it"):
        check(config)
