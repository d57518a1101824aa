"""Times the scan beside the usual loop in torch and the roofline of the machine.

`python benchmarks/scan.py [--device cuda] [--json FILE]` puts its rows into the report FILE of
`python benchmarks/models.py --json FILE`, or makes it. pages.py fills the tables of the pages from such reports.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from candidates import Candidate, measure
from interleaved import STEPS, Row, Steps
from page_tables import Line, by, figure, markdown, median, ratio
from torch import Tensor

from vilonghorn.data.atomic_files import write_json
from vilonghorn.ops import backends, scan
from vilonghorn.ops.rules import RULES

LOOP, ROOFLINE = "torch loop", "roofline"


class Workload(NamedTuple):
    """Sizes of a scan; each direction reads its own x."""

    B: int
    L: int
    D: int
    N: int
    G: int = 1


# A tiny model at 224 px; on a GPU also its two directions at once, and one image of 1248 px.
WORKLOADS = {
    "cpu": [Workload(8, 197, 384, 16)],
    "cuda": [Workload(128, 197, 384, 16), Workload(128, 197, 384, 16, 2), Workload(1, 6084, 384, 16, 2)],
}

# Multiply-add slots of one token: (for each state of a channel, for the channel). A slot is one lane of an instruction
# that multiplies, adds or both; an exponential counts 12, a division 10. Backward recomputes the states from
# saved states. Loads, stores and sums over channels are not counted.
SLOTS = {
    # s += (e k) (x - s k), y += s q; gate and SiLU: an exponential and a division each
    ("longhorn", False): (4, 46),
    ("longhorn", True): (4 + 19, 46 + 60),
    # p += s k, s += u k, y += s q
    ("longhorn_exact", False): (3, 46),
    ("longhorn_exact", True): (3 + 12, 46 + 60),
    # an exponential for each state; softplus has a logarithm besides
    ("mamba", False): (15, 58),
    ("mamba", True): (15 + 38, 58 + 80),
}


def candidates(device: str) -> Iterator[list[Candidate]]:
    """Yields for each workload, by rule: the roofline, on a CPU the usual torch loop, every backend with kernels."""
    names = [ROOFLINE, LOOP][: 2 if device == "cpu" else 1]
    names += [name for name, state in backends(device).items() if state == "ready" and name != "reference"]
    for workload in WORKLOADS[device]:
        sizes = " ".join(f"{name}={size}" for name, size in workload._asdict().items())
        yield [
            (dict(workload=sizes, rule=rule, backend=name), partial(steps, rule, name, workload, device))
            for rule in RULES
            for name in names
        ]


def steps(rule: str, name: str, workload: Workload, device: str) -> Steps:
    """A scan by a backend of the library or by the loop in torch, or the roofline."""
    if name == ROOFLINE:
        return roofline_steps(rule, workload, device)
    if name != LOOP:
        return scan_steps(rule, name, workload, device)
    inputs, dy = scan_inputs(rule, workload, device)
    inputs = {name: value if name == "z" else value[0] for name, value in inputs.items()}
    return function_steps(partial(torch_loop, rule=rule), inputs, dy[0])


def scan_inputs(rule: str, workload: Workload, device: str) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of a scan with gate, skip and bias, and a gradient of its result: float32 on a CPU, else bfloat16."""
    B, L, D, N, G = workload
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    with torch.device(device):
        x, dt, k, q = torch.randn(G, B, L, D), torch.randn(G, B, L, D) - 1, *torch.randn(2, G, B, L, N)
        inputs = {name: t.to(dtype) for name, t in dict(x=x, dt=dt, k=k, q=q / 2, z=torch.randn(B, L, D)).items()}
        inputs |= dict(D=torch.randn(G, D), dt_bias=torch.randn(G, D))  # parameters are float32
        if rule == "mamba":
            inputs["A"] = -4 * torch.rand(G, D, N)
        return inputs, torch.randn(*[G] * (G == 1), B, L, D).to(dtype)


def scan_steps(rule: str, backend: str, workload: Workload, device: str) -> Steps:
    """A scan by a backend of the library."""
    inputs, dy = scan_inputs(rule, workload, device)
    reverse, reduce = (False, True)[: workload.G], "none" if workload.G == 1 else "mean"
    return function_steps(partial(scan, rule=rule, reverse=reverse, reduce=reduce, backend=backend), inputs, dy)


def function_steps(function: Callable[..., Tensor], inputs: Mapping[str, Tensor], dy: Tensor) -> Steps:
    """A function of named tensors, and its gradients; on a GPU as CUDA graphs, which leave out the time of Python."""
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}

    def forward() -> Tensor:
        with torch.no_grad():
            return function(**inputs)

    def train() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(**leaves), list(leaves.values()), dy)

    steps = {STEPS[False]: forward, STEPS[True]: train}
    return {step: cuda_graph(call) for step, call in steps.items()} if dy.is_cuda else steps


