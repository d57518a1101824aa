"""The ImageNet configurations follow the published recipe; runs start from the weights of other runs."""

from pathlib import Path

import pytest
import timm
import torch
from composition import official_weights
from safetensors.torch import save_file
from timm.layers import DropPath, resample_abs_pos_embed
from toy_run import toy_config

from vilonghorn.cli import main
from vilonghorn.engine import Config, build_parser, load_config, model_from_config, parse
from vilonghorn.engine.checkpoint import save_weights
from vilonghorn.engine.config import flatten
from vilonghorn.engine.initial_weights import read_initial_weights
from vilonghorn.engine.model_setup import model_kwargs
from vilonghorn.engine.train_state import build_optimizer

CONFIGS = Path(__file__).parents[2] / "configs"
NANO = ["--model.name=vilonghorn_nano", "--data.image_size=32", "--model.kwargs={patch_size: 8, depth: 2}"]
KINDS = ("vilonghorn_{}", "vilonghorn_{}_exact", "vilonghornv2_{}", "vim_{}", "deit_{}")
MODELS = [kind.format(size) for kind in KINDS for size in ("tiny", "small")]
# Zhu et al., 2024: the scripts of the authors. The defaults have null, which is 5 for long runs, and true.
RECIPE = flatten(Config().to_dict()) | {"schedule.warmup_epochs": 5.0, "ema.warmup": False}


def read(*files: str, **overrides):
    options = [f"--config={CONFIGS / file}" for file in files]
    return parse(build_parser(), [*options, *(f"--{key}={value}" for key, value in overrides.items())])[0]


@pytest.mark.parametrize("model", MODELS)
def test_the_recipe_is_the_published_one_and_the_same_for_all(model):
    values = flatten(read(f"imagenet/{model}.yaml").to_dict())
    own = {"model.name", "model.drop_path", "optimizer.weight_decay", "data.train", "data.val", "data.batch_size"}
    own |= {"run.dir"}
    assert {key for key in values if values[key] != RECIPE[key]} <= own
    small, deit = "small" in model, "deit" in model
    assert values["optimizer.weight_decay"] == (0.05 if small or deit else 0.1)
    assert values["model.drop_path"] == (0.1 if deit else 0.05 if small else None)
    with torch.device("meta"):
        built = timm.create_model(values["model.name"], num_classes=7)
    assert not any(isinstance(module, DropPath) for module in built.modules())  # the model's default rate is 0
    for epochs in (30, 100):
        config = read(f"imagenet/{model}.yaml", f"imagenet/epochs_{epochs}.yaml")
        assert config.schedule.epochs == epochs and config.ema.warmup
        with torch.device("meta"):
            built = timm.create_model(config.model.name, **model_kwargs(config, 7))
            if hasattr(built, "blocks"):
                built.blocks = built.blocks[:1]  # all have the same shapes
            assert all(built(torch.empty(2, 3, *size)).shape == (2, 7) for size in config.image_sizes())


def test_fine_tuning_keeps_its_rate():
    config = read("imagenet/vim_tiny.yaml", "finetune.yaml")
    assert config.model.kwargs == {"stride": 8} and config.optimizer.weight_decay == 1e-8
    assert config.schedule.warmup_lr == config.schedule.min_lr == config.optimizer.lr == 1e-5


def test_photographs_start_from_the_official_file(tmp_path):
    official = official_weights(dim=192, depth=2)
    torch.save({"model": official}, tmp_path / "official.pth")
    options = {"model.pretrained": False, "model.weights": tmp_path / "official.pth", "model.kwargs": "{depth: 2}"}
    config = read("photos_finetune.yaml", **options)
    assert read("photos_finetune.yaml").model.pretrained and read("photos_finetune.yaml").model.kwargs == {}
    model = model_from_config(config, 4)
    assert torch.equal(model.blocks[1].mixer.in_proj.weight, official["layers.1.mixer.in_proj.weight"])
    assert model.head.weight.shape[0] == 4
    optimizer = build_optimizer(config, model)
    assert min(group["lr_scale"] for group in optimizer.param_groups) < 0.75


