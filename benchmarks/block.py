"""Counts what torch.compile makes of a training step of one block on a GPU, without a GPU: launches, bytes, memory.

inductor generates the code of forward and backward for an H200 that is not there (bfloat16 autocast, 197 tokens, width
192; the parts of `vilonghornv2_tiny` at 224 px); it is counted, not run. Kernels and products inside operators of this
library are counted with the emulator of `kernels/`. Prints one JSON line for a pass of each block:

- launches: kernels of inductor, matrix products, and every kernel and torch operator inside an operator;
- mb: million bytes that the launches read and write, each tensor once a launch, without the scan; scan_mb: the scan;
- kernels: name, million bytes, and billion operations of a matrix product or attention;
- kept_mb (forward): what it saves for backward beside the parameters.

`python benchmarks/block.py --save` in a checkout also writes benchmarks/results/block.json. Needs Triton and a C++
compiler. Uses private parts of torch 2.11 to 2.15.
"""

import argparse
import contextlib
import copy
import ctypes
import functools
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import timm
import torch
from made_up_gpu import composed_operators, made_up_gpu
from timm.models.vision_transformer import Block as DeiTBlock
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vilonghorn.data.atomic_files import write_json
from vilonghorn.layers import Block
from vilonghorn.models.vilonghornv2 import Downsample
from vilonghorn.ops.arguments import MambaInnerArguments
from vilonghorn.ops.backends import cuda, runs_in_chunks, triton
from vilonghorn.ops.rules import RULES
from vilonghorn.ops.validate import flatten_weights

FILE = Path(__file__).parent / "results" / "block.json"
KERNELS = Path(__file__).parents[1] / "kernels"
BATCH, TOKENS, WIDTH, DEIT_HEADS = 128, 197, 192, 3  # of the tiny models at 224 px
DEIT = "deit"
V2 = "vilonghornv2_tiny"
PARTS = {"stem": 3136, "stages.0.blocks.0": 3136}  # of V2: the tokens of an image
PARTS |= {"stages.1.downsample": 784, "stages.1.blocks.0": 784, "stages.2.downsample": 196, "stages.2.blocks.0": 196}
PARTS |= {"stages.3.downsample": 49, "stages.3.blocks.0": 49}
BF16 = ", bf16"  # the same parts with a residual stream in bfloat16 (residual_in_fp32=False)
PARTS |= {part + BF16: tokens for part, tokens in PARTS.items() if part != "stem"}
ATTENTION = "scaled_dot_product_flash_attention"


