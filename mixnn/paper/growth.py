"""bench --grow: how the step's time grows with Q, K, the batch, the images, the backbone and the data set.

Every point changes one setting of the base (MNN's recipe), so that a row of the table reads against the first one. On
CUDA the step is recorded in a graph but not compiled: compilation takes half a minute per point and hardly changes how
the time grows. One more point is captured, as in a long run: the one that says what the search costs at Q = 65,536.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from mixnn import methods
from mixnn.config import Config
from mixnn.paper.measure import matmul_tflops, measure_step, random_images, search_milliseconds
from mixnn.progress import Reporter, print_table
from mixnn.runs.folder import environment
from mixnn.training.configure import check_images

SEARCH_POINT = {"support_size": 65_536}
AXES: dict[str, dict[str, tuple[Any, ...]]] = {  # values of each setting besides the base's
    "cuda": {
        "support_size": (16_384, 65_536, 262_144),
        "topk": (1, 16, 64),
        "batch_size": (64, 128, 512, 1024, 2048, 4096),
        "image_size": (64, 96, 128, 224),
        "backbone": ("resnet50",),
        "num_images": (5_000, 500_000),
    },
    "cpu": {  # a CPU takes seconds per step
        "support_size": (16_384, 65_536),
        "topk": (16,),
        "batch_size": (32,),
        "image_size": (16,),
        "num_images": (5_000,),
    },
}
TOGETHER: dict[str, tuple[dict[str, Any], ...]] = {
    "cuda": ({"backbone": "resnet50", "image_size": 224}, SEARCH_POINT | {"mode": "captured"}),
    "cpu": (),
}
LABELS = {"support_size": "Q", "topk": "K", "batch_size": "batch", "image_size": "pixels", "num_images": "images"}


def growth_points(kind: str, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each point changes; the base first. A method without a support set has no points for Q and K."""
    one_by_one = [{name: value} for name, values in AXES[kind].items() for value in values]
    missing = {"support_size", "topk"} - options.keys()
    return [{}, *(point for point in (*one_by_one, *TOGETHER[kind]) if not missing & point.keys())]


def measure_growth(
    base: Config, where: torch.device, seconds: float, reporter: Reporter, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure all points; `save` is called with the result so far after each."""
    start, ceiling = time.perf_counter(), matmul_tflops(where)
    about = {k: getattr(base, k) for k in ("method", "backbone", "image_size", "batch_size")}
    sizes = {k: base.options[k] for k in ("support_size", "topk") if k in base.options}
    result: dict[str, Any] = {"config": about | sizes, "environment": environment(where)}
    result |= {"matmul_tflops": round(ceiling, 2), "points": []}
    for changes in growth_points(where.type, base.options):
        reporter.info(f"{describe(changes)}:")
        row = _measure_point(base, changes, where, seconds, ceiling, reporter)
        result["points"].append({"changes": changes} | row)
        result["seconds"] = round(time.perf_counter() - start, 1)
        save(result)
    return result


def _measure_point(
    base: Config, changes: dict[str, Any], where: torch.device, seconds: float, ceiling: float, reporter: Reporter
) -> dict[str, Any]:
    options = {name: value for name, value in changes.items() if name in base.options}
    settings = {name: value for name, value in changes.items() if name not in options and name != "num_images"}
    config = replace(base, **settings)
    config = replace(config, options=methods.resolve_options(config.method, {}, base.options | options))
    images = random_images(config.image_size, changes.get("num_images", 0), at_least=config.batch_size)
    check_images(config, images)
    try:
        row, trainer, _ = measure_step(config, images, 1000, where, reporter, seconds)
    except torch.OutOfMemoryError:
        return {"skipped": "out of memory"}
    search = search_milliseconds(trainer, where, max(1, round(20 * seconds)))
    row |= {"num_images": len(images), "search_ms": round(search, 3)}
    row["search_share"] = round(search / row["ms_per_step"], 4)
    row["share_of_ceiling"] = round(row["gflop_per_step"] / row["ms_per_step"] / ceiling, 3)
    return row


def describe(changes: dict[str, Any]) -> str:
    """The changes of a point in words."""
    parts = [
        f"{LABELS[name]} {value:,}" if name in LABELS else str(value) for name, value in changes.items()
    ]  # a backbone or a mode needs no label
    return ", ".join(parts) or "base"


def show_growth(result: dict[str, Any]) -> None:
    """Print the table of `bench --grow`."""
    heads = ("what differs", "ms per step", "images/s", "of the ceiling", "search, ms", "of the step", "memory", "mode")
    print_table(heads, [_row(point) for point in result["points"]])
    config, about = result["config"], result["environment"]
    base = f"batch {config['batch_size']}, {config['image_size']} pixels"
    sizes = "".join(f", {LABELS[k]} {config[k]:,}" for k in ("support_size", "topk") if k in config)
    print(f"{about['device']}, torch {about['torch']}; base: {config['method']}, {config['backbone']}, {base}{sizes}")


def _row(point: dict[str, Any]) -> tuple[str, ...]:
    if "skipped" in point:
        return describe(point["changes"]), point["skipped"], *("",) * 6
    return (
        describe(point["changes"]),
        f"{point['ms_per_step']:.2f}",
        f"{point['images_per_s']:,}",
        f"{100 * point['share_of_ceiling']:.0f}%",
        f"{point['search_ms']:.3f}",
        f"{100 * point['search_share']:.1f}%",
        f"{point['peak_memory_gib']:.2f} GiB" if "peak_memory_gib" in point else "",
        point["mode"],
    )
