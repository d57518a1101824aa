"""Forward, backward, clipping and optimizer of an update as one CUDA graph, which the host only replays.

Without it the host takes longer to start the kernels of a small model than the GPU to run them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .config import Config

EAGER_UPDATES = 3  # before the capture; in the first, torch.compile and the optimizer allocate memory

Update = Callable[..., Tensor]


def why_not_captured(config: Config, device: torch.device, processes: int, is_capturable: bool) -> str | None:
    """Why updates of a run cannot be captured, with what to change, or None if they can."""
    accumulate, mode, sizes = config.optimizer.accumulate, config.run.compile, config.image_sizes()
    if device.type != "cuda":
        return f"the run is on {device.type}: CUDA graphs need an NVIDIA GPU"
    if processes > 1:
        return f"there are {processes} processes, whose gradients are averaged outside the graph: start one"
    if accumulate > 1:
        return f"optimizer.accumulate is {accumulate}, and the graph holds one batch: make it 1"
    if config.run.amp == "fp16":
        return "run.amp is fp16, whose loss scale is decided on the CPU: make it bf16"
    if mode in ("reduce-overhead", "max-autotune"):
        return f"run.compile is {mode!r}, which captures graphs of its own: make it 'default'"
    if len(sizes) > 1:
        return f"images have {len(sizes)} sizes, and the graph holds one: leave augmentation.sizes and start_size empty"
    if config.task.kind != "classification" or config.task.teacher:
        return "only classification without a teacher is captured"
    if not is_capturable:
        return f"optimizer.name is {config.optimizer.name!r}, which decides on the CPU: make it 'adamw', which is fused"
    return None


def cuda_graph(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Captures a call without running it; returns what runs it, whose result is the same memory each time."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


class CapturedUpdate:
    """Runs `update` on a batch, as it is at first, then captured, on copies of the batch.

    Args:
        update: makes an update from the tensors of a batch, and of a graph's own memory, with no wait for the device.
        optimizer: its groups have numbers as rates between the calls, and tensors within.
        capture: as `cuda_graph`.
    """

    def __init__(self, update: Update, optimizer: torch.optim.Optimizer, capture: Callable = cuda_graph) -> None:
        self.update, self.groups, self.capture, self.calls = update, optimizer.param_groups, capture, 0
        self.rates = [torch.zeros((), device=group["params"][0].device) for group in self.groups]

    def __call__(self, *batch: Tensor) -> Tensor:
        """Raises ValueError if the batch has other shapes than those that were captured."""
        given = [(group["lr"], group["capturable"]) for group in self.groups]
        for group, rate in zip(self.groups, self.rates):
            group["lr"] = rate.fill_(group["lr"])
        self.calls += 1
        try:
            if self.calls <= EAGER_UPDATES:
                return self.update(*batch)
            if self.calls == EAGER_UPDATES + 1:
                self.batch = [t.clone() for t in batch]
                for group in self.groups:
                    group["capturable"] = True
                self.replay = self.capture(lambda: self.update(*self.batch))
            shapes, expected = [tuple(t.shape) for t in batch], [tuple(t.shape) for t in self.batch]
            if shapes != expected:
                raise ValueError(f"run.capture: a batch has the shapes {shapes}, but {expected} were captured")
            for static, t in zip(self.batch, batch):
                static.copy_(t)
            return self.replay()
        finally:
            for group, (lr, capturable) in zip(self.groups, given):
                group["lr"], group["capturable"] = lr, capturable
