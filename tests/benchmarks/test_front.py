"""benchmarks/front.py: tables have the figures of the report, failures are named, interrupted runs lose nothing."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

OURS, LEVIT, MOBILENET, EFFICIENTVIT = "vilonghornv2_tiny", "levit_192", "mobilenetv4_conv_medium", "efficientvit_b1"


@pytest.fixture
def front(script):
    return script("benchmarks/front")


def row(model, form, ms, size=224, run="2026-01-01 00:00:00", problem=None):
    ms = ms and [ms, ms]
    return dict(model=model, form=form, size=size, batch=1, threads=2, run=run, ms=ms, problem=problem)


def write(path, rows):
    machine = dict(cpu="Invented", cores=2, load=0, torch="1", timm="1", onnxruntime="1", command="invented")
    runs = {date: machine for date in ("2026-01-01 00:00:00", "2026-01-02 00:00:00")}
    parameters = {row["model"]: 5_362_132 for row in rows}
    path.write_text(json.dumps(dict(runs=runs, parameters=parameters, rows=rows)))


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


def test_ratios_are_to_the_faster_peer_of_the_same_run(front):
    rows = [row(OURS, "eager", 30.0), row(OURS, "ort", 15.0), row(OURS, "int8", 5.0)]
    rows += [row(MOBILENET, "onnxruntime", 10.0), row(EFFICIENTVIT, "onnxruntime", 12.0)]
    rows += [row("repvit_m1", "onnxruntime", 9.0, run="2026-01-02 00:00:00")]
    [line] = front.summary({(224, 1, 2): rows})
    assert list(line.values()) == ["224", "1", "2", "1.50 (ort)", "-", f"1.50 ({MOBILENET})"]  # no peer in int8
    [line] = front.summary({(512, 1, 2): [row(OURS, "eager", 90.0, 512)]})
    assert list(line.values())[3:] == ["-", "-", "-"]


def test_latencies_are_those_of_the_fastest_form_of_each_size(front):
    rows = [row(OURS, "eager", 30.0), row(OURS, "ort", 15.0), row(OURS, "int8", 5.0), row(OURS, "eager", 90.0, 512)]
    rows += [row(MOBILENET, "onnxruntime", 10.0), row(LEVIT, "eager", None, 512, problem="fits 224 px only")]
    report = dict(rows=rows, parameters={row["model"]: 5_362_132 for row in rows})
    found = {line.pop("model"): list(line.values()) for line in front.latencies(report, batch=1, threads=2)}
    assert found[f"`{OURS}`"] == ["5.4 M", "-", "15.0", "90.0", "5.0", "-"]
    assert found[f"`{MOBILENET}`"] == ["5.4 M", "79.1 (e500_r224_in1k)", "10.0", "-", "-", "-"]
    assert found[f"`{LEVIT}`"][2:] == ["-"] * 4
    assert front.latencies(report, batch=8, threads=2) == []


def test_a_candidate_that_fails_is_named_and_the_others_are_measured(front, tmp_path, capsys, interleaved, monkeypatch):
    def write_file(model, *rest):
        raise RuntimeError(f"no operator for {model}")

    monkeypatch.setattr(front, "write_file", write_file)
    interleaved[MOBILENET] = "OutOfMemoryError: 8 GB"
    models = ["--models", OURS, MOBILENET, LEVIT, "--sizes", "64", "--rounds", "3"]
    assert front.main([*models, "--json", str(tmp_path / "front.json")]) == 1
    output = capsys.readouterr().out.partition("not measured: ")[2]
    assert f"model {MOBILENET}, form eager, size 64, batch 1, threads 2: OutOfMemoryError: 8 GB" in output
    assert f"model {OURS}, form ort, size 64, batch 1, threads 2: RuntimeError: no operator for {OURS}" in output
    assert LEVIT not in output  # left out, which is no failure
    found = {(r["model"], r["form"]): r for r in json.loads((tmp_path / "front.json").read_text())["rows"]}
    assert found[OURS, "eager"]["ms"] == [3.0] * 3 * front.SAMPLES
    assert found[LEVIT, "eager"]["problem"] == front.ONLY[LEVIT][1]


def test_an_interrupted_run_keeps_what_is_there(front, tmp_path, interleaved):
    report, earlier = tmp_path / "front.json", [row(OURS, "eager", 90.0, 512), row(OURS, "eager", 30.0)]
    write(report, earlier)
    interleaved[EFFICIENTVIT] = KeyboardInterrupt()
    command = ["--models", OURS, MOBILENET, EFFICIENTVIT, "--sizes", "224", "--forms", "eager", "--json", str(report)]
    with pytest.raises(KeyboardInterrupt):
        front.main(command)
    rows = json.loads(report.read_text())["rows"]
    assert rows[:2] == earlier and [(r["model"], r["ms"]) for r in rows[2:]] == [(MOBILENET, [3.0] * front.SAMPLES)]
    interleaved.clear()
    assert front.main(command) == 0
    rows = json.loads(report.read_text())["rows"]
    assert rows[0] == earlier[0] and [r["ms"] for r in rows[1:]] == [[3.0] * 2 * front.SAMPLES] * 3  # one stays
