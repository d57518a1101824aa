"""Runs other libraries on two models, and prints a table: `python examples/clients.py`.

A row's function gets a model in evaluation mode and returns two functions of a batch of images: the client's result,
and the expected one. They are compared at SIZES, which are not the model's own. The table says which libraries are not
installed and which refuse. A word, `clients.py torchao`, prints the rows that contain it, and writes nothing.
"""

import copy
import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module as lib
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import publish
import timm
import torch
from torch import Tensor, nn

from vilonghorn.export import run_exported
from vilonghorn.export.capture import capture, describe
from vilonghorn.export.formats import FORMATS
from vilonghorn.export.native import ort_library

PAGE = Path(__file__).parents[1] / "docs" / "clients.md"
MODELS: dict[str, dict] = {"vilonghornv2_nano": {}, "vilonghorn_nano": dict(depth=3, dynamic_img_size=True)}
SIZES = ((96, 96), (80, 128))  # the models are made for 64 x 64
Pair = tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]
ROWS: list[tuple[str, str, float, dict, Callable[[Any], Pair]]] = []


def row(
    package: str, what: str, run: Callable, tolerance: float = 1e-5, options: dict | None = None, **more: Any
) -> None:
    """Adds a row: package, what is run, the function, the difference that counts as equal, options of the model."""
    ROWS.append((package, what, tolerance, options or {}, partial(run, **more)))


def make(name: str, **options: Any) -> Any:
    """One of MODELS, always with the same weights."""
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=6, img_size=64, **MODELS[name] | options).eval()


def extracted(model: Any) -> Pair:
    """The last node of torchvision's feature extractor."""
    features = lib("torchvision.models.feature_extraction")
    last = features.get_graph_node_names(model)[1][-1]
    return lambda x: features.create_feature_extractor(model, [last])(x)[last], model


def gradients(model: Any, loss: Tensor) -> tuple[Tensor, ...]:
    """Gradients of all parameters."""
    return torch.autograd.grad(loss, list(model.parameters()))


def per_sample(model: Any) -> Pair:
    """Gradients of each image by `torch.func`, summed, against autograd's of the batch."""

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x[None],)).square().sum()

    grad = partial(torch.func.vmap(torch.func.grad(loss), (None, 0)), dict(model.named_parameters()))
    return lambda x: [g.sum(0) for g in grad(x).values()], lambda x: gradients(model, model(x).square().sum())


def sampled(model: Any) -> Pair:
    """The same by opacus."""
    wrapped = lib("opacus").GradSampleModule(copy.deepcopy(model).train(), strict=False, loss_reduction="sum")

    def sums(x: Tensor) -> list[Tensor]:
        wrapped.zero_grad()
        wrapped(x).square().sum().backward()
        return [p.grad_sample.sum(0) for p in wrapped.parameters()]

    return sums, lambda x: gradients(model, model(x).square().sum())


def quantized(model: Any, name: str, **options: Any) -> Pair:
    """torchao's `quantize_`, against the same model with the weights as it rounded them."""
    ao, plain = lib("torchao.quantization"), copy.deepcopy(model)
    ao.quantize_(model, getattr(ao, name)(**options))
    for path, weight in model.named_parameters():
        if type(weight) is not nn.Parameter:
            plain.get_parameter(path).data = weight.dequantize()
    return model, plain


def loaded(model: Any) -> Pair:
    """A published model that transformers quantizes on loading, against torchao's own `quantize_`."""
    with TemporaryDirectory() as folder:
        publish.save_pretrained(model, f"{folder}/model", "")
        config = lib("transformers").TorchAoConfig(lib("torchao.quantization").Int8WeightOnlyConfig())
        wrapper = lib("transformers").TimmWrapperForImageClassification
        published = wrapper.from_pretrained(f"{folder}/model", quantization_config=config)
    return lambda x: published(x).logits, quantized(model, "Int8WeightOnlyConfig")[0]


def spread(model: Any, paths: Sequence[str] = ()) -> Pair:
    """A model on a process group of one rank: by FSDP2, or by tensor parallelism of the linear layers at `paths`."""
    dist, parallel = torch.distributed, lib("torch.distributed.tensor.parallel")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plain, mesh = copy.deepcopy(model), dist.init_device_mesh("cpu", (1,))
    columns = parallel.ColwiseParallel(output_layouts=lib("torch.distributed.tensor").Replicate())
    parallel.parallelize_module(model, mesh, dict.fromkeys(paths, columns))
    return (model if paths else lib("torch.distributed.fsdp").fully_shard(model, mesh=mesh)), plain


