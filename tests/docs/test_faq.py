"""The messages that docs/faq.md quotes are those that the library prints: each heading in quotes is provoked."""

import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from left_run import make_image
from PIL import Image
from toy_run import ToyLoader, toy_config, toy_trainer

from vilonghorn.data import create_loader, write_beton
from vilonghorn.data.images import read_image
from vilonghorn.engine.checkpoint import load_state
from vilonghorn.ops import backends, scan
from vilonghorn.ops.backends import bindings, cpu

PAGE = (Path(__file__).parents[2] / "docs" / "faq.md").read_text(encoding="utf-8")
QUOTES = [quote for line in re.findall("^### (.*)", PAGE, re.MULTILINE) for quote in re.findall('"(.*?)"', line)]
PROVOKE = {}


def by(*quotes):
    """Registers a function that raises or warns with these messages."""

    def register(function):
        PROVOKE.update(dict.fromkeys(quotes, function))
        return function

    return register


class NaNLoader(ToyLoader):
    """Images that are not numbers."""

    def image(self, epoch, index):
        return super().image(epoch, index) * float("nan")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of one epoch."""
    directory = tmp_path_factory.mktemp("faq") / "run"
    toy_trainer(directory, "--schedule.epochs=1", "--schedule.warmup_epochs=0").fit()
    return directory


@by("vilonghorn scans ... in plain torch, which is many times slower than a native kernel")
def _(case):
    case.patch.setattr(cpu, "_reason", "not built")
    case.patch.setattr(sys.modules[backends.__module__], "_warned", set())
    scan(*torch.zeros(4, 1, 1, 2, 3), rule="longhorn", reverse=(False,))


@by("... has interface version ..., expected ...: install vilonghorn again")
def _(case):
    if not bindings.library_path("cpu").exists():
        pytest.skip("the library is not built")
    case.patch.setattr(bindings, "ABI", bindings.ABI + 1)
    raise RuntimeError(bindings.open_library("cpu", "a C++ compiler")[1])


@by("reading a .beton needs FFCV, which cannot be imported")
def _(case):
    case.patch.setitem(sys.modules, "vilonghorn.data.loaders.ffcv", None)
    create_loader(case.beton(), training=False, batch_size=1, image_size=16)


@by("VILONGHORN_ISA is ..., expected one of ...")
def _(case):
    if cpu.library is None:
        pytest.skip("the library is not built")
    case.patch.setenv("VILONGHORN_ISA", "v9")
    raise RuntimeError(cpu._open()[1])


@by("Unknown model (vilonghorn_tiny)")
def _(case):
    case.patch.delitem(sys.modules["timm.models._registry"]._model_entrypoints, "vilonghorn_tiny")
    timm.create_model("vilonghorn_tiny")


def weights(folder):
    """A file of weights of a model of 10 classes for 64 px."""
    torch.save(nano(num_classes=10, img_size=64).state_dict(), folder / "weights.pth")
    return folder / "weights.pth"


def nano(name="vilonghorn_nano", **arguments):
    return timm.create_model(name, depth=1, embed_dim=32, **arguments)


@by("... not a readable image ...")
def _(case):
    (case.folder / "a.jpg").write_text("no image")
    read_image(str(case.folder / "a.jpg"))


def read_damaged(case, **options):
    """Reads the only image of a `.beton` after zeros were written into it."""
    pytest.importorskip("ffcv", reason="./setup.sh builds it")
    beton = case.beton()
    content = beton.read_bytes()
    start = content.rindex(b"\xff\xd8\xff")
    beton.write_bytes(content[: start + 4] + bytes(200) + content[start + 204 :])
    next(create_loader(beton, training=False, batch_size=1, image_size=16, workers=1, **options).epoch(0))


@by("an epoch of ... images has only ... update(s): lower ...")
def _(case):
    train = ToyLoader(32, batch_size=32)
    toy_trainer(case.folder / "new", "--data.batch_size=32", "--augmentation.repeats=2", train=train)


@by("... is damaged: its checksum is wrong")
def _(case):
    content = (case.run / "last.pt").read_bytes()
    (case.folder / "last.pt").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    load_state(case.folder / "last.pt")


PROVOKE |= {
    "no pretrained weights for vilonghorn_tiny: none are published yet": lambda case: timm.create_model(
        "vilonghorn_tiny", pretrained=True
    ),
    "size mismatch": lambda case: nano(checkpoint_path=weights(case.folder)),
    "Missing key(s) in state_dict": lambda case: nano(
        "vim_nano", num_classes=10, img_size=64, checkpoint_path=weights(case.folder)
    ),
    "this checkpoint does not fit the model": lambda case: nano(
        "vim_nano", pretrained=True, pretrained_cfg_overlay=dict(file=weights(case.folder), num_classes=10)
    ),
    "Input width (3) doesn't match model (224)": lambda case: nano()(torch.zeros(2, 224, 224, 3)),
    "Input height (256) doesn't match model (224)": lambda case: nano()(torch.zeros(1, 3, 256, 256)),
    "Input type (unsigned char) and bias type (float) should be the same": lambda case: nano()(
        torch.zeros(1, 3, 224, 224, dtype=torch.uint8)
    ),
    "Input type (double) and bias type (float) should be the same": lambda case: nano()(
        torch.zeros(1, 3, 224, 224, dtype=torch.float64)
    ),
    "... its data are not those that were written; write the file again": lambda case: read_damaged(case),
    "... its JPEG data are damaged; write the file again": lambda case: read_damaged(case, checksums=False),
    "... images do not fill a batch of ...": lambda case: create_loader(
        case.images(), training=True, batch_size=64, image_size=16, workers=0
    ),
    "data.batch_size is ...; mixup and cutmix pair images, so it must be even": lambda case: toy_config(
        case.folder, "--data.batch_size=7"
    ),
    "... updates in a row, ..., had a loss or gradient that is not finite: lower optimizer.lr": lambda case: (
        toy_trainer(case.folder / "new", "--run.max_skipped=0", train=NaNLoader()).fit()
    ),
    "there is a run in ...: resume it by --resume ...": lambda case: toy_trainer(case.run),
    "... was started with another ...: resume with the same": lambda case: toy_trainer(
        case.run, "--optimizer.lr=1", resume=True
    ),
}


@pytest.mark.parametrize("quote", QUOTES)
def test_the_page_quotes_what_is_printed(quote, run, tmp_path, monkeypatch):
    def images():
        make_image(tmp_path / "images/cat/1.png", 1), make_image(tmp_path / "images/dog/2.png", 2)
        return tmp_path / "images"

    def beton():
        (tmp_path / "jpg/cat").mkdir(parents=True)
        Image.effect_noise((64, 64), 50).convert("RGB").save(tmp_path / "jpg/cat/1.jpg")
        write_beton(tmp_path / "jpg", tmp_path / "a.beton", mode="jpg", progress=False)
        return tmp_path / "a.beton"

    case = SimpleNamespace(folder=tmp_path, run=run, patch=monkeypatch, images=images, beton=beton)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            PROVOKE[quote](case)
            printed = ""
        except Exception as error:
            printed = str(error)
    printed = "\n".join([printed, *(str(warning.message) for warning in warned)])
    assert re.search(re.escape(quote).replace(r"\.\.\.", ".*"), printed), printed


def test_every_provoked_message_is_on_the_page():
    assert len(QUOTES) > 20 and set(QUOTES) == PROVOKE.keys()
