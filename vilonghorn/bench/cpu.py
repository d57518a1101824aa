"""The scan and the models on a CPU: what takes part, in which sizes, and the rows of figures that come of it.

To add a subject, write a function that returns its steps (forward, and forward + backward) and name it among the
contenders of a race; `bench_turns` has the clock, `bench_floor` what the scan could take at best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from vilonghorn.ops import backends, scan
from vilonghorn.ops.backends import cpu as native
from vilonghorn.ops.validate import RULES, ScanArguments

from .floor import Rates, Shape, arithmetic_ms, bytes_ms, rate_contenders, rates
from .inputs import output_shape, random_inputs
from .report import paired_ratio, table, tokens
from .scan import bytes_moved
from .torch import torch_chunked, torch_loop
from .turns import Race, Steps

STEPS = {False: "forward", True: "forward + backward"}
SCAN = Shape(B=8, L=197, D=384, N=16)  # one direction of a tiny model at 224 px
LOOP, CHUNKED = "torch loop", "torch chunked"
# Each family is held against its first member.
FAMILIES = (
    ("deit_tiny_patch16_224", "vilonghorn_tiny", "vilonghorn_tiny_exact", "vim_tiny"),
    ("deit_small_patch16_224", "vilonghorn_small"),
)
SIZES = (224, 384, 512, 768, 1024, 1248)  # pixels
QUICK_SIZES = ((224, 512), (224,))  # by family
GROWING = "vilonghorn_tiny"  # whose time a token is held at the largest size against that at the smallest
TOKENS = 8 * 196  # patches a batch, about: the larger the images, the fewer
Row = dict[str, Any]


class Effort(NamedTuple):
    """What goes into a race: torch's threads, and the arguments of `Race.run`."""

    threads: int
    rounds: int
    seconds: float
    lives: int


def scan_contenders(shape: Shape) -> dict[tuple[str, str], Callable[[], Steps]]:
    """By rule and form: loops in torch, every backend that runs here, and the plainer instruction sets of the CPU's."""
    ready = [name for name, state in backends("cpu").items() if state == "ready"]
    forms = {(rule, form): partial(scan_steps, rule, form, shape) for rule in RULES for form in (LOOP, CHUNKED, *ready)}
    plainer = list(native.levels().items())[:-1]
    return forms | {
        ("longhorn", f"cpu {name}"): partial(level_steps, "longhorn", level, shape) for name, level in plainer
    }


def draw(rule: str, shape: Shape) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs with gate, skip and bias, the same ones for all contenders, and a gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    values = random_inputs(1, *shape, rule=rule, dtype=torch.float32, generator=generator)
    return values, torch.randn(output_shape(values, "none"), generator=generator)


def scan_steps(rule: str, form: str, shape: Shape) -> Steps:
    """One scan by a loop in torch, or by the backend of that name."""
    values, cotangent = draw(rule, shape)
    if form in (LOOP, CHUNKED):
        function = partial(torch_loop if form == LOOP else torch_chunked, rule=rule)
        values, cotangent = {n: v if n == "z" else v[0] for n, v in values.items()}, cotangent[0]
    else:
        function = partial(scan, rule=rule, backend=form)
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    return {
        STEPS[False]: torch.no_grad()(partial(function, **values)),
        STEPS[True]: lambda: torch.autograd.grad(function(**leaves), list(leaves.values()), cotangent),
    }


def level_steps(rule: str, level: int, shape: Shape) -> Steps:
    """One scan by the CPU library as a processor with fewer instructions would run it."""
    values, cotangent = draw(rule, shape)
    given = dict.fromkeys(ScanArguments._fields) | values | dict(rule=rule, reverse=(False,), reduce="none")
    args = ScanArguments(**given)
    return {
        STEPS[False]: lambda: native.forward(args, False, level),
        STEPS[True]: lambda: native.backward(cotangent, args, native.forward(args, True, level)[1], level),
    }


def model_steps(name: str, batch: int, size: int) -> Steps:
    """A model as timm makes it, float32, without compilation: inference, and a loss with its gradients."""
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=size)
    images, targets = torch.randn(batch, 3, size, size), torch.randint(model.num_classes, (batch,))

    def infer() -> None:
        model.eval()
        with torch.no_grad():
            model(images)

    def learn() -> None:
        model.train()
        F.cross_entropy(model(images), targets).backward()
        model.zero_grad()

    return {STEPS[False]: infer, STEPS[True]: learn}


def scan_moves(rule: str, train: bool, shape: Shape) -> int:
    """Bytes that the scan reads and writes at least."""
    values, y = draw(rule, shape)
    return bytes_moved(values, y, train)


