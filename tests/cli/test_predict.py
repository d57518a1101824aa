"""The command that names what images show: against the model asked by hand, and where something is wrong."""

import json
import re

import composition
import pytest
import timm
import torch
from left_run import NAMES, leave_run, make_image

from vilonghorn.engine.checkpoint import save_weights
from vilonghorn.tools.loaded_model import _pretrained_class_names, key_value, load_model, read_record
from vilonghorn.tools.predict import find_images, main

NANO = "vilonghorn_nano"
ARGUMENTS = dict(num_classes=6, img_size=16, patch_size=4, depth=2, embed_dim=32)
KWARGS = ["--model-kwargs", *(f"{key}={value}" for key, value in ARGUMENTS.items())]


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run", leave_run(tmp_path / "run")


def asked(model, image, top=5):
    """What the model says of one input, without the command."""
    with torch.no_grad():
        values, classes = model(image).softmax(1)[0].sort(descending=True)
    return [(NAMES[c], pytest.approx(p, abs=1e-5)) for c, p in zip(classes.tolist()[:top], values.tolist())]


def test_files_and_folders_get_what_the_model_says_of_each(run, tmp_path, capsys):
    directory, model = run
    files = ["z.png", "in/a.png", "in/b/c.png", "in/d.PNG"]
    inputs = {name: make_image(tmp_path / name, seed) for seed, name in enumerate(files)}
    make_image(tmp_path / "in/.hidden/e.png", 9)
    (tmp_path / "in/notes.txt").write_text("no image")
    names = [str(tmp_path / "z.png"), str(tmp_path / "in")]
    assert main([str(directory), *names, "--json", "--batch-size", "3", "--workers", "1"]) == 0
    out, err = capsys.readouterr()
    results = [json.loads(line) for line in out.splitlines()]
    assert [r["image"] for r in results] == [str(tmp_path / name) for name in inputs]
    for result, image in zip(results, inputs.values()):
        assert [(p["name"], p["probability"]) for p in result["predictions"]] == asked(model, image)
        assert all(NAMES[p["class"]] == p["name"] for p in result["predictions"])
    assert err == ""

    assert main([str(directory), str(tmp_path / "z.png"), "--top", "2"]) == 0
    (first, p), (second, q) = asked(model, inputs["z.png"], 2)
    named = f"{first} {100 * p.expected:.1f}%, {second} {100 * q.expected:.1f}%"
    assert capsys.readouterr().out == f"{tmp_path / 'z.png'}: {named}\n"


def test_what_cannot_be_read_is_named_and_the_rest_go_on(run, tmp_path, capsys):
    directory, _ = run
    for seed, name in enumerate(["1.png", "2.png", "3.png"]):
        make_image(tmp_path / "in" / name, seed)
    (tmp_path / "in/2.png").write_bytes((tmp_path / "in/2.png").read_bytes()[:200])
    (tmp_path / "empty").mkdir()
    names = [str(tmp_path / name) for name in ("in", "missing.png", "empty")]
    for batch_size in ("1", "8"):
        assert main([str(directory), *names, "--json", "--batch-size", batch_size]) == 1
        out, err = capsys.readouterr()
        results = [json.loads(line) for line in out.splitlines()]
        assert ["predictions" in r for r in results] == [True, False, True, False, False]
        sentences = (
            "2.png: not a readable image",
            "missing.png: there is no such file",
            "empty: no image in this folder",
        )
        for result, sentence in zip([results[1], *results[3:]], sentences):
            assert sentence in result["error"] and f"error: {result['error']}" in err
    assert main([str(directory), *names]) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2 and len(err.splitlines()) == 3


