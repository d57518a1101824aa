"""benchmarks/front.py: tables have the figures of the report, failures are named, interrupted runs lose nothing."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

OURS, SMALL, MEDIUM, EFFICIENTVIT = (
    "vilonghornv2_tiny",
    "mobilenetv4_conv_small",
    "mobilenetv4_conv_medium",
    "efficientvit_b1",
)
LSNET_LIKE = """
from timm.models.registry import register_model
default_cfgs = {"lsnet_t": {"hf_hub": "as in timm 0.5"}}
class SKA:
    pass
class LSNet(torch.nn.Module):
    def __init__(self, img_size=224, num_classes=1000, distillation=False, depth=0):
        super().__init__()
        self.img_size, self.depth, self.ska = img_size, depth, SKA().forward
@register_model
def lsnet_t(num_classes=1000, distillation=False, pretrained=False):
    options = dict(img_size=224, num_classes=num_classes, distillation=distillation, depth=3)
    return _create_lsnet("lsnet_t", pretrained=pretrained, **options)
"""


@pytest.fixture
def front(script):
    return script("benchmarks/front")


def row(model, form, ms, size=224, run="2026-01-01 00:00:00", problem=None):
    ms = ms and [ms, ms]
    return dict(model=model, form=form, size=size, batch=1, threads=2, run=run, ms=ms, problem=problem)


def write(path, rows):
    machine = dict(cpu="Invented", cores=2, load=0, torch="1", timm="1", onnxruntime="1", command="invented")
    runs = {date: machine for date in ("2026-01-01 00:00:00", "2026-01-02 00:00:00")}
    path.write_text(json.dumps(dict(runs=runs, rows=rows, **costs(rows))))


def costs(rows):
    return dict(parameters={row["model"]: 5_362_132 for row in rows}, gmacs={row["model"]: 0.538 for row in rows})


@pytest.fixture
def interleaved(front, monkeypatch):
    """Replaces the measurement by 3 ms of each step; a candidate in `failing` has a problem, or raises it."""
    failing = {}

    def run_interleaved(candidates, steps, rounds, *, threads):
        name = next(iter(candidates), None)
        if isinstance(problem := failing.get(name), BaseException):
            raise problem
        figures = dict(ms=None if problem else [3.0] * rounds, memory_gb=None, problem=problem)
        return {step: {name: dict(figures)} for step in steps}

    monkeypatch.setattr(front, "run_interleaved", run_interleaved)
    monkeypatch.setattr(front, "ProcessPoolExecutor", lambda workers, context: ThreadPoolExecutor(workers))
    return failing


def test_ratios_are_to_the_fastest_of_each_class_in_the_same_run(front):
    rows = [row(OURS, "eager", 30.0), row(OURS, "ort", 15.0), row(OURS, "int8", 5.0)]
    rows += [row(MEDIUM, "onnxruntime", 10.0), row(EFFICIENTVIT, "onnxruntime", 12.0), row(SMALL, "onnxruntime", 5.0)]
    rows += [row("repvit_m1", "onnxruntime", 9.0, run="2026-01-02 00:00:00")]
    [line] = front.summary({(224, 1, 2): rows})
    assert list(line.values()) == ["224", "1", "2", f"3.00 ({SMALL})", f"1.50 ({MEDIUM})", "-", "-"]  # none in int8
    [line] = front.summary({(512, 1, 2): [row(OURS, "eager", 90.0, 512)]})
    assert list(line.values())[3:] == ["-"] * 4


def test_every_rival_is_in_the_class_of_its_top1(front):
    fast, accurate = front.CLASSES.values()
    assert [*fast, *accurate] == list(front.RIVALS)
    assert max(front.TOP1[name] for name in fast) < 76.5 < min(front.TOP1[name] for name in accurate)


def test_latencies_are_those_of_the_fastest_form_of_each_size(front):
    rows = [row(OURS, "eager", 30.0), row(OURS, "ort", 15.0), row(OURS, "int8", 5.0), row(OURS, "eager", 90.0, 512)]
    rows += [row(MEDIUM, "onnxruntime", 10.0), row(EFFICIENTVIT, "int8", None, 512, problem="no operator")]
    lines = front.latencies(dict(rows=rows, **costs(rows)), [OURS, MEDIUM, EFFICIENTVIT])
    assert [list(line.values()) for line in lines] == [
        [f"`{OURS}`", "5.4 M", "0.54", "unknown", "15.0 / 5.0", "90.0 / -"],
        [f"`{MEDIUM}`", "5.4 M", "0.54", "79.1 (e500_r224_in1k)", "10.0 / -", "- / -"],
    ]
    assert list(lines[0])[4:] == ["224 px, 2 threads", "512 px, 2 threads"]


def test_lsnets_operator_weighs_the_neighbours_of_each_pixel(front):
    x, weights = torch.randn(2, 6, 4, 5), torch.randn(2, 3, 9, 4, 5)
    neighbours = torch.nn.functional.unfold(x, 3, padding=1).view(2, 2, 3, 9, 4, 5)
    expected = torch.einsum("bgcnhw,bcnhw->bgchw", neighbours, weights).reshape(2, 6, 4, 5)
    torch.testing.assert_close(front.weigh_neighbours(x, weights), expected)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--code", "absent"], "there is no folder absent"),
        (["--files", "absent"], "there is no folder absent"),
        (
            ["--models", "lsnet_t", "--code", "."],
            "no code of lsnet_t: clone https://github.com/jameslahm/lsnet at commit",
        ),
        (["--models", SMALL, "repvit"], "no model repvit: see timm.list_models(), or take repnext_m1"),
        (["--models", SMALL, "--forms", "ort"], "--forms ort are of vilonghornv2_tiny and vilonghorn_tiny only"),
    ],
)
def test_bad_input_is_refused_in_one_sentence_before_work(front, tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        front.main([*arguments, "--json", "front.json"])
    assert said in capsys.readouterr().err and not (tmp_path / "front.json").exists()


def test_models_whose_code_is_not_there_are_left_out_by_name(front, tmp_path, capsys, interleaved, monkeypatch):
    monkeypatch.setattr(front, "create", lambda model, size, code: torch.nn.Identity())
    assert front.main(["--forms", "eager", "--sizes", "64", "--json", str(tmp_path / "front.json")]) == 0
    assert "left out: no code of repnext_m1, lsnet_t, lsnet_s: clone" in capsys.readouterr().out
    found = {row["model"] for row in json.loads((tmp_path / "front.json").read_text())["rows"]}
    assert found == {OURS, *front.RIVALS} - set(front.CODE)


def test_a_model_of_a_clone_is_made(front, tmp_path):
    for folder, module, text in (
        ("RepNeXt", "repnext", "repnext_m1 = lambda: torch.nn.Conv2d(3, 4, 5)"),
        ("lsnet", "lsnet", LSNET_LIKE),
    ):
        (tmp_path / folder / "model").mkdir(parents=True)
        (tmp_path / folder / "model" / "__init__.py").touch()
        (tmp_path / folder / "model" / f"{module}.py").write_text(f"import torch\n{text}\n")
    assert front.create("repnext_m1", 64, tmp_path).out_channels == 4
    lsnet = front.create("lsnet_t", 64, tmp_path)
    assert (lsnet.img_size, lsnet.depth) == (64, 3)
    assert lsnet.ska(torch.ones(1, 2, 4, 4), torch.ones(1, 2, 9, 4, 4))[0, 0, 0, 0] == 4


def test_files_are_kept_and_not_written_again(front, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(front, "export", lambda model, kind, path, weights: path.write_text(made.append(path) or ""))
    monkeypatch.setattr(front, "quantize", lambda source, path, shape: path.write_text(source.name))
    for size in (224, 512):  # ours take all sizes
        path = front.write_file(OURS, "int8", size, 1, tmp_path, None)
    assert path.read_text() == f"{OURS}-onnxruntime.onnx" and len(made) == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"{OURS}-int8.onnx", f"{OURS}-onnxruntime.onnx"]


def test_a_candidate_that_fails_is_named_and_the_others_are_measured(front, tmp_path, capsys, interleaved, monkeypatch):
    def write_file(model, *rest):
        raise RuntimeError(f"no operator for {model}")

    monkeypatch.setattr(front, "write_file", write_file)
    interleaved[MEDIUM] = "OutOfMemoryError: 8 GB"
    options = ["--models", OURS, MEDIUM, "--sizes", "64", "--threads", "2", "--rounds", "3", "--forms", "eager", "ort"]
    assert front.main([*options, "--json", str(tmp_path / "front.json")]) == 1
    output = capsys.readouterr().out.partition("not measured: ")[2]
    assert f"model {MEDIUM}, form eager, size 64, batch 1, threads 2: OutOfMemoryError: 8 GB" in output
    assert f"model {OURS}, form ort, size 64, batch 1, threads 2: RuntimeError: no operator for {OURS}" in output
    report = json.loads((tmp_path / "front.json").read_text())
    found = {(r["model"], r["form"]): r["ms"] for r in report["rows"]}
    assert found == {(OURS, "eager"): [3.0] * 3 * front.SAMPLES, (OURS, "ort"): None, (MEDIUM, "eager"): None}
    assert report["parameters"][OURS] == 5_362_132 and round(report["gmacs"][OURS], 2) == 0.54


def test_an_interrupted_run_keeps_what_is_there(front, tmp_path, interleaved):
    report, earlier = tmp_path / "front.json", [row(OURS, "eager", 90.0, 512), row(OURS, "eager", 30.0)]
    write(report, earlier)
    interleaved[EFFICIENTVIT] = KeyboardInterrupt()
    command = ["--models", OURS, MEDIUM, EFFICIENTVIT, "--sizes", "224", "--threads", "2", "--forms", "eager"]
    command += ["--json", str(report)]
    with pytest.raises(KeyboardInterrupt):
        front.main(command)
    rows = json.loads(report.read_text())["rows"]
    assert rows[:2] == earlier and [(r["model"], r["ms"]) for r in rows[2:]] == [(MEDIUM, [3.0] * front.SAMPLES)]
    interleaved.clear()
    assert front.main(command) == 0
    rows = json.loads(report.read_text())["rows"]
    assert rows[0] == earlier[0] and [r["ms"] for r in rows[1:]] == [[3.0] * 2 * front.SAMPLES] * 3  # one stays