def build_block(name: str) -> tuple[nn.Module, tuple[int, ...], list[Any]]:
    """A block of `vilonghorn_tiny` with the rule `name`, that of DeiT-Ti, or a part of `vilonghornv2_tiny`.

    Returns the shape of its input, too, and its other arguments.
    """
    if name not in PARTS:
        block = DeiTBlock(WIDTH, DEIT_HEADS, qkv_bias=True) if name == DEIT else Block(WIDTH, rule=name)
        return block, (BATCH, TOKENS, WIDTH), []
    part, side = timm.create_model(V2).get_submodule(name.removesuffix(BF16)), math.isqrt(PARTS[name])
    if isinstance(part, Block):
        return part, (BATCH, side**2, part.mixer.dim), [[side, side]]
    if isinstance(part, Downsample):
        return part, (BATCH, 2 * side, 2 * side, part.reduction.in_features // 4), []
    return part, (BATCH, 3, 224, 224), []


def count_block(name: str, inner: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of forward and backward of a block.

    Args:
        name: a rule, "deit", or a part of `vilonghornv2_tiny`.
        inner: of `inner_costs`.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    rows: list[dict[str, Any]] = []
    block, shape, others = build_block(name)
    torch._dynamo.reset()  # which compiles a function for a limited number of blocks
    with (
        made_up_gpu(),
        composed_operators(),
        FakeTensorMode(allow_non_fake_inputs=True),
        config.patch(compile_threads=1, fx_graph_cache=False),
        functorch_config.patch(force_non_lazy_backward_lowering=True),
        torch.autocast("cpu", torch.bfloat16),
    ):
        from torch._inductor.compile_fx import compile_fx

        # Traced as on a CPU, because autograd refuses CUDA tensors without a driver, then moved to the made-up GPU.
        backend = functools.partial(compile_fx, inner_compile=functools.partial(lower, rows, inner))
        dtype = torch.bfloat16 if name.endswith(BF16) else torch.float32
        x = torch.empty(shape, dtype=dtype, requires_grad=name != "stem")
        torch.compile(copy.deepcopy(block), fullgraph=True, dynamic=False, backend=backend)(x, *others)
    return [dict(block=name, torch=torch.__version__.partition("+")[0]) | row for row in rows]


def lower(
    rows: list[dict[str, Any]], inner: dict[str, Any], graph: fx.GraphModule, inputs: Sequence[Any], **options: Any
) -> Callable:
    """Generates the code of one graph and adds its counts to `rows`; an `inner_compile` of inductor."""
    from torch._dynamo.utils import detect_fake_mode
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    fake = detect_fake_mode(inputs)
    for node in graph.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    with fake:
        inputs = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") if isinstance(t, Tensor) else t
            for t in inputs
        ]
    FakeTensorProp(graph, mode=fake).propagate_dont_convert_inputs(*inputs)
    backward = options.get("is_backward", False)
    row: dict[str, Any] = {"pass": "backward" if backward else "forward"}
    if not backward:
        row["kept_mb"] = round(kept_bytes(graph, inputs, options["static_input_idxs"]) / 1e6, 1)
    operators = operator_costs(graph)

    def compile_to_module(lowering: GraphLowering) -> SimpleNamespace:
        code, _ = lowering.codegen()
        rows.append(row | count_code(getattr(code, "value", code), lowering.scheduler.nodes, operators, inner))
        return SimpleNamespace(call=lambda _: None, __file__="", __name__="", key="")

    with mock.patch.object(GraphLowering, "compile_to_module", compile_to_module):
        return compile_fx_inner(graph, inputs, **options)


def kept_bytes(graph: fx.GraphModule, inputs: Sequence[Any], parameters: Sequence[int]) -> int:
    """Bytes of what forward returns for backward, each storage once, without parameters and the block's result."""
    [result, *saved] = graph.graph.output_node().args[0]
    known = {inputs[i].untyped_storage()._cdata for i in parameters}
    storages = [t.untyped_storage() for node in saved if isinstance(t := node.meta["val"], Tensor)]
    return sum({s._cdata: s.nbytes() for s in storages if s._cdata not in known}.values())


def operator_costs(graph: fx.GraphModule) -> list[tuple[str, int, int]]:
    """Name, bytes and operations of each operator that inductor calls: ours, attention, gradients of convolutions."""
    costs = []
    for node in graph.graph.nodes:
        name = str(node.target)
        called = name.startswith("vilonghorn.") or ATTENTION in name or "convolution_backward" in name
        if node.op != "call_function" or not called:
            continue
        read = [leaf.meta["val"] for leaf in dict.fromkeys(tree_leaves((node.args, node.kwargs))) if is_tensor(leaf)]
        moved = sum(t.numel() * t.element_size() for t in (*read, *tree_leaves(node.meta["val"])) if is_tensor(t))
        products = 0
        if ATTENTION in name:  # two products of (L, C) and (L, C) for each head; five in backward
            B, H, L, C = read[1 if "backward" in name else 0].shape
            products = (5 if "backward" in name else 2) * 2 * B * H * L * L * C
        costs.append((name.split(".")[1].replace("_for_cpu", ""), moved, products))
    return costs


def is_tensor(leaf: Any) -> bool:
    """Whether it is a tensor, or a node of a graph that stands for one."""
    return isinstance(leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf, Tensor)


def count_code(code: str, nodes: Sequence[Any], operators: Sequence[tuple], inner: dict[str, Any]) -> dict[str, Any]:
    """Counts generated code and the scheduler's nodes that it was generated from.

    Raises:
        RuntimeError: the two do not agree, because this torch generates other code.
    """
    from torch._inductor import ir, scheduler

    kernels = []
    for node in nodes:
        if isinstance(node, scheduler.NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput):
            continue
        if isinstance(node.node, ir.FallbackKernel):
            continue  # in `operators`
        if isinstance(node.node, ir.ExternKernelOut):
            [*_, a, _] = node.node.inputs  # of mm, bmm or addmm
            tensors = [*node.node.inputs, node.node]
            size = sum(numel(t) * t.get_dtype().itemsize for t in tensors)
            products = 2 * numel(node.node) * int(a.get_size()[-1])
        else:
            size, products = node.get_read_write_buffers_sizes(), 0
        kernels.append((kernel_name(node), size, products))
    body = code.split("def call(")[1]
    generated = len(
        re.findall(r"^ +(?:\w+ = )?(?:triton_\w+\.run|extern_kernels\.\w+)\(|\.sum\(dim=", body, re.MULTILINE)
    )
    called = len(re.findall(r"= torch\.ops\.[\w.]+\(", body))
    if (generated, called) != (len(kernels), len(operators)):
        raise RuntimeError(
            f"the code launches {generated} kernels and calls {called} operators, the graph {len(kernels)} and "
            f"{len(operators)}: adapt count_code to torch {torch.__version__}"
        )
    counts, launches = {}, generated
    for row in operators:
        counts[row[0]], inner_rows = inner.get(row[0], (1, [row]))
        launches += counts[row[0]]
        kernels += inner_rows
    scans = sum(size for name, size, _ in kernels if "scan" in name)
    return dict(
        launches=launches,
        inner=counts,
        mb=round((sum(size for _, size, _ in kernels) - scans) / 1e6, 1),
        scan_mb=round(scans / 1e6, 1),
        kernels=[(name, round(size / 1e6, 2), round(products / 1e9, 2)) for name, size, products in kernels],
    )


def numel(t: Any) -> int:
    """Elements of a buffer of inductor."""
    return functools.reduce(lambda a, b: a * int(b), t.get_size(), 1)


def kernel_name(node: Any) -> str:
    """What a launch computes: the matrix product, or the torch operators that are fused in it."""
    if name := getattr(node.node, "python_kernel_name", None):
        return name.removeprefix("extern_kernels.")
    origins = [str(origin.target) for part in node.get_nodes() for origin in part.node.get_origins()]
    names = (re.sub(r"^(aten|prims)\.|\.\w+$", "", name) for name in dict.fromkeys(origins))
    return " ".join(dict.fromkeys(names))


@contextlib.contextmanager
def emulated_kernels() -> Iterator[Callable[[], list[tuple[int, int, int]]]]:
    """Compiles the CUDA kernels for the emulator, which records what it would launch, and runs the operators with it.

    Yields a function that returns the launches since its last call: blocks, threads of a block, bytes of shared memory.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    if (compiler := shutil.which("g++") or shutil.which("clang++")) is None:
        raise RuntimeError("no C++ compiler is installed, which the emulator needs: install g++ or clang++")
    plan = (ctypes.c_int64 * 1024)()

    def launches() -> list[tuple[int, int, int]]:
        found = [tuple(plan[1 + 3 * i : 4 + 3 * i]) for i in range(plan[0])]
        plan[0] = 0
        return found

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "libemulated.so"
        flags = ["-std=c++17", "-O0", "-fPIC", "-shared", "-fvisibility=hidden", "-U_FORTIFY_SOURCE", "-w"]
        *included, source = map(str, sorted((KERNELS / "cuda").glob("*.cu")))
        options = ["-DVILONGHORN_EMULATED", *(f"-include{path}" for path in included), "-x", "c++", source]
        subprocess.run([compiler, *flags, *options, "-o", str(path)], check=True)
        library = cuda.declare(ctypes.CDLL(str(path)))
        library.vl_emulator_plan(plan)
        with (
            composed_operators(),
            mock.patch.object(cuda, "_open", lambda: (library, None)),
            mock.patch.object(cuda, "_call", lambda function, device, *structs: function(*structs, 0, None)),
        ):
            yield launches


class Recorder(TorchDispatchMode):
    """Records torch operators that launch something in `rows`: name, bytes, and operations of a matrix product."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        name = op.name().partition("::")[2].partition(".")[0]
        if not (op.is_view or "empty" in name):
            read, written = ([t for t in tree_leaves(tensors) if is_tensor(t)] for tensors in (args, result))
            products = 2 * written[0].numel() * read[-1].shape[-2] if "bmm" in name else 0
            self.rows.append((name, sum(t.nbytes for t in (*read, *written)), products))
        return result


def inner_costs(name: str, launches: Callable) -> dict[str, tuple[int, list[tuple[str, int, int]]]]:
    """Launches and rows (as of `count_code`) inside the operators of a mixer, with `emulated_kernels`."""
    block, shape, grid = build_block(name)
    mixer, recorder, recorder.rows = block.mixer, Recorder(), []
    xz = torch.zeros(*shape[:2], 2 * mixer.d_inner, dtype=torch.bfloat16)
    weights, grid = flatten_weights(name, mixer.weights(), *grid or [None])
    flags, heads = list(map(int, mixer.reverse)), mixer.d_inner
    if weights.x_proj is not None:
        weights = weights._replace(x_proj=weights.x_proj.to(xz), dt_proj=weights.dt_proj.to(xz))
        heads = weights.dt_proj.shape[1]
    in_chunks = heads != mixer.d_inner and runs_in_chunks(xz.device, xz.dtype, mixer.rule, len(flags) == 1)
    args = MambaInnerArguments(xz, weights, mixer.rule, flags, grid, in_chunks)

    def recorded(function: Callable, label: str) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            tensors = {id(t): t for t in tree_leaves((args, kwargs, result)) if is_tensor(t)}
            recorder.rows.append((label, sum(t.nbytes for t in tensors.values()), 0))
            return result

        return call

    def launch(self: Any, kernel: Any, grid: Any, *arguments: Any) -> None:  # of Triton
        tensors = [t for t in tree_leaves(arguments) if is_tensor(t)]
        name = kernel.__name__.replace("chunks", "scan_chunks")
        recorder.rows.append((name, sum(t.nbytes for t in tensors), 0))

    def cost() -> tuple[int, list[tuple[str, int, int]]]:
        rows, recorder.rows = recorder.rows, []
        return len(launches()) + sum(name not in labels.values() for name, *_ in rows), rows

    labels = dict(
        forward="scan", backward="scan_backward", conv_forward="conv_silu", conv_backward="conv_silu_backward"
    )
    labels |= dict(norm_backward="residual_norm_backward")
    functions = {name: recorded(getattr(cuda, name), label) for name, label in labels.items()}
    patches = mock.patch.multiple(cuda, **functions), mock.patch.object(triton._Launch, "run", launch)
    with torch.no_grad(), patches[0], patches[1], recorder:
        y, *saved = cuda.mamba_inner_forward(args, True)
        forward = cost()
        cuda.mamba_inner_backward(y, args, *saved)
        backward = cost()
        x = torch.zeros(shape, dtype=torch.bfloat16 if name.endswith(BF16) else torch.float32)
        cuda.norm_backward(x.bfloat16(), x.clone(), x, block.norm.weight, block.norm.eps)
        recorder.rows = [row for row in recorder.rows if row[0] in labels.values()]
        inner = dict(mamba_inner_cuda=forward, mamba_inner_cuda_backward=backward)
        return inner | dict(residual_norm_backward=cost())


def main(argv: Sequence[str] | None = None) -> int:
    """Counts, prints one line for each pass, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    blocks = (*RULES, DEIT, *PARTS)
    parser.add_argument("blocks", nargs="*", default=blocks, metavar="BLOCK", help=f"{', '.join(blocks)}; default: all")
    parser.add_argument("--save", action="store_true", help=f"write {FILE} too")
    args = parser.parse_args(argv)
    if unknown := set(args.blocks) - set(blocks):
        parser.error(f"unknown {', '.join(sorted(unknown))}: expected {', '.join(blocks)}")
    if args.save and set(args.blocks) != set(blocks):
        parser.error("--save is for all blocks: leave out their names")
    rows: list[dict[str, Any]] = []
    for name in args.blocks:
        inner: dict[str, Any] = {}
        if name in RULES or "blocks" in name:  # with operators of this library
            with emulated_kernels() as launches:
                inner = inner_costs(name, launches)
        rows += count_block(name, inner)
        print("\n".join(json.dumps(row) for row in rows if row["block"] == name), flush=True)
    if args.save:
        write_json(FILE, dict(blocks=rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
