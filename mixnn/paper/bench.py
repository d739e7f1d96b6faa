"""bench: the cost of a training step, compared with the same recipe in a plain PyTorch loop.

The step is timed on random images, after warm-up, with device events on CUDA. FLOPs are counted by torch over one real
step, and compared with the FLOP/s that a large matrix product reaches in the same process.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from mixnn import methods
from mixnn.config import Config, Device, Overwrite, Param, fields_of, verb
from mixnn.data import ImageSet
from mixnn.device import pick_device
from mixnn.files import check_writable, write_atomically
from mixnn.nn.backbone import check_backbone, name_backbone
from mixnn.paper.baseline import time_baseline
from mixnn.progress import Reporter, plural, print_table, reporter_for
from mixnn.runs.folder import environment
from mixnn.training.configure import check_device, check_images
from mixnn.training.trainer import Trainer

NUM_IMAGES = 50_000  # as CIFAR has, so that batches are gathered from as much memory
REPEATS = 5
KERNELS = (  # kinds of kernels and parts of their names; the first match counts
    ("batch norm", ("bn_",)),
    ("optimizer and teacher", ("multi_tensor", "foreach")),
    (
        "convolutions and matrix products",
        ("conv", "gemm", "xmma", "cutlass", "nvjet", "cudnn", "wgrad", "dgrad", "addmm", "aten::mm", "bmm"),
    ),
    ("augmentation, losses and the like, fused", ("triton",)),
)


@verb
def bench(
    method: Annotated[str, Param("which method, or all", flag="--method", metavar="METHOD")] = "mnn",
    *,
    options: Annotated[
        dict[str, Any] | None, Param("an option of the method", flag="--set", metavar="OPTION=VALUE")
    ] = None,
    backbone: Annotated[str, Param("encoder [resnet18 on CUDA, resnet8 elsewhere]")] = "",
    image_size: Annotated[int, Param("side of the images", low=4)] = 32,
    batch_size: Annotated[int, Param("images per step [256 on CUDA, 64 elsewhere]", low=0)] = 0,
    steps: Annotated[int, Param("timed steps, five times over [100 on CUDA, 1 elsewhere]", low=0)] = 0,
    device: Device = "auto",
    mode: Annotated[str, Param("how a step runs", choices=fields_of(Config)["mode"].param.choices)] = "auto",
    baseline: Annotated[bool, Param("compare with a plain PyTorch loop and a Pillow DataLoader")] = True,
    save: Annotated[str | Path, Param("also write the numbers to this file", flag="--json", metavar="FILE")] = "",
    overwrite: Overwrite = False,
    verbose: bool | Reporter = False,
) -> dict[str, Any]:
    """Time the training step: ms per step, images/s, FLOP/s, memory, and time by kind of kernel.

    method="all" times every method, and compares it with the time that its encoder passes would take at MNN's rate.
    Methods that encode one view per pass are also timed with twice the batch, so that a pass has as many images as
    MNN's.

    >>> found = mixnn.bench(image_size=8, batch_size=16, baseline=False)
    >>> found["ms_per_step"] > 0
    True

    Examples:
        mixnn bench
        mixnn bench --method all --no-baseline --json bench.json
    """
    reporter, where = reporter_for(verbose), pick_device(device)
    names = methods.METHODS if method == "all" else [method]
    backbone = name_backbone(backbone)[0] if backbone else ""
    configs = {name: _config(name, options or {}, backbone, image_size, batch_size, device, mode) for name in names}
    if method == "all":
        configs |= _doubled(configs)
    images = random_images(image_size)
    for config in configs.values():
        check_device(config)
        check_backbone(config.backbone)
        check_images(config, images)
    if str(save):
        check_writable(save, overwrite)
    steps = steps or (100 if where.type == "cuda" else 1)
    if method == "all":
        result = _all_methods(configs, images, steps, where, reporter)
    else:
        result = _one_method(configs[method], images, steps, where, baseline, reporter)
    if str(save):
        write_atomically(Path(save), (json.dumps(result, indent=1) + "\n").encode())
    return result


def _config(
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
        mode="captured" if mode == "auto" and cuda else mode,  # as in a long run
        knn_every=0,
        **methods.find(method).recipe,
    )
    return replace(config, options=methods.resolve_options(method, {}, given))


def _doubled(configs: dict[str, Config]) -> dict[str, Config]:
    """Configurations with twice the batch for the methods that encode one view per pass, by a label that says so."""
    one_view = [c for c in configs.values() if max(methods.passes(c.method, c.options)) == 1]
    fit = [c for c in one_view if 2 * c.batch_size <= min(NUM_IMAGES, c.options.get("support_size", NUM_IMAGES))]
    return {f"{c.method}, batch {2 * c.batch_size}": replace(c, batch_size=2 * c.batch_size) for c in fit}


def _measure(
    config: Config, images: ImageSet, steps: int, where: torch.device, reporter: Reporter
) -> tuple[Any, Any, Any]:
    """The measurements, the trainer, and a function that makes one step."""
    gc.collect()  # frees an earlier trainer, which is part of a reference cycle
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where)
    start = time.perf_counter()
    trainer = Trainer(config, images, reporter)
    advance = _stepper(trainer)
    advance()
    _synchronize(where)
    result: dict[str, Any] = {"startup_s": round(time.perf_counter() - start, 1), "mode": trainer.mode}
    reporter.info(f"{config.method}: first step after {result['startup_s']} s")
    times = [_time(advance, steps, where) for _ in range(REPEATS)]
    result["ms_per_step"] = round(statistics.median(times), 3)
    result["ms_spread"] = [round(min(times), 3), round(max(times), 3)]
    result["images_per_s"] = round(config.batch_size / result["ms_per_step"] * 1e3)
    if where.type == "cuda":
        result["peak_memory_gib"] = round(torch.cuda.max_memory_allocated(where) / 2**30, 2)
    result["gflop_per_step"] = round(_count_flops(trainer) / 1e9, 1)
    return result, trainer, advance


def _one_method(
    config: Config, images: ImageSet, steps: int, where: torch.device, baseline: bool, reporter: Reporter
) -> dict[str, Any]:
    """Measure one method, and compare it with the plain loop."""
    measured, trainer, advance = _measure(config, images, steps, where, reporter)
    about = {k: getattr(config, k) for k in ("method", "backbone", "image_size", "batch_size")}
    result = {"config": about, "environment": environment(where)} | measured
    result["share_by_kernel"] = _share_by_kernel(advance, where)
    tflops, ceiling = result["gflop_per_step"] / result["ms_per_step"], _matmul_tflops(where)
    result |= {"tflops": round(tflops, 2), "matmul_tflops": round(ceiling, 2)}
    result["share_of_ceiling"] = round(tflops / ceiling, 3)
    if baseline:
        reporter.info("timing the plain loop: eager PyTorch, Pillow in a DataLoader")
        result["plain_loop"] = time_baseline(
            images, config, trainer.step.views, seconds=20 if where.type == "cuda" else 10
        )
        result["times_faster"] = round(result["plain_loop"]["ms_per_step"] / result["ms_per_step"], 1)
    return result


def _all_methods(
    configs: dict[str, Config], images: ImageSet, steps: int, where: torch.device, reporter: Reporter
) -> dict[str, Any]:
    """Time every method, and compare it with MNN's time scaled by the cost of its encoder passes."""
    measured = {}
    for label, config in configs.items():
        about = {"passes": [*methods.passes(config.method, config.options)], "batch_size": config.batch_size}
        measured[label] = about | _measure(config, images, steps, where, reporter)[0]
    costs = {label: methods.cost(c.method, c.options) * c.batch_size for label, c in configs.items()}
    for label, row in measured.items():
        row["expected_ms"] = round(measured["mnn"]["ms_per_step"] / costs["mnn"] * costs[label], 3)
        row["over_expected"] = round(row["ms_per_step"] / row["expected_ms"], 3)
    about = {k: getattr(configs["mnn"], k) for k in ("backbone", "image_size", "batch_size")}
    return {"config": about, "environment": environment(where), "methods": measured}


