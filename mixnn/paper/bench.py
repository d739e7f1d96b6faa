"""bench: the cost of a training step, compared with the same recipe in a plain PyTorch loop.

The step is timed on random images, after warm-up, with device events on CUDA. FLOPs are counted by torch over one real
step, and compared with the FLOP/s that a large matrix product reaches in the same process.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch

from mixnn import methods
from mixnn.config import Config, Device, Overwrite, Param, UserError, fields_of, setting, verb
from mixnn.data import ImageSet
from mixnn.device import pick_device
from mixnn.files import check_writable, expand, write_atomically
from mixnn.nn.backbone import check_backbone, name_backbone
from mixnn.paper.baseline import time_baseline
from mixnn.paper.growth import measure_growth, show_growth
from mixnn.paper.measure import (
    REPEATS,
    bench_config,
    matmul_tflops,
    measure_step,
    random_images,
    share_by_kernel,
)
from mixnn.progress import Reporter, plural, print_table, reporter_for
from mixnn.runs.folder import environment
from mixnn.training.configure import check_device, check_images


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
    steps: Annotated[int, Param("steps per measurement; it makes five [100 on CUDA, 1 elsewhere]", low=0)] = 0,
    device: Device = "auto",
    mode: Annotated[str, Param("how a step runs", choices=fields_of(Config)["mode"].param.choices)] = "auto",
    grow: Annotated[bool, Param("time the step for larger Q, K, batches, images, backbones and data sets")] = False,
    baseline: Annotated[bool, Param("compare with a plain PyTorch loop and a Pillow DataLoader")] = True,
    save: Annotated[str | Path, Param("also write the numbers to this file", metavar="FILE")] = "",
    overwrite: Overwrite = False,
    verbose: bool | Reporter = False,
) -> dict[str, Any]:
    """Time the training step: ms per step, images/s, FLOP/s, memory, and time by kind of kernel.

    method="all" times every method, and compares it with the time its encoder passes would take at MNN's speed.
    Methods that encode one view per pass are also timed with twice the batch, so that a pass has as many images as
    MNN's. grow=True changes one setting at a time, a few seconds for each, and also times the neighbor search alone.

    >>> found = mixnn.bench(image_size=8, batch_size=16, baseline=False)
    >>> found["ms_per_step"] > 0
    True

    Examples:
        mixnn bench
        mixnn bench --method all --no-baseline --save bench.json
        mixnn bench --backbone resnet50 --image-size 224 --no-baseline
        mixnn bench --grow --save growth.json
    """
    reporter, where = reporter_for(verbose), pick_device(device)
    names = methods.METHODS if method == "all" else [method]
    backbone = name_backbone(backbone)[0] if backbone else ""
    given = options or {}, backbone, image_size, batch_size, device, mode
    configs = {name: bench_config(name, *given) for name in names}
    images = random_images(image_size, at_least=min(c.batch_size for c in configs.values()))
    if method == "all":
        if grow:
            raise UserError(f"{setting('grow', True)} times one method: name it instead of all")
        configs |= _doubled(configs, len(images))
    for config in configs.values():
        check_device(config)
        check_backbone(config.backbone)
        check_images(config, images)
    save = expand(save) if str(save) else ""
    if str(save):
        check_writable(save, overwrite)
    steps = steps or (100 if where.type == "cuda" else 1)
    if grow:
        return _grow(configs[method], where, reporter, save)
    if method == "all":
        result = _all_methods(configs, images, steps, where, reporter)
    else:
        result = _one_method(configs[method], images, steps, where, baseline, reporter)
    _save(result, save)
    return result


def _save(result: dict[str, Any], path: str | Path) -> None:
    if str(path):
        write_atomically(Path(path), (json.dumps(result, indent=1) + "\n").encode())


def _grow(base: Config, where: torch.device, reporter: Reporter, save: str | Path) -> dict[str, Any]:
    """Measure how the step's time grows; what is measured is saved after every point."""
    seconds = 2.0 if where.type == "cuda" else 0.1
    return measure_growth(base, where, seconds, reporter, lambda result: _save(result, save))


def _doubled(configs: dict[str, Config], num_images: int) -> dict[str, Config]:
    """Configurations with twice the batch for the methods that encode one view per pass, by a label that says so."""
    one_view = [c for c in configs.values() if max(methods.passes(c.method, c.options)) == 1]
    fit = [c for c in one_view if 2 * c.batch_size <= min(num_images, c.options.get("support_size", num_images))]
    return {f"{c.method}, batch {2 * c.batch_size}": replace(c, batch_size=2 * c.batch_size) for c in fit}


def _one_method(
    config: Config, images: ImageSet, steps: int, where: torch.device, baseline: bool, reporter: Reporter
) -> dict[str, Any]:
    """Measure one method, and compare it with the plain loop."""
    measured, _, advance = measure_step(config, images, steps, where, reporter)
    about = {k: getattr(config, k) for k in ("method", "backbone", "image_size", "batch_size")}
    result: dict[str, Any] = {"config": about, "environment": environment(where)} | measured
    result["share_by_kernel"] = share_by_kernel(advance, where)
    tflops, ceiling = result["gflop_per_step"] / result["ms_per_step"], matmul_tflops(where)
    result |= {"tflops": round(tflops, 2), "matmul_tflops": round(ceiling, 2)}
    result["share_of_ceiling"] = round(tflops / ceiling, 3)
    if baseline:
        reporter.info("timing the plain loop: eager PyTorch, Pillow in a DataLoader")
        result["plain_loop"] = time_baseline(images, config, seconds=20 if where.type == "cuda" else 10)
        result["times_faster"] = round(result["plain_loop"]["ms_per_step"] / result["ms_per_step"], 1)
    return result


def _all_methods(
    configs: dict[str, Config], images: ImageSet, steps: int, where: torch.device, reporter: Reporter
) -> dict[str, Any]:
    """Time every method, and compare it with MNN's time scaled by the cost of its encoder passes."""
    measured: dict[str, dict[str, Any]] = {}
    for label, config in configs.items():
        about = {"passes": [*methods.passes(config.method, config.options)], "batch_size": config.batch_size}
        measured[label] = about | measure_step(config, images, steps, where, reporter)[0]
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


def show_bench(result: dict[str, Any]) -> None:
    """Print what `bench` measured."""
    if "points" in result:
        show_growth(result)
        return
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