def test_a_base_is_read_first_relative_to_its_file(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.yaml").write_text("optimizer: {lr: 0.1, eps: 0.1}\ndata: {batch_size: 6}")
    (tmp_path / "deep" / "b.yaml").write_text("base: ../a.yaml\noptimizer: {lr: 0.2}")
    (tmp_path / "c.yaml").write_text("base: deep/b.yaml\noptimizer: {weight_decay: 0.3}")
    config = load_config(tmp_path / "c.yaml", "--data.image_size=8")
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.eps, optimizer.weight_decay, config.data.batch_size) == (0.2, 0.1, 0.3, 6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: gone.yaml", "no configuration file .*gone.yaml"),
        ("base: y.yaml", "x.yaml is its own base"),
        ("base: z.yaml", "z.yaml: there is no key data.bathc_size"),
    ],
)
def test_a_base_that_cannot_be_read_is_named(tmp_path, text, message):
    (tmp_path / "y.yaml").write_text("base: x.yaml")
    (tmp_path / "z.yaml").write_text("data: {bathc_size: 3}")
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_config(tmp_path / "x.yaml")


@pytest.fixture
def trained(tmp_path):
    """A model with its weights, as the directory of a run has them, and as files."""
    config = toy_config(tmp_path / "run", *NANO)
    model = model_from_config(config, 4)
    (tmp_path / "run").mkdir()
    kwargs = {"num_classes": 4, "img_size": 32, "patch_size": 8, "depth": 2}
    record = {"model": "vilonghorn_nano", "kwargs": kwargs, "weights": "ema", "epoch": 1}
    save_weights(tmp_path / "run" / "best.safetensors", model.state_dict(), record)
    save_file(model.state_dict(), tmp_path / "bare.safetensors")
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "theirs.pth")
    return model, {name: tmp_path / name for name in ("run", "bare.safetensors", "theirs.pth")}


@pytest.mark.parametrize(
    ("source", "classes", "kwargs", "other"),
    [
        ("run", 4, "{patch_size: 8, depth: 2}", {}),
        ("bare.safetensors", 4, "{patch_size: 8, depth: 2}", {}),
        ("theirs.pth", 9, "{patch_size: 8, depth: 2}", {"head.weight": (9, 96), "head.bias": (9,)}),
        ("run", 4, "{patch_size: 8, depth: 2, stride: 4}", {"pos_embed": (1, 50, 96)}),  # resampled
    ],
)
def test_a_run_starts_from_the_weights_of_another(trained, tmp_path, source, classes, kwargs, other):
    model, sources = trained
    options = [*NANO, f"--model.kwargs={kwargs}", f"--model.weights={sources[source]}"]
    old, new = model.state_dict(), model_from_config(toy_config(tmp_path, *options), classes).state_dict()
    assert {name: tuple(new[name].shape) for name in old if not torch.equal(old[name], new[name])} == other


@pytest.fixture
def hub(tmp_path, monkeypatch) -> list[tuple]:
    """A Hub that has the official file of vim_tiny, with two blocks; lists what was asked for."""
    torch.save({"model": official_weights(dim=192, depth=2)}, tmp_path / "official.pth")
    asked = []

    def download(repo_id: str, filename: str, **options) -> str:
        asked.append((repo_id, filename))
        return str(tmp_path / "official.pth")

    monkeypatch.setattr("vilonghorn.engine.initial_weights.hf_hub_download", download)
    monkeypatch.setattr("vilonghorn.engine.initial_weights.try_to_load_from_cache", lambda *names: None)
    monkeypatch.setattr("timm.models._hub.hf_hub_download", download)
    return asked