def _table_row(label: str, row: dict[str, Any]) -> tuple[str, ...]:
    return (
        label,
        "{} + {}".format(*row["passes"]),
        *(f"{row[number]:.2f}" for number in ("ms_per_step", "expected_ms", "over_expected")),
        f"{row['gflop_per_step']:,.0f}",
        f"{row['peak_memory_gib']:.2f} GiB" if "peak_memory_gib" in row else "",
        f"{row['startup_s']:.1f} s",
    )


def random_images(size: int) -> ImageSet:
    """NUM_IMAGES random images of ten classes."""
    generator = torch.Generator().manual_seed(0)
    u8 = torch.randint(0, 256, (NUM_IMAGES, 3, size, size), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (NUM_IMAGES,), generator=generator)
    return ImageSet(u8, labels, None, [str(i) for i in range(10)], (0.5,) * 3, (0.25,) * 3, True)


def _stepper(trainer: Trainer) -> Callable[[], None]:
    """A function that makes one training step on the next batch."""
    size = trainer.config.batch_size
    order = torch.randperm(len(trainer.images), device=trainer.order.device)
    position = 0

    def advance() -> None:
        nonlocal position
        position = (position + size) % (len(order) - size + 1)
        trainer.step(order[position : position + size], 0.01, trainer.generator)

    return advance


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time(advance: Callable[[], None], steps: int, device: torch.device) -> float:
    """Milliseconds per step, after a few steps of warm-up."""
    for _ in range(max(1, steps // 10)):
        advance()
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(steps):
            advance()
        return (time.perf_counter() - start) * 1e3 / steps
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(steps):
        advance()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / steps


def _count_flops(trainer: Trainer) -> int:
    """FLOPs of one step's forward and backward passes."""
    counter = FlopCounterMode(display=False)  # counts operators, and would spoil code that is compiled under it
    with torch.compiler.set_stance("force_eager"), counter:
        trainer.step.loss()[0].backward()
    return counter.get_total_flops()


def _matmul_tflops(device: torch.device) -> float:
    """TFLOP/s of a large square matrix product: bf16 on CUDA, fp32 elsewhere."""
    n, dtype, repeats = (8192, torch.bfloat16, 20) if device.type == "cuda" else (2048, torch.float32, 3)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, b, out=out)

    ms = min(_time(product, repeats, device) for _ in range(3))
    return 2 * n**3 / ms / 1e9


def _share_by_kernel(advance: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Share of device time by kind of kernel, over a few steps."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    warnings.filterwarnings("ignore", message=".*Profiler clears events")
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        for _ in range(10 if cuda else 2):
            advance()
        _synchronize(device)
    shares: dict[str, float] = {}
    for event in profiler.key_averages():
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        kind = next((kind for kind, words in KERNELS if any(w in event.key for w in words)), "other")
        shares[kind] = shares.get(kind, 0.0) + spent
    total = sum(shares.values()) or 1.0
    return {kind: round(spent / total, 3) for kind, spent in sorted(shares.items(), key=lambda item: -item[1])}


def show_bench(result: dict[str, Any]) -> None:
    """Print what `bench` measured."""
    if "methods" not in result:
        _show_one(result)
        return
    heads = ("method", "passes", "ms per step", "at MNN's rate", "ratio", "GFLOP", "memory", "first step")
    print_table(heads, [_table_row(label, row) for label, row in result["methods"].items()])
    about = result["environment"]
    print(f"{about['device']}, torch {about['torch']}, {result['config']['backbone']}")


def _show_one(r: dict[str, Any]) -> None:
    """Print the measurements of one method."""
    rows = [
        (
            "step",
            f"{r['ms_per_step']:.2f} ms (median of {REPEATS}; {r['ms_spread'][0]:.2f} to {r['ms_spread'][1]:.2f})",
        ),
        ("images/s", f"{r['images_per_s']:,}"),
        ("counted", f"{r['gflop_per_step']:,.0f} GFLOP per step"),
        ("achieved", f"{r['tflops']:.2f} TFLOP/s"),
        (
            "ceiling",
            f"{r['matmul_tflops']:.2f} TFLOP/s, a large matrix product: {100 * r['share_of_ceiling']:.0f}% of it",
        ),
        ("start-up", f"{r['startup_s']:.1f} s to the first step"),
    ]
    if "peak_memory_gib" in r:
        rows.append(("peak memory", f"{r['peak_memory_gib']:.2f} GiB"))
    rows += [(f"  {100 * share:.0f}%", kind) for kind, share in r["share_by_kernel"].items()]
    if "plain_loop" in r:
        p = r["plain_loop"]
        text = f"{p['ms_per_step']:.1f} ms per step ({plural(p['workers'], 'loader worker')}, {p['precision']})"
        rows.append(("plain loop", f"{text}: {r['times_faster']:g} times as long"))
    print_table(
        (
            r["environment"]["device"],
            f"torch {r['environment']['torch']}, {r['config']['method']}, {r['config']['backbone']}",
        ),
        rows,
    )
