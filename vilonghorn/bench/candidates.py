"""What the benchmark times: the scan, its roofline, and models."""

import importlib.util
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from .. import models  # noqa: F401  (registers them with timm)
from ..ops import backends, scan
from ..ops.backends import cpu as kernels
from ..ops.chunked import scan_chunked
from ..ops.validate import RULES
from .interleaved import Factory, Steps

STEPS = {False: "forward", True: "forward + backward"}  # by whether a row's `train` is set
LOOP, PEER = "torch loop", "mamba_ssm"
CHUNKS, HEADS = "triton, chunks", 4  # heads of `vilonghornv2_tiny`, whose channels share dt
MULTIPLY_ADDS, COPY = "multiply-adds", "copy"
# Each family is compared to its first member.
FAMILIES = (
    ("deit_tiny_patch16_224", "vilonghorn_tiny", "vilonghorn_tiny_exact", "vilonghornv2_tiny", "vim_tiny"),
    ("deit_small_patch16_224", "vilonghorn_small", "vilonghornv2_small"),
)
BATCH = {"cpu": 8, "cuda": 128}  # images of 224 px; larger images come in smaller batches of about as many tokens
LOOP_ROUNDS = 20_000  # rounds of the multiply-add loop in a call

# Multiply-add slots of one token: (for each state of a channel, for the channel). A slot is one lane of an instruction
# that multiplies, adds or both; an exponential counts 12, a division 10. Backward recomputes the states from
# checkpoints. Loads, stores and sums over channels are not counted.
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


class Workload(NamedTuple):
    """Sizes of a scan; each direction reads its own x."""

    B: int
    L: int
    D: int
    N: int
    directions: int = 1

    def __str__(self) -> str:
        return f"B={self.B} L={self.L} D={self.D} N={self.N}, {self.directions} direction{'s' * (self.directions > 1)}"


# A tiny model at 224 px; on a GPU also its two directions at once, and one image of 1248 px, which is split over time.
WORKLOADS = {
    "cpu": [Workload(8, 197, 384, 16)],
    "cuda": [Workload(128, 197, 384, 16), Workload(128, 197, 384, 16, 2), Workload(1, 6084, 384, 16, 2)],
}


def scan_candidates(workload: Workload, device: str) -> dict[tuple[str, str], Factory]:
    """By rule and backend: every compiled backend; on a CPU the usual torch loop, on a GPU heads in chunks.

    On a GPU also mamba_ssm if installed.
    """
    names = [name for name, state in backends(device).items() if state == "ready" and name != "reference"]
    names = [LOOP, *names] if device == "cpu" else names
    found = {(rule, name): partial(scan_steps, rule, name, workload, device) for rule in RULES for name in names}
    if device == "cuda" and "triton" in names:
        found["longhorn_exact", CHUNKS] = partial(scan_steps, "longhorn_exact", CHUNKS, workload, device)
    if device == "cuda" and workload.directions == 1 and importlib.util.find_spec(PEER):
        found["mamba", PEER] = partial(scan_steps, "mamba", PEER, workload, device)
    return found


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
    """One scan by a backend of the library, in chunks, by the loop in torch, or by mamba_ssm."""
    inputs, dy = scan_inputs(rule, workload, device)
    reverse, reduce = (False, True)[: workload.directions], "none" if workload.directions == 1 else "mean"
    if backend in (LOOP, PEER):
        inputs, dy = {name: value if name == "z" else value[0] for name, value in inputs.items()}, dy[0]
        function: Callable[..., Tensor] = partial(torch_loop, rule=rule)
    elif backend == CHUNKS:
        inputs |= {name: inputs[name][..., :HEADS].contiguous() for name in ("dt", "dt_bias")}
        function = partial(gated_chunks, reverse=reverse, reduce=reduce)
    else:
        function = partial(scan, rule=rule, reverse=reverse, reduce=reduce, backend=backend)
    if backend == PEER:  # its layout is (B, D, L)
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        names = dict(x="u", dt="delta", k="B", q="C", dt_bias="delta_bias")
        function, dy = partial(selective_scan_fn, delta_softplus=True), dy.mT.contiguous()
        inputs = {names.get(n, n): t.mT.contiguous() if t.ndim == 3 else t for n, t in inputs.items()}
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}

    def forward() -> Tensor:
        with torch.no_grad():
            return function(**inputs)

    def train() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(**leaves), list(leaves.values()), dy)

    if device == "cuda":
        return {STEPS[False]: cuda_graph(forward), STEPS[True]: cuda_graph(train)}
    return {STEPS[False]: forward, STEPS[True]: train}


