"""Runs the program of a Core ML file in torch, operator by operator, as the reference of MIL defines them.

Core ML itself runs on macOS only. https://apple.github.io/coremltools/source/coremltools.converters.mil.mil.ops.defs.html
"""

import operator

import torch
import torch.nn.functional as F
from torch import Tensor


def tensor(value):
    """A constant of a program as torch has it."""
    return torch.as_tensor(value.copy() if hasattr(value, "copy") else value)


def slice_by_index(x, begin, end, stride=None, begin_mask=None, end_mask=None, squeeze_mask=None):
    assert squeeze_mask is None and stride is None
    begins, ends = ([False] * x.dim() if mask is None else mask for mask in (begin_mask, end_mask))
    parts = zip(begin.tolist(), end.tolist(), begins, ends)
    return x[tuple(slice(None if b else first, None if e else last) for first, last, b, e in parts)]


def conv(x, weight, bias, strides, pad_type, pad, dilations, groups):
    assert pad_type == "custom"
    (top, bottom, left, right), groups = pad.tolist(), int(groups)
    x = F.pad(x, (left, right, top, bottom))
    return F.conv2d(x, weight, bias, strides.tolist(), dilation=dilations.tolist(), groups=groups)


def batch_norm(x, mean, variance, epsilon):
    return (x - mean[:, None, None]) / (variance + epsilon).sqrt()[:, None, None]


def pad(x, pad, mode, constant_val):
    pairs = pad.view(-1, 2).flip(0).flatten().tolist()  # torch begins with the last dimension
    return F.pad(x, pairs, mode=mode, value=float(constant_val))


def concat(values, axis, interleave):
    assert not interleave
    return torch.cat(values, int(axis))


def matmul(x, y, transpose_x, transpose_y):
    return (x.mT if transpose_x else x) @ (y.mT if transpose_y else y)


def expand_dims(x, axes):
    for axis in axes.tolist():
        x = x.unsqueeze(axis)
    return x


def band_part(x, lower, upper):
    return {(-1, 0): torch.tril, (0, -1): torch.triu}[int(lower), int(upper)](x)


OPERATORS = dict(
    add=operator.add,
    sub=operator.sub,
    mul=operator.mul,
    real_div=operator.truediv,
    pow=operator.pow,
    exp=torch.exp,
    sqrt=torch.sqrt,
    silu=F.silu,
    linear=F.linear,
    inverse=lambda x, epsilon: 1 / (x + epsilon),
    clip=lambda x, alpha, beta: x.clamp(alpha, beta),
    softmax=lambda x, axis: x.softmax(int(axis)),
    reduce_sum=lambda x, axes, keep_dims: x.sum(axes.tolist(), bool(keep_dims)),
    reduce_mean=lambda x, axes, keep_dims: x.mean(axes.tolist(), bool(keep_dims)),
    reshape=lambda x, shape: x.reshape(shape.tolist()),
    transpose=lambda x, perm: x.permute(perm.tolist()),
    squeeze=lambda x, axes: x.squeeze(axes.tolist()),
    split=lambda x, split_sizes, axis: x.split(split_sizes.tolist(), int(axis)),
    reverse=lambda x, axes: x.flip(axes.tolist()),
    cast=lambda x, dtype: x.to({"fp16": torch.float16, "fp32": torch.float32}[dtype]),
    identity=lambda x: x,
    classify=lambda probabilities, classes: (classes, probabilities),
    **{f.__name__: f for f in (slice_by_index, batch_norm, conv, pad, concat, matmul, expand_dims, band_part)},
)


def load_program(model):
    """The operators of an MLModel, and a function from the values of its inputs to all values, by name."""
    from coremltools.converters.mil.frontend.milproto.load import load

    spec = model.get_spec()
    [function] = load(spec, spec.specificationVersion, model.weights_dir).functions.values()

    def run(**inputs):
        values = dict(inputs)

        def value(variable):
            if isinstance(variable, (list, tuple)):
                return [value(part) for part in variable]
            if variable.name in values:
                return values[variable.name]
            return variable.val if isinstance(variable.val, (str, list)) else tensor(variable.val)

        for op in function.operations:
            if op.op_type == "const":
                continue
            given = {name: value(variable) for name, variable in op.inputs.items() if variable is not None}
            result = OPERATORS[op.op_type](*given.values()) if len(given) < 3 else OPERATORS[op.op_type](**given)
            results = result if isinstance(result, (list, tuple)) else [result]
            values |= zip((output.name for output in op.outputs), results, strict=True)
            shapes = [(tuple(r.shape), output.shape) for r, output in zip(results, op.outputs) if isinstance(r, Tensor)]
            assert all(found == stated for found, stated in shapes if op.op_type != "classify"), (op.op_type, shapes)
        return values

    return function.operations, run