def test_published_weights_are_given_by_name(hub, tmp_path, capsys):
    options = ["--model.name=vilonghorn_tiny_exact", "--model.kwargs={depth: 2}", "--data.image_size=224"]
    model = model_from_config(toy_config(tmp_path, *options, "--model.weights=hf:vim_tiny"), 9)
    weights = official_weights(dim=192, depth=2)
    assert torch.equal(model.blocks[1].mixer.in_proj.weight, weights["layers.1.mixer.in_proj.weight"])
    assert "tensors are from hf:vim_tiny" in capsys.readouterr().out
    model_from_config(toy_config(tmp_path, *options, "--model.weights=hf:me/mine"), 9)
    assert hub == [("hustvl/Vim-tiny-midclstok", "vim_t_midclstok_76p1acc.pth"), ("me/mine", "model.safetensors")]


def test_published_weights_on_this_machine_need_no_network(tmp_path, capsys):
    options = ["--model.name=vilonghorn_nano_patch8", "--model.kwargs={embed_dim: 92}", "--model.drop_path=0"]
    model_from_config(toy_config(tmp_path, *options, "--model.weights=hf:vim_nano_patch8.icons480"), 480)
    assert "tensors are from hf:vim_nano_patch8.icons480" in capsys.readouterr().out


def test_published_weights_that_cannot_be_had_are_refused_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, words in (
        ("vim_small", "cannot be downloaded .* give it by model.weights"),
        ("vim_nano", "give OWNER/NAME"),
    ):
        with pytest.raises((OSError, ValueError), match=f"model.weights is hf:{name}, .*{words}") as raised:
            read_initial_weights("vilonghorn_small", f"hf:{name}")
        assert "\n" not in str(raised.value)


def test_the_recipe_from_vim_is_a_thirtieth_of_the_published_one(hub, monkeypatch, tmp_path, capsys):
    config = read("imagenet/from_vim_tiny.yaml")
    assert config.model.name == "vilonghorn_tiny_exact" and config.schedule.epochs * 30 == 300
    assert (config.model.weights, config.task.teacher) == ("hf:vim_tiny", ["vim_tiny"])
    assert flatten(config.to_dict())["optimizer.weight_decay"] == RECIPE["optimizer.weight_decay"]
    torch.save({"model": official_weights(dim=192, depth=24)}, tmp_path / "official.pth")
    monkeypatch.setattr("vilonghorn.engine.dry_run.SECONDS", 0.01)
    planned = ["--dry-run", "--processes=8", "--train-images=1281167", "--model.num_classes=1000"]
    assert main(["train", "--config=imagenet/from_vim_tiny", *planned, "--data.batch_size=2"]) == 0
    assert "in 10 epochs" in capsys.readouterr().out and {repository for repository, _ in hub} == {hub[0][0]}


@pytest.mark.parametrize("name", ["levit_128s", "xception41"])
def test_the_head_of_any_model_is_found(tmp_path, name):
    """timm drops the head of a file whose number of classes it does not know."""
    model = timm.create_model(name, num_classes=5)
    save_file(model.state_dict(), tmp_path / "x.safetensors")
    assert read_initial_weights(name, str(tmp_path / "x.safetensors"))["num_classes"] == 5


@pytest.mark.parametrize("size", ["24", "[16, 40]"])  # as many patches; another number, not a square
def test_positions_of_a_run_on_wide_images_are_resampled_from_its_grid(tmp_path, size):
    kwargs = dict(num_classes=4, img_size=[16, 36], patch_size=4, depth=1)
    old, file = timm.create_model("vilonghorn_nano", **kwargs), tmp_path / "a.safetensors"
    save_weights(file, old.state_dict(), {"model": "vilonghorn_nano", "kwargs": kwargs})
    options = [
        *NANO,
        "--model.kwargs={patch_size: 4, depth: 1}",
        f"--data.image_size={size}",
        f"--model.weights={file}",
    ]
    model = model_from_config(load_config("digits", *options), 4)
    grid = model.patch_embed.grid_size
    torch.testing.assert_close(
        model.pos_embed, resample_abs_pos_embed(old.pos_embed, list(grid), [4, 9], num_prefix_tokens=1)
    )
