"""What `bench` measures of a training step: its time, FLOPs, memory, kinds of kernels, and the neighbor search alone.

Steps run on random images. Times are device events on CUDA and the clock elsewhere, after warm-up.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from mixnn import methods
from mixnn.config import Config
from mixnn.data import ImageSet
from mixnn.device import full_precision, pick_device
from mixnn.methods import Batch
from mixnn.nn.convolution import without_kernels
from mixnn.nn.support_set import SupportRows
from mixnn.progress import Reporter
from mixnn.training.trainer import Trainer

NUM_IMAGES = 50_000  # as CIFAR has, so that batches are gathered from as much memory
MAX_BYTES = 2**30  # of random images, unless their number is given; 50,000 of 224 pixels would have 7 GiB
REPEATS = 5
KERNELS = (  # kinds of kernels and parts of their names; the first match counts
    ("batch norm", ("bn_",)),
    ("views", ("view_kernel", "blur_kernel")),
    ("optimizer and teacher", ("multi_tensor", "foreach")),
    ("selection of neighbors", ("topk", "TopK", "radix", "bitonic", "chunk_maxima", "candidates")),
    (
        "convolutions and matrix products",
        ("conv", "stem_", "gemm", "xmma", "cutlass", "nvjet", "cudnn", "wgrad", "dgrad", "addmm", "aten::mm", "bmm"),
    ),
    ("pooling", ("pool",)),
    ("augmentation, losses and the like, fused", ("triton",)),
)


def bench_config(
    method: str, given: dict[str, Any], backbone: str, image_size: int, batch_size: int, device: str, mode: str
) -> Config:
    """The configuration of a run on random images, with the method's recipe."""
    cuda = pick_device(device).type == "cuda"
    config = Config(
        data="random",
        method=method,
        backbone=backbone or ("resnet18" if cuda else "resnet8"),
        image_size=image_size,
        batch_size=batch_size or (256 if cuda else 64),
        device=device,
        mode=mode,
        knn_every=0,
        **methods.find(method).recipe,
    )
    return replace(config, options=methods.resolve_options(method, {}, given))