def run_rank(rank: int, folder: str, model: Any, x: Tensor) -> None:
    """One of two processes with half of each linear layer; the first saves the logits."""
    dist, parallel = torch.distributed, lib("torch.distributed.tensor.parallel")
    whole = lib("torch.distributed.tensor").Replicate()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    columns, rows = parallel.ColwiseParallel(output_layouts=whole), parallel.RowwiseParallel(input_layouts=whole)
    styles = dict(in_proj=columns, out_proj=rows, fc1=columns, fc2=rows)
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    plan = {name: styles[last] for name in layers if (last := name.rpartition(".")[2]) in styles}
    logits = parallel.parallelize_module(model, dist.init_device_mesh("cpu", (2,)), plan)(x)
    if rank == 0:
        torch.save(logits.detach(), f"{folder}/logits")
    dist.destroy_process_group()


def spread_on_two(model: Any) -> Pair:
    """Tensor parallelism of all linear layers of the blocks on two processes."""

    def run(x: Tensor) -> Tensor:
        with TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(run_rank, (folder, model, x), nprocs=2)
            return torch.load(f"{folder}/logits")

    return run, model


def stepped(model: Any, train: Callable[[Any, Tensor, Tensor], None]) -> Pair:
    """The parameters after a step of gradient descent in another library, against those after a step in torch."""

    def step(x: Tensor, run: Callable[[Any, Tensor, Tensor], None]) -> list[Tensor]:
        trained = copy.deepcopy(model)
        run(trained, x, torch.arange(len(x)))
        return list(trained.parameters())

    def plain(trained: Any, x: Tensor, y: Tensor) -> None:
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        nn.functional.cross_entropy(trained(x), y).backward()
        optimizer.step()

    return partial(step, run=train), partial(step, run=plain)