def scan_rows(shape: Shape, effort: Effort) -> Iterator[tuple[list[Row], Rates]]:
    """All contenders in one race, first forward, then with backward; each with its floors. And the rates behind those."""
    contenders, moved = scan_contenders(shape), scan_moves("longhorn", False, shape)
    others = rate_contenders(moved, effort.threads, list(STEPS.values()))
    # Slow ones first, then the kernels, plainer ones ahead, then the best rate: no scan is far from its floor in time.
    order = sorted(contenders, key=lambda key: (key[1].startswith("cpu"), key[1] == "cpu"))
    turns = {", ".join(key): contenders[key] for key in order} | dict(reversed(others.items()))
    with Race(turns, effort.threads) as race:
        for train, step in STEPS.items():
            found, rows = race.run(step, *effort[1:]), []
            now = rates({name: found.pop(name) for name in others}, moved, effort.threads)
            slots = now["slots_per_s"]
            for rule, form in contenders:
                per_round = slots.get(
                    form.removeprefix("cpu "), list(slots.values())[-1]
                )  # the best level's, or its own
                moves = scan_moves(rule, train, shape)
                floors = dict(
                    arithmetic_ms=[arithmetic_ms(rule, train, shape, rate) for rate in per_round],
                    bytes_ms=[bytes_ms(moves, rate) for rate in now["gb_per_s"]],
                )
                rows.append(dict(rule=rule, form=form, train=train, **found[f"{rule}, {form}"], **floors))
            yield rows, now


def model_cells(sizes: tuple[int, ...] | None, quick: bool) -> list[tuple[tuple[str, ...], int]]:
    """Families and sizes of images: the smaller family first, then the smaller images."""
    by_family = (sizes,) * len(FAMILIES) if sizes else QUICK_SIZES if quick else (SIZES,) * len(FAMILIES)
    return [(family, size) for family, family_sizes in zip(FAMILIES, by_family) for size in family_sizes]


def model_rows(family: tuple[str, ...], size: int, batch: int | None, effort: Effort) -> Iterator[list[Row]]:
    """One family in one race at one size, first forward, then with backward."""
    batch = batch or usual_batch(size)
    with Race({name: partial(model_steps, name, batch, size) for name in family}, effort.threads) as race:
        for train, step in STEPS.items():
            found = race.run(step, *effort[1:])
            cell = dict(size=size, train=train, compiled=False, batch=batch)
            yield [dict(model=name, **cell, **found[name]) for name in family]


def usual_batch(size: int) -> int:
    """Images of that size that have about TOKENS patches."""
    return max(1, round(TOKENS / (size // 16) ** 2))


def growth_rows(effort: Effort) -> Iterator[list[Row]]:
    """One model at its smallest and its largest size in one race, first forward, then with backward."""
    ends = {f"{size} px": dict(model=GROWING, size=size, batch=usual_batch(size)) for size in (SIZES[0], SIZES[-1])}
    contenders = {name: partial(model_steps, end["model"], end["batch"], end["size"]) for name, end in ends.items()}
    with Race(contenders, effort.threads) as race:
        for train, step in STEPS.items():
            found = race.run(step, *effort[1:])
            yield [end | dict(train=train, compiled=False) | found[name] for name, end in ends.items()]


def print_growth(rows: list[Row]) -> None:
    """One table: a token's time, against that at the smallest size."""
    seconds = {f"{row['size']} px": [ms / 1e3 / tokens(row) for ms in row["ms"]] for row in rows if row["ms"]}
    if seconds:
        table(f"a token of {GROWING}, {STEPS[rows[0]['train']]}, float32", seconds, digits=4, paired=True)


def print_scans(rows: list[Row], shape: Shape) -> None:
    """A table for each rule, against the loop in torch, and one of the rules against each other."""
    measured = [row for row in rows if row["ms"]]
    title = f"{STEPS[rows[0]['train']]}, {' '.join(f'{n}={v}' for n, v in shape._asdict().items())} float32"
    for rule in dict.fromkeys(row["rule"] for row in measured):
        _print(f"scan {rule}, {title}", [row for row in measured if row["rule"] == rule], "form")
    _print(f"scan, backend cpu, {title}", [row for row in measured if row["form"] == "cpu"], "rule")


def print_models(rows: list[Row]) -> None:
    """One table, against the first of the family."""
    cell = rows[0]
    title = f"model, {STEPS[cell['train']]}, batch {cell['batch']}, {cell['size']} px float32"
    _print(title, [row for row in rows if row["ms"]], "model")


def _print(title: str, rows: list[Row], name: str) -> None:
    columns = {}
    for row in rows:
        columns[row[name]] = {"GB": float("nan") if row["memory_gb"] is None else row["memory_gb"]}
        for floor in ("arithmetic", "bytes"):
            if f"{floor}_ms" in row:
                columns[row[name]][f"x {floor}"] = paired_ratio(row["ms"], row[f"{floor}_ms"])
    if rows:
        table(title, {row[name]: [ms / 1e3 for ms in row["ms"]] for row in rows}, extra=columns, paired=True)
