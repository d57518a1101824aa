"""An H200 that is not there, for which inductor generates code, and the operators that a GPU would run."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch

from vilonghorn.layers import short_linear
from vilonghorn.ops.backends import cpu, cuda, triton

H200 = SimpleNamespace(
    **dict(name="NVIDIA H200", major=9, minor=0, gcnArchName="", uuid="", is_integrated=0, is_multi_gpu_board=0),
    **dict(multi_processor_count=132, warp_size=32, total_memory=141 * 10**9, L2_cache_size=60 << 20),
    **dict(regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024),
    **dict(shared_memory_per_block=49152, shared_memory_per_block_optin=232448),
    **dict(shared_memory_per_multiprocessor=233472, clock_rate=1980000, memory_clock_rate=3201000),
    **dict(memory_bus_width=6144),
)


@contextlib.contextmanager
def made_up_gpu() -> Iterator[None]:
    """Lets inductor generate code for an H200."""
    from torch._dynamo import device_interface
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Interface(device_interface.CudaInterface):
        is_available = is_triton_capable = is_bf16_supported = staticmethod(lambda *_, **__: True)
        device_count, current_device = staticmethod(lambda: 1), staticmethod(lambda: 0)
        get_compute_capability = staticmethod(lambda *_: 90)
        get_device_properties = staticmethod(lambda *_: H200)
        raise_if_triton_unavailable = staticmethod(lambda *_: None)

        class Worker:
            current_device, get_device_properties = staticmethod(lambda: 0), staticmethod(lambda *_: H200)

    target = GPUTarget("cuda", 90, 32)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0))
    torch._C._ensureCUDADeviceGuardSet()
    device_interface.get_interface_for_device("cuda")  # registers all of them
    with (
        mock.patch.dict(device_interface.device_interfaces, {"cuda": Interface, "cuda:0": Interface}),
        mock.patch.object(torch.cuda, "get_device_properties", lambda *_: H200),
    ):
        yield


@contextlib.contextmanager
def composed_operators() -> Iterator[None]:
    """Runs the operators of a GPU with the CUDA library on tensors of a CPU."""
    with (
        mock.patch.object(cpu, "unavailable", lambda *_: "counted as on a GPU"),
        mock.patch.object(cuda, "unavailable", lambda *_: None),
        mock.patch.object(triton, "unavailable", lambda *_: None),
        mock.patch.object(short_linear, "runs_cublas", lambda _: True),
    ):
        yield