def test_names_are_printed_escaped_and_given_to_json_as_they_are(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("left_run.NAMES", ["\x1b[31m"] * 6)
    leave_run(tmp_path / "other")
    name = "\x1b[2J.png"
    make_image(tmp_path / name, 0)
    assert main([str(tmp_path / "other"), str(tmp_path), "--top", "1"]) == 0
    assert re.search(r"/\\x1b\[2J.png: \\x1b\[31m [0-9.]+%\n$", capsys.readouterr().out)
    assert main([str(tmp_path / "other"), str(tmp_path / name), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["image"] == str(tmp_path / name) and result["predictions"][0]["name"] == "\x1b[31m"


def test_a_closed_pipe_is_not_an_error_of_the_model(run, tmp_path, monkeypatch):
    make_image(tmp_path / "a.png", 0)
    monkeypatch.setattr("vilonghorn.tools.predict.tqdm.write", lambda *_: exec("raise BrokenPipeError"))
    with pytest.raises(BrokenPipeError):  # `vilonghorn` then ends in silence
        main([str(run[0]), str(tmp_path / "a.png")])


def test_the_limit_of_pixels_is_an_option(run, tmp_path, capsys):
    make_image(tmp_path / "a.png", 0)
    arguments = [str(run[0]), str(tmp_path / "a.png"), "--max-pixels"]
    assert main([*arguments, "255"]) == 1
    assert "a.png: 16x16 pixels are more than the limit of 255 pixels" in capsys.readouterr().err
    assert main([*arguments, "256"]) == 0


def test_weights_in_a_file_bring_their_names_if_they_have_any(run, tmp_path, capsys):
    directory, model = run
    image = make_image(tmp_path / "a.png", 1)
    torch.save(model.state_dict(), tmp_path / "plain.pth")
    for file, named in ((directory / "best.safetensors", True), (tmp_path / "plain.pth", False)):
        command = [NANO, str(tmp_path / "a.png"), "--json", "--checkpoint", str(file)]
        assert main(command if named else [*command, *KWARGS]) == 0  # the file of a run has its model's arguments
        predictions = json.loads(capsys.readouterr().out)["predictions"]
        # The registered model normalises as for ImageNet, the run did not.
        mean, std = (torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        pixels = image[0] * torch.tensor((0.5, 0.6, 0.7))[:, None, None] + torch.tensor((0.5, 0.4, 0.3))[:, None, None]
        loaded = load_model(NANO, str(file), {} if named else ARGUMENTS)
        assert loaded.mean == (0.485, 0.456, 0.406) and loaded.transform.transforms[0].size == 18  # crop_pct 0.875
        assert torch.allclose(loaded.denormalize((pixels - mean) / std), pixels.permute(1, 2, 0), atol=1e-6)
        assert [p["name"] for p in predictions] == ([NAMES[p["class"]] for p in predictions] if named else [None] * 5)
    assert main([*command[:2], "--checkpoint", str(tmp_path / "plain.pth"), *KWARGS]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'a.png'}: {predictions[0]['class']} ")


def test_a_file_of_vims_authors_is_read(tmp_path):
    weights = composition.official_weights(dim=32, depth=2, classes=6, patches=4)
    torch.save({"model": weights}, tmp_path / "official.pth")
    kwargs = dict(num_classes=6, img_size=32, depth=2, embed_dim=32)
    loaded, image = load_model("vim_nano", str(tmp_path / "official.pth"), kwargs), torch.randn(2, 3, 32, 32)
    expected = composition.vim(weights, image)
    torch.testing.assert_close(loaded.model(image).double(), expected, rtol=0, atol=1e-4)


def test_published_weights_bring_the_names_of_their_classes():
    names = _pretrained_class_names(timm.create_model(NANO, img_size=32))
    assert len(names) == 1000 and names[0] == "tench, Tinca tinca" and "toilet tissue" in names[999]
    assert _pretrained_class_names(timm.create_model(NANO, img_size=32, num_classes=10)) is None
    cfg = dict(num_classes=2, label_names=("a", "b"))
    own = timm.create_model(NANO, img_size=32, num_classes=2, pretrained_cfg_overlay=cfg)
    assert _pretrained_class_names(own) == ["a", "b"]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["runs/none-so-far"], "runs/none-so-far is neither .* timm knows; none of the [0-9]+ known names is near it$"),
        (["vilonghorn_nano.icons"], r"vilonghorn_nano\.icons: Invalid pretrained tag \(icons\)"),
        (["vilonghorn_nanno"], "vilonghorn_nanno is neither .* nearest known are .*vilonghorn_nano"),
        ([NANO], "^error: no pretrained weights for vilonghorn_nano: none are published yet; give a run"),
        ([NANO, "--checkpoint", "nowhere.pth"], "there are no weights nowhere.pth"),
        ([NANO, "--checkpoint", "{run}/best.safetensors", "--model-kwargs", "depth=3"], "does not hold weights of vil"),
        (["vim_nano", "--checkpoint", "{run}/best.safetensors"], "holds weights of vilonghorn_nano, not of vim_nano"),
        ([NANO, "--checkpoint", "{run}/config.yaml"], "config.yaml does not hold weights of vilonghorn_nano"),
        ([NANO, "--checkpoint", "random", "--model-kwargs", "hue=3"], "cannot make vilonghorn_nano .*hue"),
        ([NANO, "--checkpoint", "random", "--model-kwargs", "in_chans=1"], "images of 1 channels"),
        ([NANO, "--checkpoint", "random", "--model-kwargs", "num_classes=0", "img_size=32"], "has no classifier"),
        (["{run}", "--checkpoint", "first"], "--checkpoint is 'first', expected best or last"),
        (["{run}", "--checkpoint", "last"], "there are no weights .*last.safetensors"),
        (["{run}", "--model-kwargs", "depth=3"], "leave out --model-kwargs"),
        (["{run}", "--device", "abacus"], "abacus"),
    ],
)
def test_a_model_that_cannot_be_asked_gets_one_sentence(run, tmp_path, arguments, sentence, capsys):
    make_image(tmp_path / "a.png", 1)
    model, *options = [argument.format(run=run[0]) for argument in arguments]
    assert main([model, str(tmp_path / "a.png"), *options]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line]
    assert out == "" and len(lines) == 1
    assert re.search(sentence, lines[0]), lines[0]


def test_a_run_of_a_model_with_a_tag_is_a_run_of_the_model(tmp_path):
    file = tmp_path / "best.safetensors"
    save_weights(file, {}, dict(model=f"{NANO}.icons480", kwargs=dict(depth=2, drop_path_rate=0.1)))
    assert read_record(file, NANO)["kwargs"] == dict(depth=2)
    with pytest.raises(ValueError, match=r"holds weights of vilonghorn_nano\.icons480, not of vim_nano"):
        read_record(file, "vim_nano")


@pytest.mark.parametrize("given", ["img_size", "a.jpg", "=3"])
def test_an_argument_of_the_model_without_a_value_is_refused(given, capsys):
    with pytest.raises(SystemExit):
        main([NANO, "--model-kwargs", "depth=2", given])
    assert f"'{given}' is not KEY=VALUE; give images and other arguments before it" in capsys.readouterr().err


def test_arguments_of_the_model_are_literals_or_strings():
    values = {"a=3": 3, "b=[0.5, 2]": [0.5, 2], "c=avg": "avg", "d=true": True, "e=None": None, "f=x=y": "x=y"}
    assert dict(map(key_value, values)) == dict(zip("abcdef", values.values()))


def test_weights_that_give_no_numbers_are_refused(tmp_path, capsys):
    model = leave_run(tmp_path / "run")
    state, sentences = model.state_dict(), ("hold NaN or infinity", "not finite numbers")
    make_image(tmp_path / "a.png", 1)
    for value, sentence in zip((float("nan"), 3e38), sentences):  # the second overflows in a sum
        torch.save(state | {"head.weight": torch.full_like(state["head.weight"], value)}, tmp_path / "a.pth")
        assert main([NANO, str(tmp_path / "a.png"), "--checkpoint", str(tmp_path / "a.pth"), *KWARGS]) == 2
        assert sentence in capsys.readouterr().err


def test_a_folder_is_searched_in_order_and_a_file_taken_whatever_its_name(tmp_path):
    for name in ("b/2.png", "b/10.jpg", "a/x.webp"):
        make_image(tmp_path / name, 0)
    odd = tmp_path / "photo.data"
    inside = [str(tmp_path / name) for name in ("a/x.webp", "b/10.jpg", "b/2.png")]
    assert find_images([str(odd), str(tmp_path)]) == [str(odd), *inside]