def cuda_graph(call: Callable[[], object]) -> Callable[[], None]:
    """Captures a call as a CUDA graph; returns the replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compile and warm up
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def torch_loop(
    x: Tensor,
    dt: Tensor,
    k: Tensor,
    q: Tensor,
    z: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    A: Tensor | None = None,
    *,
    rule: str,
) -> Tensor:
    """The usual scan in torch: coefficients first, then a loop over `unbind`. x, dt, z: (B, L, D); k, q: (B, L, N)."""
    dt = dt + dt_bias
    gate = F.softplus(dt) if rule == "mamba" else 1 / (1 + k.square().sum(-1, keepdim=True) + torch.exp(-dt))
    state, outputs = x.new_zeros(x.shape[0], x.shape[2], k.shape[-1]), []
    if rule == "longhorn_exact":
        for x_t, gate_t, k_t, q_t in zip(x.unbind(1), gate.unbind(1), k.unbind(1), q.unbind(1)):
            update = gate_t[..., None] * (x_t[..., None] - state @ k_t[..., None])
            state = torch.baddbmm(state, update, k_t[:, None])
            outputs.append((state @ q_t[..., None])[..., 0])
    else:
        decay = torch.exp(gate[..., None] * A) if rule == "mamba" else 1 - gate[..., None] * k.square()[..., None, :]
        update = (gate * x)[..., None] * k[..., None, :]
        for decay_t, update_t, q_t in zip(decay.unbind(1), update.unbind(1), q.unbind(1)):
            state = torch.addcmul(update_t, decay_t, state)
            outputs.append((state @ q_t[..., None])[..., 0])
    return (torch.stack(outputs, 1) + D * x) * F.silu(z)


def roofline_steps(rule: str, workload: Workload, device: str) -> Steps:
    """The work of a scan at the peak of the machine, which bounds its time.

    On a CPU a matrix product of torch with as many multiply-adds; on a GPU a copy of as many bytes, each tensor once.
    """
    B, L, D, N, G = workload
    if device == "cuda":
        y = 2 * B * L * D  # bytes of the result, and of each x and dt
        inputs = (2 * G + 1) * y + 4 * G * B * L * N + 4 * G * D * (2 + N * (rule == "mamba"))
        sources = [torch.ones(moved // 8, device=device) for moved in (inputs + y, 3 * inputs + 2 * y)]
        return {step: partial(torch.empty_like(t).copy_, t) for step, t in zip(STEPS.values(), sources)}
    square, steps = torch.ones(512, 512), {}
    for train, step in STEPS.items():
        per_state, per_channel = SLOTS[rule, train]
        slots = G * B * L * D * (per_state * N + per_channel)
        steps[step] = partial(torch.mm, torch.ones(round(slots / square.numel()), len(square)), square)
    return steps


def table(rows: Sequence[Row]) -> list[Line]:
    """By workload, rule and backend: time, speed against the torch loop, and time to the roofline."""
    scans, lines = by(rows, "workload", "rule", "backend"), dict[tuple, Line]()
    for (workload, rule, backend, train), row in scans.items():
        line = lines.setdefault((workload, rule, backend), dict(workload=workload, rule=rule, backend=backend))
        line[f"{STEPS[train]}: ms"] = figure(median(row))
        if loop := scans.get((workload, rule, LOOP, train)):
            line[f"{STEPS[train]}: times faster than the loop"] = figure(ratio(loop, row), 1)
        line[f"{STEPS[train]}: to the roofline"] = figure(ratio(row, scans.get((workload, rule, ROOFLINE, train))))
    return list(lines.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table of each workload; returns 1 if something could not be measured, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=11, help="samples of each measurement (default: %(default)s)")
    parser.add_argument("--restarts", type=int, default=3, help="processes of each candidate (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="report to put the rows into (default: none)")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    threads, scans = torch.get_num_threads(), []
    for cells in candidates(args.device):
        rows = measure(cells, args.rounds, args.restarts, threads, args.device)
        print(f"{markdown(table(rows))}\n", flush=True)
        scans += rows
        if args.json:
            report = json.loads(args.json.read_text()) if args.json.exists() else {}
            write_json(args.json, report | dict(scan=scans))
    problems = dict.fromkeys(f"{row['rule']}, {row['backend']}: {row['problem']}" for row in scans if row["problem"])
    print("".join(f"not measured: {problem}\n" for problem in problems), end="")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
