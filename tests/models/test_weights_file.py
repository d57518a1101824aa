"""Files of weights: a changed bit is an error, and the record in a header makes nothing but a model.

Weights also load into models of another size, through timm's own loading.
"""

import json
import math
import os
import re
import resource
import shutil
import socket
import tarfile

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

pytest.importorskip("jsonargparse", reason="a run needs jsonargparse: pip install vilonghorn")
import publish  # noqa: E402
from left_run import leave_run  # noqa: E402

from vilonghorn import load  # noqa: E402
from vilonghorn.engine import load_run  # noqa: E402
from vilonghorn.engine.initial_weights import read_initial_weights  # noqa: E402
from vilonghorn.models.timm_contract import WEIGHTS  # noqa: E402
from vilonghorn.models.weights_file import check_architecture, fit_state_dict, pack, read_weights  # noqa: E402

SMALL = dict(embed_dim=32, depth=2, patch_size=8)
NANO, V2, PACKAGED = "vilonghorn_nano", "vilonghornv2_nano", "vilonghorn_nano_patch8.icons480"
FLIPS = 6  # for each way to load a file


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of each kind, and the ways to load it."""
    root = tmp_path_factory.mktemp("files")
    model = leave_run(root / "run")
    run, published = root / "run" / "best.safetensors", root / "published"
    publish.save_pretrained(model, published, publish.make_card(model, "a"))
    packaged = shutil.copy(WEIGHTS / f"{PACKAGED}.safetensors", root)
    overlay = {"file": packaged}
    return {
        "run": (run, [lambda: load(root / "run"), lambda: load(NANO, str(run)), lambda: load_run(root / "run")]),
        "initial": (
            run,
            [lambda: read_initial_weights(NANO, str(root / "run")), lambda: read_initial_weights(NANO, str(run))],
        ),
        "published": (
            published / "model.safetensors",
            [lambda: timm.create_model(f"local-dir:{published}", True), lambda: load(f"local-dir:{published}")],
        ),
        "packaged": (
            root / f"{PACKAGED}.safetensors",
            [lambda: timm.create_model(PACKAGED, True, pretrained_cfg_overlay=overlay)],
        ),
    }


@pytest.mark.parametrize("kind", ["run", "initial", "published", "packaged"])
def test_a_flipped_bit_of_a_tensor_is_an_error_that_names_the_file(files, kind):
    path, ways = files[kind]
    data, rng = path.read_bytes(), np.random.default_rng(7)
    start = 8 + int.from_bytes(data[:8], "little")
    for read in ways:
        read()
        for byte in rng.integers(start, len(data), FLIPS):
            damaged = bytearray(data)
            damaged[byte] ^= 1 << rng.integers(8)
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=f"{path} is damaged"):
                read()
        path.write_bytes(data)


def test_a_flipped_bit_of_the_header_changes_no_tensor_and_no_record(files):
    data, rng = files["run"][0].read_bytes(), np.random.default_rng(8)
    path, (weights, record) = files["run"][0].with_name("flipped.safetensors"), read_weights(files["run"][0])
    refused = 0
    for byte in rng.integers(0, 8 + int.from_bytes(data[:8], "little"), 100):
        damaged = bytearray(data)
        damaged[byte] ^= 1 << rng.integers(7)
        path.write_bytes(damaged)
        try:
            found = read_weights(path)
        except ValueError as error:
            assert str(path) in str(error)
            refused += 1
        else:  # of an entry that is not ours
            assert found[1] == record and all(torch.equal(found[0][name], weights[name]) for name in weights)
    assert refused > 90


@pytest.mark.parametrize("kind", ["run", "published", "packaged"])
def test_a_changed_bit_in_the_name_of_the_digest_does_not_hide_a_damaged_tensor(files, kind):
    path, ways = files[kind]
    data = path.read_bytes()
    at = data.index(b"vilonghorn_sha256")
    for byte in range(at, at + len("vilonghorn_sha256")):
        damaged = bytearray(data)
        damaged[byte] ^= 1 << byte % 7
        damaged[-1] ^= 64
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{path} is damaged|{path} is not a safetensors file, or is damaged"):
            ways[byte % len(ways)]()
    path.write_bytes(data)


def test_tensors_of_every_kind_have_a_digest_and_other_programs_files_need_none(tmp_path):
    tensors = {
        "strided": torch.randn(4, 6).half()[:, ::2],
        "scalar": torch.tensor(2.0, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
    }
    (tmp_path / "a.safetensors").write_bytes(pack(tensors, {"epoch": 3}))
    safetensors.torch.save_file(
        {name: value.contiguous() for name, value in tensors.items()}, tmp_path / "b.safetensors"
    )
    torch.save(tensors, tmp_path / "c.pth")
    for name, record in (("a.safetensors", {"epoch": 3}), ("b.safetensors", None), ("c.pth", None)):
        weights, found = read_weights(tmp_path / name)
        assert found == record and all(torch.equal(weights[name], value) for name, value in tensors.items())
    assert read_weights(tmp_path / "a.safetensors", tensors=False)[1] == {"epoch": 3}


def test_what_is_no_file_of_weights_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe.pth")
    (tmp_path / "folder.safetensors").mkdir()
    for path in tmp_path.iterdir():
        with pytest.raises(FileNotFoundError, match=f"{path}: expected a file"):
            read_weights(path)
    member = tarfile.TarInfo("sys_info")
    member.size = 2**42
    huge = (2**60).to_bytes(8, "little") + b"{}"
    pickled = b"\x80\x02" + b"(" * 100_000
    contents = {"tar.pth": member.tobuf(), "a.safetensors": huge, "b.safetensors": b"", "deep.pth": pickled}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{tmp_path / name} is not a"):
            read_weights(tmp_path / name)
    (tmp_path / "config.yaml").touch()
    (tmp_path / "last.pt").write_bytes(b"the state of a run")
    with pytest.raises(ValueError, match=r"last.pt is not a file of weights \(give the run's directory\)"):
        read_weights(tmp_path / "last.pt")


def test_a_file_that_cannot_be_opened_is_not_said_to_be_missing(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)  # permissions do not keep root from opening a file
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match=r"Too many open files: '.*a\.safetensors'"):
            read_weights(tmp_path / "a.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


RECORDS = [
    ({"kwargs": {"pretrained_cfg_overlay": {"url": "http://127.0.0.1/a.pth"}}}, "'pretrained_cfg_overlay'"),
    ({"kwargs": {"norm_layer": "vilonghorn.layers.RMSNorm"}}, "vilonghorn_nano that can be made (KeyError"),
    ({"kwargs": {"global_pool": "hf-hub:timm/resnet18"}}, "global_pool='hf-hub:timm/resnet18', expected a plain name"),
    ({"kwargs": {"depth": 10**7}}, "depth=10000000, expected at most 1,000"),
    ({"kwargs": {"img_size": [10**9, 32]}}, "expected at most 20,000"),
    ({"kwargs": {"reverse": [[[False] * 100] * 100] * 100}}, "expected at most"),
    ({"kwargs": {"embed_dim": 32_768, "depth": 3}}, "numbers, but contains"),
    ({"kwargs": {"img_size": [10_001, 10_000]}}, "expected at most 20,000 in sum"),
    ({"kwargs": {"reverse": [[True] * 9] * 90}}, "numbers, but contains"),
    ({"model": "resnet18", "kwargs": {"layers": [40] * 30}}, "expected at most 1,000 in sum"),
    ({"kwargs": {"mlp_ratio": float("nan")}}, "mlp_ratio=nan"),
    ({"kwargs": [1]}, "kwargs '[1]', expected arguments by name"),
    ({"kwargs": None}, "kwargs 'None', expected arguments by name"),
    ({"model": ["vilonghorn_nano"]}, """model "['vilonghorn_nano']", expected a text"""),
    ({"model": None}, "model 'None', expected a text"),
    ({"epoch": "3"}, "epoch '3', expected a number"),
    ({"model": "hf-hub:timm/vit_tiny_patch16_224"}, "which timm would download: if you trust it"),
    ({"model": "vit_tiny_patch16_224", "kwargs": {"cache_dir": "/tmp"}}, "'cache_dir'"),
    ({"model": "vit_tinny"}, "which timm does not know"),
]


@pytest.mark.parametrize("change, sentence", RECORDS, ids=lambda value: str(value)[:60])
def test_a_record_downloads_nothing_and_makes_no_model_beyond_its_weights(tmp_path, monkeypatch, change, sentence):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("the network was asked"))
    leave_run(tmp_path / "run")
    path = tmp_path / "run" / "best.safetensors"
    weights, record = read_weights(path)
    given = change.get("kwargs", {})
    kwargs = record["kwargs"] | given if isinstance(given, dict) else given
    path.write_bytes(pack(weights, record | change | {"kwargs": kwargs}))
    reads = [lambda: load(tmp_path / "run")] + [lambda: load(NANO, str(path))] * (
        not isinstance(change.get("model"), str)
    )
    for read in reads:
        with pytest.raises(ValueError) as refused:
            read()
        assert sentence in str(refused.value) and str(path) in str(refused.value)
    if isinstance(given, dict) and "expected a plain" in sentence:  # the configuration of a published folder
        folder, model = tmp_path / "published", timm.create_model(NANO, img_size=32, depth=1)
        publish.save_pretrained(model, folder, "")
        config = json.loads((folder / "config.json").read_text())
        config["model_args"] |= given
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=f"local-dir:{folder}.*expected a plain name"):
            load(f"local-dir:{folder}")


@pytest.mark.parametrize("name, own, other", [(NANO, "pos_embed", "stem_stride"), (V2, "stem_stride", "pos_embed")])
def test_a_record_gives_a_model_the_arguments_of_its_own_class_only(name, own, other):
    check_architecture(name, {own: "none" if own == "pos_embed" else 2, "exportable": True}, "a")
    for refused in (other, "device", "file"):
        with pytest.raises(ValueError, match=f"a gives {name} the argument '{refused}', which a file"):
            check_architecture(name, {refused: "a"}, "a")


V2_BOMBS = [
    (dict(depths=[500, 499, 1, 1]), "depths=.*, expected at most 1,000 in sum"),
    (dict(embed_dims=[60_000] * 4), "embed_dims=.*, expected at most 65,536 in sum"),
    (dict(embed_dims=[8, 8, 30_000, 30_000]), "numbers, expected at most 1,000,000,000"),
    (dict(mlp_ratios=[0, 0, 0, 60_000.0]), "numbers, expected at most 1,000,000,000"),
    (dict(num_classes=10**6, embed_dims=[48, 96, 256, 5000]), "numbers, expected at most 1,000,000,000"),
    (dict(num_classes=[10**6, 1]), "expected at most 1,000,000 in sum"),
]


@pytest.mark.parametrize("kwargs, message", V2_BOMBS, ids=lambda value: str(value)[:40])
def test_a_configuration_without_weights_makes_no_model_beyond_the_limits(kwargs, message):
    with pytest.raises(ValueError, match=f"a .*{message}"):
        check_architecture("vilonghornv2_tiny", kwargs, "a")


def test_large_images_and_many_patches_are_within_the_limits_and_published_sizes_beyond_are_not(tmp_path):
    for name, kwargs in (
        ("vilonghorn_base", dict(img_size=8192, pos_embed="none")),
        ("vim_tiny", dict(img_size=[2048, 1024], patch_size=4)),
        ("vilonghornv2_base", dict(img_size=[8192, 8192], num_classes=21_843)),
    ):
        check_architecture(name, kwargs, "a")
    with pytest.raises(ValueError, match="a describes a vim_tiny of 3,[0-9,]* numbers, expected at most 1,000,000,000"):
        check_architecture("vim_tiny", dict(img_size=4096, patch_size=1), "a")
    publish.save_pretrained(timm.create_model(V2), tmp_path, "")
    config = json.loads((tmp_path / "config.json").read_text())
    config["pretrained_cfg"]["input_size"] = [3, 65_536, 65_536]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"local-dir:{tmp_path}.* input_size=.*, expected at most 20,000 in sum"):
        load(f"local-dir:{tmp_path}")


def test_random_arguments_make_a_model_or_are_refused(tmp_path):
    weights = timm.create_model(NANO, img_size=16, patch_size=4, depth=1, embed_dim=32, num_classes=3).state_dict()
    keys = (
        "img_size patch_size stride stem in_chans num_classes global_pool embed_dim depth rule reverse num_heads heads "
    )
    keys = f"{keys}d_state d_conv dt_rank expand mlp_ratio drop_path_rate directions pretrained file __class__".split()
    values = [0, 1, -1, 3, 16, 2**31, 2**80, 1e308, 0.5, float("inf"), True, None, [], [16, 16], [[True]], {}, {"a": 1}]
    values += ["", "conv", "resnet18", "a:b", "../a", [None], "mamba", "token", "vilonghorn_nano", "separate"]
    base = {"img_size": 16, "patch_size": 4, "depth": 1, "embed_dim": 32, "num_classes": 3}
    rng, made = np.random.default_rng(9), 0
    for _ in range(300):
        chosen = rng.choice(len(keys), rng.integers(1, 4), replace=False)
        kwargs = base | {keys[i]: values[rng.integers(len(values))] for i in chosen}
        try:
            check_architecture(NANO, kwargs, "a", weights)
            made += 1
        except ValueError as error:
            assert str(error).startswith("a ")
    assert made > 5


def test_the_same_weights_are_the_same_bytes_which_safetensors_reads():
    tensors = {name: torch.randn(3, 5) for name in ("b", "a", "ü")}
    files = {pack(tensors, dict(model=NANO)) for _ in range(20)}
    assert len(files) == 1
    loaded = safetensors.torch.load(files.pop())
    assert all(torch.equal(loaded[name], value) for name, value in tensors.items())


@pytest.fixture
def source():
    return timm.create_model("vilonghorn_nano", img_size=32, num_classes=5, **SMALL).eval()


def load_file(path, name="vilonghorn_nano", **kwargs):
    overlay = dict(file=str(path), num_classes=5)
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **kwargs)


@pytest.mark.parametrize("wrapper", [None, nn.DataParallel, AveragedModel])
def test_a_file_loads_exactly_into_the_same_model_also_from_a_training_checkpoint(source, wrapper, tmp_path):
    weights = source.state_dict()
    if wrapper:
        weights = {"epoch": 3, "model": wrapper(source).state_dict()}
    torch.save(weights, tmp_path / "last.pt")
    model = load_file(tmp_path / "last.pt", img_size=32, **SMALL).eval()
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(model(images), source(images))


def test_a_file_loads_into_other_sizes_and_another_class_count(source, tmp_path):
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    model = load_file(tmp_path / "weights.safetensors", img_size=32, stride=4, num_classes=9, **SMALL)
    assert model.pos_embed.shape == (1, 1 + 7 * 7, 32) and model.head.weight.shape == (9, 32)
    assert torch.equal(model.pos_embed[:, 0], source.pos_embed[:, 0])
    assert torch.equal(model.blocks[1].mixer.x_proj, source.blocks[1].mixer.x_proj)
    gray = load_file(tmp_path / "weights.safetensors", img_size=32, in_chans=1, num_classes=0, **SMALL)
    torch.testing.assert_close(gray.patch_embed.proj.weight, source.patch_embed.proj.weight.sum(1, keepdim=True))
    model = load_file(tmp_path / "weights.safetensors", img_size=(96, 64), **{**SMALL, "patch_size": 16}).eval()
    source.set_input_size(img_size=(96, 64), patch_size=16)
    images = torch.randn(1, 3, 96, 64)
    torch.testing.assert_close(model(images), source(images))


def test_a_rectangle_loads_into_another_by_its_declared_size(tmp_path):
    source = timm.create_model("vilonghorn_nano", img_size=(32, 72), num_classes=5, **SMALL)
    with torch.no_grad():  # positions that vary along the height alone
        source.pos_embed[:, 1:] = torch.arange(4.0).repeat_interleave(9)[None, :, None]
    timm.models.save_for_hf(source, tmp_path / "saved", safe_serialization=True)
    model = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True, img_size=(32, 32))
    rows = model.pos_embed[0, 1:, 0].reshape(4, 4)
    torch.testing.assert_close(rows, torch.arange(4.0)[:, None].expand(4, 4), rtol=0, atol=1e-4)


def test_positions_of_no_known_grid_are_refused(source, tmp_path):
    state_dict = source.state_dict()
    state_dict["pos_embed"] = torch.zeros(1, 1 + 13, 32)
    save_file(state_dict, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="rows for 13 patches, neither a square grid nor that of 224x224"):
        load_file(tmp_path / "weights.safetensors", img_size=32, **SMALL)


def renamed(weights):
    return {name.replace("1.mixer.D", "1.mixer.extra"): value for name, value in weights.items()}


def not_finite(weights):
    return {name: value * (math.nan if name == "blocks.1.mixer.D" else 1) for name, value in weights.items()}


@pytest.mark.parametrize(
    "name, change, options, message",
    [
        ("vim_nano", dict, {}, "does not fit the model: 2 mismatches .*blocks.0.mixer.A_log is missing, expected"),
        (NANO, dict, dict(embed_dim=96), r"\(cls_token is \(1, 1, 32\), expected \(1, 1, 96\); .*; \.\.\.\)"),
        ("vilonghorn_nano", renamed, dict(num_classes=9), "1.mixer.D is missing, .*extra is .*, expected no such name"),
        ("vilonghorn_nano", not_finite, {}, r"1 of \d+ tensors .* hold NaN or infinity \(blocks.1.mixer.D\)"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_the_first_mismatches(
    source, tmp_path, name, change, options, message
):
    save_file(change(source.state_dict()), tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=message):
        load_file(tmp_path / "weights.safetensors", name=name, **{"img_size": 32, **SMALL, **options})


@pytest.mark.parametrize("prefix, more, remedy", [("net.model.", [], True), ("model.", ["loss.weight"], False)])
def test_weights_of_a_wrapped_model_are_refused_with_a_name_that_was_found(source, tmp_path, prefix, more, remedy):
    weights = {prefix + name: value for name, value in source.state_dict().items()}
    save_file(weights | {name: torch.ones(2) for name in more}, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError) as refused:
        load_file(tmp_path / "weights.safetensors", img_size=32, **SMALL)
    message = str(refused.value)
    assert "(cls_token is missing, expected (1, 1, 32); " in message
    assert re.search(rf"; ({prefix}[\w.]+|loss.weight) is \([\d, ]+\), expected no such name", message)
    assert (f"All names start with '{prefix}': load {{name.removeprefix('{prefix}')" in message) is remedy
    part = "The model's names start with 'model.': load {name.removeprefix('model.'): t for name, t in ..."
    assert (part in message) is not remedy


@pytest.mark.parametrize("others", [{}, {"decoder.cls_token": torch.zeros(1)}])
def test_the_prefix_that_a_message_names_is_that_of_most_names(others):
    model = timm.create_model("vilonghorn_nano", depth=2, embed_dim=32, patch_size=4, img_size=16)
    weights = {f"encoder.{name}": value for name, value in model.state_dict().items() if others or name != "cls_token"}
    with pytest.raises(ValueError, match="names start with 'encoder.': load"):
        fit_state_dict(others | weights, model, True)
    with pytest.raises(ValueError, match="Make the model with the rule"):
        fit_state_dict(model.state_dict() | weights, model, True)


@pytest.mark.parametrize("name", [NANO, V2])
def test_an_argument_that_a_model_does_not_have_is_named_with_those_that_it_has(name):
    wrong = dict(proj_drop_rate=0.1, attn_drop_rate=0.1, output_fmt="NHWC")
    with pytest.raises(TypeError, match=f"{name} has no argument attn_drop_rate, output_fmt, proj_drop_rate, expected"):
        timm.create_model(name, **wrong)
    with pytest.raises(TypeError, match="no argument out_indices, expected some of img_size, .*drop_path_rate"):
        timm.create_model(name, out_indices=(1,))


def test_another_class_count_than_declared_is_refused_even_where_the_head_is_dropped(source, tmp_path):
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    wrong = dict(file=str(tmp_path / "weights.safetensors"), num_classes=7)
    with pytest.raises(ValueError, match=r"head.weight is \(5, 32\), expected \(7, 32\)"):
        timm.create_model("vilonghorn_nano", True, pretrained_cfg_overlay=wrong, img_size=32, num_classes=7, **SMALL)


def test_a_pickle_is_never_executed(source, tmp_path):
    class Trap:
        def __reduce__(self):
            return (tmp_path.joinpath("sprung").touch, ())

    torch.save({"model": source.state_dict(), "trap": Trap()}, tmp_path / "weights.pth")
    with pytest.raises(RuntimeError, match="weights_only=True blocked"):
        load_file(tmp_path / "weights.pth", img_size=32, **SMALL)
    assert not (tmp_path / "sprung").exists()