def lightning(model: Any, x: Tensor, y: Tensor) -> None:
    """A step of lightning's Trainer."""

    class Module(lib("lightning").LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    options = dict(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    quiet = dict(enable_progress_bar=False, enable_model_summary=False)
    lib("lightning").Trainer(**options, **quiet).fit(Module(), torch.utils.data.DataLoader([(x, y)], batch_size=None))


def accelerated(model: Any, x: Tensor, y: Tensor) -> None:
    """A step of accelerate."""
    accelerator = lib("accelerate").Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()


def fastai(model: Any, x: Tensor, y: Tensor) -> None:
    """A step of fastai's Learner."""
    data, learner, _ = lib("fastai.data.core"), lib("fastai.learner"), lib("fastai.callback.progress")
    loader = lib("fastai.data.load").DataLoader([(a, b) for a, b in zip(x, y)], bs=len(x))
    options = dict(opt_func=lib("fastai.optimizer").SGD, wd=0.0, lr=0.1, loss_func=nn.CrossEntropyLoss())
    with TemporaryDirectory() as folder:
        learn = learner.Learner(data.DataLoaders(loader, loader), model, path=folder, **options)
        with learn.no_bar(), learn.no_logging():
            learn.fit(1)


def neighbours(model: Any) -> Pair:
    """Classes by scikit-learn's nearest neighbour of the embeddings, against those by torch's distances."""
    gallery = torch.randn(9, 3, 64, 64, generator=torch.Generator().manual_seed(2))

    def embed(x: Tensor) -> Tensor:
        return model.forward_head(model.forward_features(x), pre_logits=True).detach()

    def classes(x: Tensor) -> Tensor:
        fitted = lib("sklearn.neighbors").KNeighborsClassifier(1).fit(embed(gallery).numpy(), range(len(gallery)))
        return torch.from_numpy(fitted.predict(embed(x).numpy())).float()

    return classes, lambda x: torch.cdist(embed(x), embed(gallery)).argmin(1).float()


def measured(model: Any) -> Pair:
    """Accuracy of torchmetrics, against the fraction of right classes."""
    metric = lib("torchmetrics.classification").MulticlassAccuracy(6, average="micro")
    wanted = lambda x: model(x).argmax(1) * torch.tensor([1, 0])  # noqa: E731
    return lambda x: metric(model(x), wanted(x)), lambda x: (model(x).argmax(1) == wanted(x)).float().mean()


def wrapped(model: Any) -> Pair:
    """A mixer in a module that has only a forward."""
    plain, block = copy.deepcopy(model), (model.stages[-1].blocks if hasattr(model, "stages") else model.blocks)[0]
    block.mixer = type("Adapter", (nn.Sequential,), dict(forward=lambda self, *args: self[0](*args)))(block.mixer)
    return model, plain


def adapted(model: Any, **config: Any) -> Pair:
    """peft's LoRA with random matrices, against the merged weights."""
    tuned = lib("peft").get_peft_model(model, lib("peft").LoraConfig(r=2, init_lora_weights=False, **config)).eval()
    return tuned, copy.deepcopy(tuned).merge_and_unload()


def distilled(model: Any, name: str) -> Pair:
    """Gradients of the student in a task of timm whose teacher counts nothing, against those of cross entropy."""
    options = dict(criterion=nn.CrossEntropyLoss(), task_loss_weight=1.0, distill_loss_weight=0.0, verbose=False)
    task = getattr(lib("timm.task"), name)(model, make("vilonghorn_nano"), **options).eval()
    losses = (lambda x, y: task(x, y)["loss"]), (lambda x, y: nn.functional.cross_entropy(model(x), y))
    return tuple(lambda x, loss=loss: gradients(model, loss(x, torch.zeros(len(x)).long())) for loss in losses)


def masked(model: Any) -> Pair:
    """Features of masked images, against those of the same with other pixels under the mask."""

    def features(x: Tensor, fill: float | None = None) -> Tensor:
        random.seed(1)
        mask = lib("lightly.models.utils").random_block_mask((len(x), x.shape[2] // 16, x.shape[3] // 16))
        pixels = mask.repeat_interleave(16, 1).repeat_interleave(16, 2)[:, None]
        return model.forward_features(x if fill is None else torch.where(pixels, fill, x), masked=mask)

    return features, partial(features, fill=9.0)


def exported(model: Any, open_file: Callable[[str], Callable], kind: str = "onnx", scan: str = "standard") -> Pair:
    """A file of `vilonghorn export`, opened by a runtime."""
    model.requires_grad_(False)
    with TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        FORMATS[kind].write(
            capture(model, FORMATS[kind].library is not None, scan=scan), path, describe(model, scan=scan)
        )
        return open_file(str(path)), model


def openvino(path: str) -> Callable[[Tensor], Tensor]:
    """A file in OpenVINO, with sums in float32."""
    compiled = lib("openvino").compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda x: torch.from_numpy(compiled(x.numpy())[0])


def node(path: str) -> Callable[[Tensor], Tensor]:
    """A file in onnxruntime-web, WebAssembly with one thread."""
    content = Path(path).read_bytes().hex()

    def run(x: Tensor) -> Tensor:
        data = dict(content=content, shape=list(x.shape), values=x.flatten().tolist())
        command = ["node", "--input-type=module", "-e", NODE, f"{WEB}/dist/ort.wasm.bundle.min.mjs"]
        done = subprocess.run(command, input=json.dumps(data), capture_output=True, text=True, check=True)
        return torch.tensor(json.loads(done.stdout))

    return run


def executorch(model: Any) -> Pair:
    """A program of ExecuTorch with XNNPACK, one for each size."""

    def run(x: Tensor) -> Tensor:
        parts = [lib("executorch.backends.xnnpack.partition.xnnpack_partitioner").XnnpackPartitioner()]
        program = torch.export.export(model, (x,), strict=False)
        lowered = lib("executorch.exir").to_edge_transform_and_lower(program, partitioner=parts).to_executorch()
        loaded = lib("executorch.runtime").Runtime.get().load_program(lowered.buffer)
        return loaded.load_method("forward").execute([x])[0].clone()

    return run, model


WEB = os.environ.get("ORT_WEB", "")  # the folder `package` of onnxruntime-web
NODE = """
const ort = await import(process.argv[1]), fs = await import("fs");
ort.env.wasm.numThreads = 1;
const { content, shape, values } = JSON.parse(fs.readFileSync(0));
const session = await ort.InferenceSession.create(Buffer.from(content, "hex"));
const { output } = await session.run({ images: new ort.Tensor("float32", Float32Array.from(values), shape) });
console.log(JSON.stringify(Array.from(output.data)));
"""
VIT = "MaskedVisionTransformerTIMM"
TASKS = ("LogitDistillationTask", "FeatureDistillationTask", "TokenDistillationTask")
IN_PROJ = ("blocks.*.mixer.in_proj", "stages.*.blocks.*.mixer.in_proj")
row("torch", "`torch.fx.symbolic_trace`", lambda model: (torch.fx.symbolic_trace(model), model))
row("torchvision", "`create_feature_extractor`", extracted)
row("torch", "per-sample gradients, `torch.func.vmap(grad)`", per_sample)
row("torch", "the same with `exportable=True`", per_sample, options=dict(exportable=True))
row("opacus", "`GradSampleModule`, with `exportable=True`", sampled, options=dict(exportable=True))
row("torchao", "`Int8WeightOnlyConfig`", quantized, name="Int8WeightOnlyConfig")
row("torchao", "int8 weights and activations", quantized, 0.1, name="Int8DynamicActivationInt8WeightConfig")
row("transformers", "`TimmWrapper` with `TorchAoConfig`, int8 weights", loaded)
row("torch", "FSDP2: `fully_shard`", spread)
row("torch", "tensor parallel: `parallelize_module` of `in_proj`", spread, paths=IN_PROJ)
row("torch", "tensor parallel on two processes: all linear layers of the blocks", spread_on_two)
row("lightning", "a step of `Trainer`", stepped, train=lightning)
row("accelerate", "a step after `prepare`", stepped, train=accelerated)
row("fastai", "a step of `Learner`", stepped, train=fastai)
row("scikit-learn", "`KNeighborsClassifier` of embeddings", neighbours)
row("torchmetrics", "`MulticlassAccuracy`", measured)
row("torch", "a mixer wrapped in another module", wrapped)
row("peft", "LoRA of `in_proj` and `out_proj`", adapted, target_modules=["in_proj", "out_proj"])
row("peft", "LoRA of the parameter `x_proj`", adapted, target_modules=[], target_parameters=["mixer.x_proj"])
for task in TASKS:
    row("timm", f"`timm.task.{task}`", distilled, name=task)
row("lightly", "`random_block_mask` as `masked=`, pixels under it changed", masked, 0.0, dict(mask_token=True))
row("lightly", f"`{VIT}`", lambda m: (getattr(lib("lightly.models.modules"), VIT)(m), m))
ort = run_exported.load_onnx
row("onnxruntime", "`--to onnx --scan attention`", exported, open_file=ort, scan="attention")
row("onnxruntime", "`--to onnx --scan standard`", exported, open_file=ort)
native = partial(run_exported.load_onnx, library=ort_library())
row("onnxruntime", "`--to ort`", exported, open_file=native, kind="ort")
row("openvino", "`--to onnx --scan standard`", exported, open_file=openvino)
row("openvino", "`--to onnx --scan attention`", exported, open_file=openvino, scan="attention")
row("onnxruntime-web", "`--to onnx --scan attention`, in node", exported, open_file=node, scan="attention")
row("onnxruntime-web", "`--to onnx --scan standard`, in node", exported, open_file=node)
row("executorch", "XNNPACK, a program for each size", executorch, options=dict(exportable=True))


def result(name: str, run: Callable[[Any], Pair], tolerance: float, options: dict) -> str:
    """The relative differences at SIZES, in bold if one is too large; or the sentence of an error."""
    differences = []
    try:
        actual, expected = run(make(name, **options))
        for size in SIZES:
            x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
            a, b = (run(x) for run in (actual, expected))
            a, b = (torch.cat([t.detach().flatten() for t in ([y] if isinstance(y, Tensor) else y)]) for y in (a, b))
            differences.append(float((a - b).norm() / b.norm()))
    except Exception as error:  # of any library: the table says which
        words = " ".join(str(error).replace("|", " ").replace("`", "'").split())
        return f"refused: `{words[:160].rsplit('. ', 1)[0]}`"
    text = ", ".join(f"{difference:.0e}" for difference in differences)
    return text if max(differences) <= tolerance else f"**{text}**"


def main(only: str = "") -> None:
    """Runs the rows that contain a word."""
    warnings.filterwarnings("ignore")
    installed = {distribution.name: distribution.version for distribution in distributions()}
    if WEB:
        installed["onnxruntime-web"] = json.loads(Path(WEB, "package.json").read_text("utf-8"))["version"]
    lines = [f"| client | version | what was run | {' | '.join(f'`{name}`' for name in MODELS)} |", "|---" * 5 + "|"]
    for package, what, tolerance, options, run in ROWS:
        if only in f"{package} {what}":
            cells = [result(name, run, tolerance, options) if package in installed else "" for name in MODELS]
            lines.append(f"| {package} | {installed.get(package, 'not installed')} | {what} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
