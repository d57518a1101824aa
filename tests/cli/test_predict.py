"""`vilonghorn predict` prints what the model says, and names what it cannot read."""

import io
import json
import re
import sys
from dataclasses import replace

import pytest
import torch
from left_run import NAMES, leave_run, make_image

import vilonghorn
from vilonghorn.cli import main
from vilonghorn.cli.arguments import key_value


@pytest.fixture
def run(tmp_path):
    return str(tmp_path / "run"), leave_run(tmp_path / "run")


def expected(model, image, top=5):
    """Names and probabilities, computed without the command."""
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
    assert main(["predict", directory, *names, "--json", "--batch-size", "3", "--workers", "1"]) == 0
    out, err = capsys.readouterr()
    results = [json.loads(line) for line in out.splitlines()]
    assert [r["image"] for r in results] == [str(tmp_path / name) for name in inputs]
    for result, image in zip(results, inputs.values()):
        assert [(p["name"], p["probability"]) for p in result["predictions"]] == expected(model, image)
        assert all(NAMES[p["class"]] == p["name"] for p in result["predictions"])
    assert err == f"{tmp_path / 'in'}: 1 of 4 files are left out: 1 .txt\n"

    assert main(["predict", directory, str(tmp_path / "z.png"), "--top", "2"]) == 0
    (first, p), (second, q) = expected(model, inputs["z.png"], 2)
    named = f"{first} {100 * p.expected:.1f}%, {second} {100 * q.expected:.1f}%"
    assert capsys.readouterr().out == f"{tmp_path / 'z.png'}: {named}\n"


def test_a_crop_that_is_given_is_used_and_one_that_cuts_is_said_with_the_options(run, tmp_path, capsys):
    make_image(tmp_path / "a.png", 0)
    command = ["predict", run[0], str(tmp_path / "a.png"), "--json"]
    assert main([*command, "--crop-pct", "0.5"]) == 0
    out, err = capsys.readouterr()
    assert "shows 25% of an image (median); --crop-mode squash or border with --crop-pct 1 shows all of it" in err
    loaded = vilonghorn.load(run[0])
    transform = replace(loaded, preprocessing=loaded.preprocessing | {"crop_pct": 0.5}).transform
    (first, _), *_ = expected(loaded.model, transform(vilonghorn.read_image(tmp_path / "a.png"))[None], 1)
    assert json.loads(out)["predictions"][0]["name"] == first
    with pytest.raises(SystemExit):
        main([*command, "--crop-pct", "1.5"])
    error = "error: --crop-pct is 1.5, expected a number above 0, at most 1; see vilonghorn predict --help\n"
    assert capsys.readouterr().err == error


def test_what_cannot_be_read_is_named_and_the_rest_go_on(run, tmp_path, capsys):
    for seed, name in enumerate(["1.png", "2.png", "3.png"]):
        make_image(tmp_path / "in" / name, seed)
    (tmp_path / "in/2.png").write_bytes((tmp_path / "in/2.png").read_bytes()[:200])
    (tmp_path / "empty").mkdir()
    command = ["predict", run[0], *(str(tmp_path / name) for name in ("in", "missing.png", "empty"))]
    for batch_size in ("1", "8"):
        assert main([*command, "--json", "--batch-size", batch_size]) == 1
        out, err = capsys.readouterr()
        results = [json.loads(line) for line in out.splitlines()]
        assert ["predictions" in r for r in results] == [True, False, True, False, False]
        words = ("2.png: not a readable image", "missing.png: there is no such file", "empty: no image in this folder")
        for result, sentence in zip([results[1], *results[3:]], words):
            assert sentence in result["error"] and f"error: {result['error']}" in err
    (folder,) = vilonghorn.predict(vilonghorn.load(run[0]), [str(tmp_path / "in")])
    assert f"{tmp_path / 'in'}: is a folder; give its images" in folder["error"]
    assert main([*command, "--max-pixels", "255"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "1.png: too many pixels (16x16 are more than the limit of 255)" in err


@pytest.mark.parametrize(("name", "status"), [("b.CR2", 1), ("deep/b.svg", 1), ("b.csv", 0), (".b.heic", 0)])
def test_images_of_a_folder_that_are_left_out_are_no_success(run, tmp_path, capsys, name, status):
    for file in ("in/a.png", f"in/{name}"):
        make_image(tmp_path / "made.png", 0)
        (tmp_path / file).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "made.png").rename(tmp_path / file)
    assert main(["predict", run[0], str(tmp_path / "in")]) == status
    out, err = capsys.readouterr()
    assert out.count("a.png: ") == 1 and ("1 of 2 files are left out" in err) == (name[0] != ".")


def test_names_are_printed_escaped_and_given_to_json_as_they_are(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("left_run.NAMES", ["\x1b[31m"] * 6)
    leave_run(tmp_path / "run")
    image = tmp_path / "\x1b[2J.png"
    make_image(image, 0)
    assert main(["predict", str(tmp_path / "run"), str(tmp_path), "--top", "1"]) == 0
    assert re.search(r"/\\x1b\[2J.png: \\x1b\[31m [0-9.]+%\n$", capsys.readouterr().out)
    assert main(["predict", str(tmp_path / "run"), str(image), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["image"] == str(image) and result["predictions"][0]["name"] == "\x1b[31m"


@pytest.mark.parametrize("given", ["img_size", "a.jpg", "=3"])
def test_an_argument_of_the_model_without_a_value_is_refused(given, capsys):
    with pytest.raises(SystemExit):
        main(["predict", "vilonghorn_nano", "--model-kwargs", "depth=2", given])
    assert f"'{given}' is not KEY=VALUE; give images and other arguments before it" in capsys.readouterr().err


def test_arguments_of_the_model_are_literals_or_strings():
    values = {"a=3": 3, "b=[0.5, 2]": [0.5, 2], "c=avg": "avg", "d=true": True, "e=None": None, "f=x=y": "x=y"}
    assert dict(map(key_value, values)) == dict(zip("abcdef", values.values()))


def test_names_that_the_locale_lacks_are_printed_escaped(tmp_path, monkeypatch):
    monkeypatch.setattr("left_run.NAMES", ["\u00e9t\u00e9"] * 6)
    leave_run(tmp_path / "run")
    make_image(tmp_path / "\u65e5\u672c.png", 0)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert main(["predict", str(tmp_path / "run"), str(tmp_path), "--top", "1"]) == 0
    sys.stdout.flush()
    assert b"/\\u65e5\\u672c.png: \\xe9t\\xe9 " in sys.stdout.buffer.getvalue()
