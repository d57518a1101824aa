"""The exact rule as onnxruntime's operator LinearAttention, in files of `--to onnx`."""

import torch
from torch import Tensor, nn

from ..layers.exportable import ExportableMixer, make_exportable, replace_classes
from ..ops.arguments import ScanArguments
from ..ops.exportable import scan_exportable
from ..ops.rules import RULES
from ..ops.scan_order import flip_reversed

SCANS = ("attention", "standard")
RULE, DOMAIN = "longhorn_exact", "com.microsoft"
RUNTIME = (1, 30)  # the first onnxruntime that has the operator
NEEDS = "onnxruntime 1.30 or later, for its operator LinearAttention; files of --scan standard run with others, too"


def linear_attention(args: ScanArguments) -> Tensor:
    """`scan` with rule "longhorn_exact", without z, as one operator for all directions: (G, B, L, D)."""
    reverse, dt = args.reverse, args.dt if args.dt_bias is None else args.dt + args.dt_bias[:, None, None]
    tokens = [args.q, args.k, args.x, RULES[RULE].gate(dt, args.k)]
    if any(reverse):
        tokens = [torch.stack(flip_reversed(t, reverse)) for t in tokens]
    G, B, L, width = args.x.shape
    query, key, value, beta = (t.flatten(0, 1) for t in tokens)
    heads, N = dt.shape[-1], args.k.shape[-1]
    attrs = dict(update_rule="delta", q_num_heads=1, kv_num_heads=heads, scale=1.0)
    y, _ = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::LinearAttention",
        (query, key, value, None, None, beta),
        attrs,
        dtypes=[torch.float32, torch.float32],
        shapes=[value.shape, (G * B, heads, N, width // heads)],  # the second is the last state
        version=1,
    )
    y = y.unflatten(0, (G, B))
    y = torch.stack(flip_reversed(y, reverse)) if any(reverse) else y
    return y if args.D is None else y + args.D[:, None, None] * args.x


class AttentionMixer(ExportableMixer):
    """A mixer whose scan, of the exact rule, is `linear_attention`."""

    scan_function = staticmethod(lambda args: (linear_attention if args.rule == RULE else scan_exportable)(args))


def use_attention(model: nn.Module) -> nn.Module:
    """Replaces the classes of norms and mixers in a model, in place, and returns it."""
    return replace_classes(make_exportable(model), {ExportableMixer: AttentionMixer})


def check_runtime() -> None:
    """Raises ImportError if the installed onnxruntime does not have the operator."""
    import onnxruntime

    if tuple(int(part) for part in onnxruntime.__version__.split(".")[:2]) < RUNTIME:
        needs = f"onnxruntime {'.'.join(map(str, RUNTIME))} or later to check the file, found {onnxruntime.__version__}"
        raise ImportError(f"--scan attention needs {needs}: install a later one, or export with --scan standard")