def gated_chunks(x, dt, k, q, z, D, dt_bias, *, reverse: Sequence[bool], reduce: str) -> Tensor:
    """`scan` of the exact rule with one dt for a head, in chunks; gate and mean are torch's."""
    y = scan_chunked(x, dt, k, q, D=D, dt_bias=dt_bias, reverse=reverse) * F.silu(z)
    return y if reduce == "none" else y.mean(0)


def cuda_graph(call: Callable[[], object]) -> Callable[[], None]:
    """Captures a call as a CUDA graph, so that its time excludes launches from Python; returns the replay."""
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


def torch_loop(x, dt, k, q, z, D, dt_bias, A=None, *, rule: str) -> Tensor:
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


def roofline_candidates(workload: Workload, device: str, threads: int) -> dict[str, tuple[int, Factory]]:
    """By name, what a call does and its factory.

    On a CPU multiply-adds in registers; on every device a copy of as many bytes as the scan moves.
    """
    moved, found = scan_bytes("longhorn", False, workload, device), {}
    if device == "cpu" and (levels := kernels.isas()):
        best = max(levels.values())
        work = threads * LOOP_ROUNDS * kernels.multiply_adds(1, best)
        found[MULTIPLY_ADDS] = work, partial(multiply_add_steps, threads, best)
    return found | {COPY: (moved, partial(copy_steps, moved, device))}


def multiply_add_steps(threads: int, isa: int) -> Steps:
    """Multiply-adds of the CPU kernels' own loop for an instruction set, on all threads."""
    pool = ThreadPoolExecutor(threads)
    call = partial(kernels.multiply_adds, isa=isa)
    return dict.fromkeys(STEPS.values(), lambda: sum(pool.map(call, [LOOP_ROUNDS] * threads)))


def copy_steps(moved: int, device: str) -> Steps:
    """A copy that reads and writes `moved` bytes together."""
    source = torch.ones(moved // 8, device=device)
    return dict.fromkeys(STEPS.values(), partial(torch.empty_like(source).copy_, source))


def scan_bytes(rule: str, train: bool, workload: Workload, device: str) -> int:
    """Bytes of a scan that moves each tensor once; backward reads inputs and dy, and writes gradients."""
    B, L, D, N, G = workload
    width = 4 if device == "cpu" else 2
    y = width * B * L * D
    inputs = 2 * G * y + 2 * width * G * B * L * N + y  # x, dt; k, q; z
    inputs += 4 * G * D * (2 + N * (rule == "mamba"))  # D, dt_bias; A
    return 3 * inputs + 2 * y if train else inputs + y


def bounds(
    rule: str, train: bool, workload: Workload, device: str, rates: dict[str, list[float]]
) -> dict[str, list[float] | None]:
    """The roofline of a scan: milliseconds of its multiply-adds and of its bytes, at the rates of each round."""
    B, L, D, N, directions = workload
    per_state, per_channel = SLOTS[rule, train]
    slots, moved = directions * B * L * D * (per_state * N + per_channel), scan_bytes(rule, train, workload, device)
    compute = [slots / rate * 1e3 for rate in rates[MULTIPLY_ADDS]] if MULTIPLY_ADDS in rates else None
    return dict(compute_bound_ms=compute, memory_bound_ms=[moved / rate * 1e3 for rate in rates[COPY]])


def model_steps(
    model: str, batch: int, size: int, precision: str = "highest", device: str = "cpu", compiled: bool = False
) -> Steps:
    """A model of timm at random weights: inference, and a loss with its gradients.

    `precision` is "bf16", autocast to it, or the argument of `torch.set_float32_matmul_precision`.
    """
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest" if precision == "bf16" else precision)
    net = timm.create_model(model, img_size=size).to(device)
    images = torch.randn(batch, 3, size, size, device=device)
    targets = torch.randint(net.num_classes, (batch,), device=device)
    autocast = partial(torch.autocast, device, torch.bfloat16, enabled=precision == "bf16")
    if compiled:  # block by block, because a model at once takes minutes
        for block in net.blocks:
            block.compile()

    def forward() -> None:
        net.eval()
        with torch.no_grad(), autocast():
            net(images)

    def train() -> None:
        net.train()
        with autocast():
            loss = F.cross_entropy(net(images), targets)
        loss.backward()
        net.zero_grad()

    steps = {STEPS[False]: forward, STEPS[True]: train}
    if compiled:  # here, because the setups of all candidates run at once
        for step in steps.values():
            step()
    return steps


def default_batch(size: int, device: str) -> int:
    """Images of `size` pixels a side that have about as many tokens as the usual batch at 224 px."""
    return max(1, round(BATCH[device] * 196 / (size // 16) ** 2))