def random_images(size: int, count: int = 0, at_least: int = 1) -> ImageSet:
    """Random images of ten classes: `count` of them, or NUM_IMAGES, or fewer if those would exceed MAX_BYTES."""
    count = count or min(NUM_IMAGES, max(at_least, MAX_BYTES // (3 * size**2)))
    generator = torch.Generator().manual_seed(0)
    different = min(count, NUM_IMAGES)  # what exceeds that repeats: random numbers take longer than copies
    u8 = torch.randint(0, 256, (different, 3, size, size), dtype=torch.uint8, generator=generator)
    u8 = torch.cat([u8] * -(-count // different))[:count]
    labels = torch.randint(0, 10, (count,), generator=generator)
    return ImageSet(u8, labels, None, [str(i) for i in range(10)], (0.5,) * 3, (0.25,) * 3, True)


def measure_step(
    config: Config, images: ImageSet, steps: int, where: torch.device, reporter: Reporter, seconds: float = 0.0
) -> tuple[dict[str, Any], Trainer, Callable[[], None]]:
    """The measurements, the trainer, and a function that makes one step.

    If `seconds` is given, `steps` is an upper limit, and there are as few steps as that time needs.
    """
    gc.collect()  # frees an earlier trainer, which is part of a reference cycle
    held = 0  # bytes that something before this measurement still holds
    if where.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(where)
        held = torch.cuda.memory_allocated(where)
    start = time.perf_counter()
    trainer = Trainer(config, images, reporter)
    advance = stepper(trainer)
    advance()
    synchronize(where)
    result: dict[str, Any] = {"startup_s": round(time.perf_counter() - start, 1), "mode": trainer.mode}
    reporter.info(f"{config.method}: first step after {result['startup_s']} s")
    if seconds:
        steps = max(1, min(steps, round(seconds / REPEATS / 1.1 * 1e3 / milliseconds_per_call(advance, 2, where))))
    times = [milliseconds_per_call(advance, steps, where) for _ in range(REPEATS)]
    result["ms_per_step"] = round(statistics.median(times), 3)
    result["ms_spread"] = [round(min(times), 3), round(max(times), 3)]
    result["images_per_s"] = round(config.batch_size / result["ms_per_step"] * 1e3)
    if where.type == "cuda":
        result["peak_memory_gib"] = round((torch.cuda.max_memory_allocated(where) - held) / 2**30, 2)
    result["gflop_per_step"] = round(count_flops(trainer) / 1e9, 1)
    return result, trainer, advance


def stepper(trainer: Trainer) -> Callable[[], None]:
    """A function that makes one training step on the next batch."""
    size = trainer.config.batch_size
    order = torch.randperm(len(trainer.images), device=trainer.order.device)
    position = 0

    def advance() -> None:
        nonlocal position
        position = (position + size) % (len(order) - size + 1)
        trainer.step(order[position : position + size], 0.01, trainer.generator)

    return advance


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds_per_call(call: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Mean time of a call, after a few calls of warm-up."""
    for _ in range(max(1, repeats // 10)):
        call()
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) * 1e3 / repeats
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def count_flops(trainer: Trainer) -> int:
    """FLOPs of one step's forward and backward passes."""
    counter = FlopCounterMode(display=False)  # counts operators, and would spoil code that is compiled under it
    with torch.compiler.set_stance("force_eager"), without_kernels(), counter:
        trainer.step.loss()[0].backward()
    return counter.get_total_flops()


def matmul_tflops(device: torch.device) -> float:
    """TFLOP/s of a large square matrix product: bf16 on CUDA, fp32 elsewhere."""
    n, dtype, repeats = (8192, torch.bfloat16, 20) if device.type == "cuda" else (2048, torch.float32, 3)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, b, out=out)

    ms = min(milliseconds_per_call(product, repeats, device) for _ in range(3))
    return 2 * n**3 / ms / 1e9


def search_milliseconds(trainer: Trainer, device: torch.device, repeats: int) -> float:
    """Time of all neighbor searches of one step, run alone; 0 if the method has none.

    A search is what a direction of the loss does to find its neighbors: normalize the support set, multiply, take the
    K largest cosines and gather their rows. On CUDA it is recorded in a graph, as the step is.
    """
    method: Any = trainer.method
    if not getattr(method, "rings", None) or not method.topk:
        return 0.0
    size = trainer.config.batch_size
    z_BD = torch.randn(size, method.options.dim, device=device)
    index_B = torch.arange(size, device=device)
    labels_B = torch.zeros_like(index_B)
    draws = {name: torch.rand(shape, device=device) for name, shape in method.draws(size).items()}
    batch = Batch((), labels_B, index_B, draws)
    push = tuple(SupportRows(z_BD, labels_B, index_B) for _ in method.rings)

    @torch.no_grad()
    def search() -> None:
        with full_precision(device):
            for i in range(len(method.pairs)):
                method.neighbors(i, z_BD, method.searched_rows(i, push)[0], batch)

    return milliseconds_per_call(_recorded(search) if device.type == "cuda" else search, repeats, device)


def _recorded(call: Callable[[], None]) -> Callable[[], None]:
    """The call as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries set themselves up outside the recording
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def share_by_kernel(advance: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Share of device time by kind of kernel, over a few steps."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    warnings.filterwarnings("ignore", message=".*Profiler clears events")
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        for _ in range(10 if cuda else 2):
            advance()
        synchronize(device)
    shares: dict[str, float] = {}
    for event in profiler.key_averages():
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        kind = next((kind for kind, words in KERNELS if any(w in event.key for w in words)), "other")
        shares[kind] = shares.get(kind, 0.0) + spent
    total = sum(shares.values()) or 1.0
    return {kind: round(spent / total, 3) for kind, spent in sorted(shares.items(), key=lambda item: -item[1])}
