"""Random models of one operator for onnxruntime: each must end in an error of onnxruntime or in the right result.

    python random_ort_models.py SEED EXAMPLES

A process of its own, which a crash ends: the last line of its output is the model.
"""

import sys

import numpy as np
import onnx
import onnxruntime
import torch
import torch.nn.functional as F
from flat_arguments import from_tensors
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from native_gemm import merged
from onnx import helper
from oracle import block_inputs, error, inputs, oracle, residual_block, rms_norm

from vilonghorn.export import ort_library
from vilonghorn.export.native import INTERFACE
from vilonghorn.ops.arguments import LAYOUTS, BlockArguments, NormArguments, ScanArguments
from vilonghorn.ops.backends.bindings import BLOCK_WEIGHTS as BLOCK
from vilonghorn.ops.norm import validate_norm
from vilonghorn.ops.validate import MAX_CONV, MAX_STATE, validate_block, validate_scan

RULES = ("longhorn", "longhorn_exact", "mamba", "none")
SCAN = [name for name in LAYOUTS[ScanArguments].tensors if name != "initial_state"]
LAYERS = ("in_proj", "out_proj", "mlp_in_proj", "mlp_out_proj", "weight", "weight2")  # in int8
OPERATORS = ("Block", "BlockInt8", "Linear", "LinearInt8", "Stem", "StemInt8", "Scan", "Norm")
INTEGERS = st.sampled_from([0, 1, -1, 2, 9, 200, 256, 2**31, 2**62, -(2**63)])
CHANGES = ("absent", "surplus", "rank", "size", "grid", "dtype", "rule", "reverse", "option", "no attribute", "type")


@st.composite
def models(draw):
    """The operator, its inputs (None where one is absent), its attributes, whether nothing is wrong with them, and the
    inputs that are constants of the model."""
    op, rule = draw(st.sampled_from(OPERATORS)), draw(st.sampled_from(RULES))
    G, B, L, heads, channels = (draw(st.integers(1, most)) for most in (3, 3, 70, 3, 9))
    N, K, D = draw(st.integers(1, 200) | st.integers(1, 20)), draw(st.integers(1, 70) | st.just(4)), heads * channels
    options = dict(rule=rule, reverse=[draw(st.integers(0, 1)) for _ in range(G)], interface=INTERFACE, version="0")
    if op == "Norm":
        shape = draw(st.lists(st.integers(1, 9), max_size=3)) + [D]
        tensors, options = dict(x=torch.randn(shape), weight=torch.randn(D)), dict(interface=INTERFACE, version="0")
        options |= dict(eps=1e-5)
        fits = True
    elif op.startswith("Linear"):
        merge, norms, has_bias = draw(st.integers(1, 3)), draw(st.booleans()), draw(st.booleans())
        shape = (B, merge * heads, merge * channels, G * N)
        x = torch.randn(shape if merge > 1 or draw(st.booleans()) else (B, N))
        depth, columns = merge * merge * x.shape[-1], draw(st.integers(20, 70))  # one could be near 0
        tensors = dict(x=x, norm_weight=torch.rand(depth) if norms else None, weight=torch.randn(columns, depth))
        tensors["bias"] = torch.randn(columns) if has_bias else None
        options, fits = dict(eps=1e-2, merge=merge, interface=INTERFACE, version="0"), True
    elif op.startswith("Stem"):
        hidden, dim = draw(st.integers(1, 20)), draw(st.integers(20, 40))
        step = draw(st.integers(1, 4))
        shapes = [
            (B, G, step * channels, step * (L // 4 + 1)),
            (hidden, G, 3, 3),
            (hidden,),
            (dim, hidden, 3, 3),
            (dim,),
            (dim,),
        ]
        names = ("images", "weight1", "bias1", "weight2", "bias2", "norm_weight")
        tensors = {name: torch.randn(shape) for name, shape in zip(names, shapes)}
        options = dict(eps=1e-1, stride1=draw(st.integers(1, 2)), stride2=draw(st.integers(1, 2)))
        options, fits = options | dict(step=step, interface=INTERFACE, version="0"), True
    elif op == "Scan":
        given = inputs(G, B, L, D, N, rule=rule, gate=draw(st.booleans()))
        tensors = {name: given.get(name) for name in SCAN}
        options |= dict(mean=draw(st.integers(0, 1)))
        fits = rule != "none" and N <= MAX_STATE
    else:
        grid, is_map = None, draw(st.booleans())
        if draw(st.booleans()):  # a convolution over a grid, perhaps with a class token
            rows, columns, height = draw(st.integers(1, 8)), draw(st.integers(1, 8)), draw(st.sampled_from([1, 3, 5]))
            L, K = rows * columns + (0 if is_map else draw(st.integers(0, 1))), height * draw(st.sampled_from([1, 3]))
            grid = torch.tensor([0 if is_map else rows, columns, height])
        else:
            rows, columns = 1, L
        hidden = draw(st.integers(0, 9))
        sizes = (G, B, L, D, N, draw(st.integers(1, 5)), K, draw(st.integers(1, 20)))
        given = block_inputs(*sizes, rule=rule, heads=heads, hidden=hidden)
        tensors = {**{name: given.get(name) for name in BLOCK}, "conv_grid": grid}
        if is_map:
            tensors["x"] = tensors["x"].reshape(B, rows, columns, -1)
        options |= dict(eps=1e-5, mlp_eps=1e-4)
        fits = K <= MAX_CONV and (rule == "none" or N <= MAX_STATE)
    tensors = {name: None if t is None else t.numpy() for name, t in tensors.items()}
    for name in filter(tensors.__contains__, LAYERS) if op.endswith("Int8") else ():
        if tensors[name] is None:
            tensors[f"{name}_scale"] = None
            continue
        scale = np.abs(tensors[name]).reshape(len(tensors[name]), -1).max(1) / 127
        shape = (-1, *[1] * (tensors[name].ndim - 1))
        tensors[name] = np.round(tensors[name] / scale.reshape(shape)).astype(np.int8)
        tensors[f"{name}_scale"] = scale
    for change in draw(st.lists(st.sampled_from(CHANGES), max_size=2)):
        name = draw(st.sampled_from(list(tensors)))
        t, attribute = tensors[name], draw(st.sampled_from(list(options)))
        if change == "absent":
            tensors[name] = None
        elif change == "surplus":
            tensors[f"surplus{len(tensors)}"] = np.zeros(draw(st.integers(0, 3)), np.float32)
        elif change == "rank" and t is not None:
            tensors[name] = t[(None,) * draw(st.integers(1, 4))] if draw(st.booleans()) else t.reshape(-1)
        elif change == "size" and t is not None and t.ndim:
            shape, axis = list(t.shape), draw(st.integers(0, t.ndim - 1))
            shape[axis] = draw(st.sampled_from([0, 1, shape[axis] + 1, 2 * shape[axis], 200]))
            tensors[name] = np.resize(t, shape) if t.size else np.zeros(shape, t.dtype)
        elif change == "grid" and tensors.get("conv_grid") is not None:
            tensors["conv_grid"][draw(st.integers(0, len(tensors["conv_grid"]) - 1))] = draw(INTEGERS)
        elif change == "dtype" and t is not None:
            tensors[name] = t.astype(draw(st.sampled_from([np.float64, np.float16, np.int8, np.int64, np.float32])))
        elif change == "rule":
            options["rule"] = draw(st.sampled_from([*RULES, "gru", "", "LONGHORN", *map(str, range(10))]))
        elif change == "reverse":
            options["reverse"] = draw(st.lists(INTEGERS, max_size=5))
        elif change == "option":
            of_op = dict(
                Scan=["mean"], Norm=["eps"], Linear=["eps", "merge"], Stem=["eps", "stride1", "stride2", "step"]
            )
            name = draw(st.sampled_from(["interface", *of_op.get(op.removesuffix("Int8"), ["eps", "mlp_eps"])]))
            is_float = name.endswith("eps")
            options[name] = draw(st.sampled_from([1e-5, 0.0, -1.0, np.nan, np.inf]) if is_float else INTEGERS)
        elif change == "no attribute":
            options.pop(attribute, None)
        elif change == "type":
            options[attribute] = draw(INTEGERS | st.just("x") | st.just(0.5) | st.just([1, 2]))
        fits = False
    weights = [name for name in tensors if name not in ("x", "images")]
    constants = set(weights) if draw(st.booleans()) else draw(st.sets(st.sampled_from(weights)))
    return op, tensors, options, fits, constants


def run(op: str, tensors: dict, options: dict, constants: set[str], later: dict) -> list[np.ndarray]:
    """The results of a model of one node, for `tensors` and then for `later`, which differs in what is no constant."""
    values = {name: t for name, t in tensors.items() if t is not None}
    types = {name: helper.np_dtype_to_tensor_dtype(t.dtype) for name, t in values.items()}
    attributes = {name: value for name, value in options.items() if value != []}
    names = [name if t is not None else "" for name, t in tensors.items()]
    node = helper.make_node(op, names, ["y"], domain="vilonghorn", **attributes)
    if options.get("reverse") == []:
        node.attribute.append(helper.make_attribute("reverse", [], attr_type=onnx.AttributeProto.INTS))
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(name, kind, None) for name, kind in types.items() if name not in constants],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(t, name) for name, t in values.items() if name in constants],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("vilonghorn", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = 1 + len(values) % 2, 4
    settings.register_custom_ops_library(str(ort_library()))
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    fed = [{name: t for name, t in given.items() if name in values.keys() - constants} for given in (tensors, later)]
    return [session.run(None, given)[0] for given in fed]


def expected(op: str, tensors: dict, options: dict) -> torch.Tensor:
    """The right result in float64. Raises ValueError or TypeError where the inputs do not fit."""
    given = {name: None if t is None else torch.from_numpy(t) for name, t in tensors.items()}
    if op == "Norm":
        validate_norm(NormArguments(**given, eps=options["eps"]))
        return rms_norm(given["x"].double(), given["weight"].double(), options["eps"])
    if op == "Scan":
        rule, reverse = options["rule"], options["reverse"]
        reduce = "mean" if options["mean"] else "none"
        validate_scan(ScanArguments(**given, rule=rule, reverse=tuple(reverse), reduce=reduce))
        return oracle(**{n: t for n, t in given.items() if t is not None}, rule=rule, reverse=reverse, reduce=reduce)
    for name in filter(given.__contains__, LAYERS) if op.endswith("Int8") else ():
        if (scale := given.pop(f"{name}_scale")) is not None:
            given[name] = given[name].float() * scale.reshape(-1, *[1] * (given[name].dim() - 1))
    if op.startswith("Linear"):
        x = given["x"].double()
        lines, shape = merged(x if x.dim() == 4 else x[None, None], options["merge"]), list(x.shape)
        if (norm_weight := given["norm_weight"]) is not None:
            lines = rms_norm(lines, norm_weight.double(), options["eps"])
        y = F.linear(lines, given["weight"].double(), None if given["bias"] is None else given["bias"].double())
        return y.reshape(
            *[side // options["merge"] if 0 < i < 3 and len(shape) == 4 else side for i, side in enumerate(shape[:-1])],
            -1,
        )
    if op.startswith("Stem"):
        images, weight1, bias1, weight2, bias2, norm_weight = (t.double() for t in given.values())
        y = F.silu(F.conv2d(images, weight1, bias1, options["stride1"], 1))
        y = F.conv2d(y, weight2, bias2, options["stride2"], 1).permute(0, 2, 3, 1)
        return rms_norm(y, norm_weight, options["eps"])
    rule, reverse = options["rule"], options["reverse"]
    grid, shape = given.pop("conv_grid"), given["x"].shape
    if grid is not None:
        rows, columns, height = map(int, grid)
        rows, columns = shape[1:3] if len(shape) == 4 else (rows, columns)
        width = given["conv_weight"].shape[2] // height
        grid = [rows, columns, height, width]
    flags, epsilons = dict(rule=rule, reverse=tuple(reverse)), dict(eps=options["eps"], mlp_eps=options["mlp_eps"])
    given["x"] = given["x"].reshape(shape[0], -1, shape[-1])
    validate_block(from_tensors(BlockArguments, given, *flags.values(), *epsilons.values(), False, grid or ()))
    given = {name: t for name, t in given.items() if t is not None}
    if grid is not None:
        given["conv_weight"] = given["conv_weight"].unflatten(2, grid[2:])
    return residual_block(**given, **flags, **epsilons, grid=grid and grid[:2]).reshape(shape)


@given(models())
def check(model):
    op, tensors, options, fits, constants = model
    turned = {"x", "images", *LAYERS} - constants
    later = {name: -t if t is not None and name in turned else t for name, t in tensors.items()}
    shapes = {name: t if t is None else (t.shape, str(t.dtype)) for name, t in tensors.items()}
    print(op, options, shapes, constants, flush=True)
    try:
        results = run(op, tensors, options, constants, later)
    except Exception as problem:  # of several types without a common one
        assert type(problem).__module__.startswith("onnxruntime") and not fits, repr(problem)
        return
    for values, actual in zip((tensors, later), results):
        wanted = expected(op, values, options)
        assert actual.shape == tuple(wanted.shape)
        tolerance = 0.1 if op.endswith("Int8") else 1e-4
        assert error(torch.from_numpy(actual), wanted) < tolerance or not wanted.isfinite().all()


if __name__ == "__main__":
    number, examples = map(int, sys.argv[1:])
    health = list(HealthCheck)
    options = settings(max_examples=examples, deadline=None, database=None, suppress_health_check=health)
    seed(number)(options(check))()
