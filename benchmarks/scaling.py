"""What a step on several GPUs sends, and a model of how long it takes; the tables of docs/scaling.md.

    python benchmarks/scaling.py                                   print the tables
    python benchmarks/scaling.py --measure scaling-h200.json       first measure this GPU's part of the model
    python benchmarks/scaling.py --times scaling-h200.json         print the tables with times that were measured before
    python benchmarks/scaling.py --page                            write them into docs/scaling.md (make pages)

Times in results/scaling-h200.json are used if that file is there.

The model has three parts. Compute: the backbones' time for the images of one GPU, a line through measured steps of one
GPU, and the heads' time for the whole batch, from their operations. Gather: the features of all GPUs. All-reduce: the
gradients, which networks in bf16 send when the backward pass has ended. Messages take a latency, and their bytes
divided by the bandwidth of a link, as in a ring.

`--measure` times the recorded step on one GPU, without and with a group of one NCCL process, for several batch sizes.
It needs no second GPU, and says nothing about links: their numbers are assumptions, in `LINKS`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist

from mixnn import dist, methods
from mixnn.config import Config
from mixnn.data.image_set import ImageSet
from mixnn.methods import METHODS
from mixnn.methods.contract import Method
from mixnn.nn.backbone import build_backbone
from mixnn.paper.render import markdown_table, replace_blocks
from mixnn.progress import NullReporter
from mixnn.runs.folder import environment
from mixnn.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
MEASURED, PAGE = ROOT / "results" / "scaling-h200.json", ROOT / "docs" / "scaling.md"
MIB = 2**20
FEATURE_BYTES = 2  # bf16 on a GPU; on a CPU features are fp32
GRADIENT_BYTES = 4


@dataclass(frozen=True)
class Link:
    """What connects the GPUs: bytes per second of one GPU, and seconds of a message's latency."""

    name: str
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Setup:
    """A recipe whose step is modeled, and its time on one GPU: seconds = fixed + images * per_image."""

    name: str
    backbone: str
    image_size: int
    batch_size: int
    fixed: float
    per_image: float
    hidden: int = 2048
    measured: bool = False


NVLINK = Link("NVLink, 8 GPUs of one machine", 350e9, 15e-6)
NETWORK = Link("400 Gbit/s per GPU between machines", 40e9, 40e-6)
HEAD_FLOPS = 300e12  # per second, of a GPU's matrix products of the heads' sizes in bf16
SEARCH_FLOPS = 40e12  # the same in fp32, for the search of the support set
PER_GPU = 256  # images per GPU where the batch grows with the number of GPUs
SETUPS = (
    # Rough times, used only without a file of measured ones.
    Setup("CIFAR, ResNet-18", "resnet18", 32, 256, 1.0e-3, 7.02e-3 / 256),
    Setup("224 pixels, ResNet-50", "resnet50", 224, 1024, 3.0e-3, 0.30e-3),
)


def build(name: str, setup: Setup) -> Method:
    """The method of a recipe, without memory for its weights."""
    with torch.device("meta"):
        backbone = build_backbone(setup.backbone, setup.image_size, 1)
        options = {"hidden": setup.hidden} if hasattr(METHODS[name].Options, "hidden") else {}
        return methods.build(name, backbone, options, num_classes=10, num_images=1)


def gathered_bytes(method: Method, batch_size: int, feature_bytes: int = FEATURE_BYTES) -> int:
    """Features that the student and the teacher gather in a step."""
    students, teachers = method.encoded_views(method.options)
    features: Any = method.student.f.num_features
    return (len(students) + len(teachers)) * batch_size * features * feature_bytes


def reduced_bytes(method: Method) -> int:
    """Gradients that are summed in a step."""
    return sum(p.numel() for p in method.parameters() if p.requires_grad) * GRADIENT_BYTES


def head_seconds(method: Method, batch_size: int) -> float:
    """Time of heads and search, which every GPU computes for the whole batch; a backward pass costs two forward."""
    students, teachers = method.encoded_views(method.options)
    projector, predictor = (
        0 if head is None else sum(p.numel() for p in head.parameters())
        for head in (method.student.g, method.student.h)
    )
    products = 3 * len(students) * (projector + predictor) + len(teachers) * projector
    searched = 0 if method.support is None else len(students) * method.support.z_QD.numel()
    return 2 * batch_size * (products / HEAD_FLOPS + searched / SEARCH_FLOPS)


def gather_seconds(num_bytes: int, gpus: int, link: Link) -> float:
    return 0.0 if gpus == 1 else link.latency + num_bytes * (gpus - 1) / gpus / link.bandwidth


def reduce_seconds(num_bytes: int, gpus: int, link: Link) -> float:
    messages = -(-num_bytes // dist.BUCKET_BYTES)
    return 0.0 if gpus == 1 else messages * link.latency + 2 * num_bytes * (gpus - 1) / gpus / link.bandwidth


def parts(setup: Setup, method: Method, batch_size: int, gpus: int) -> dict[str, float]:
    """Modeled seconds per part of a step, with 8 GPUs per machine. In bf16, parts do not overlap."""
    link = NVLINK if gpus <= 8 else NETWORK
    heads = head_seconds(method, batch_size)
    passes = 3 * 2 + 2  # of MNN, for which the setups hold: two views, forward and backward, and two by the teacher
    own = [len(views) for views in method.encoded_views(method.options)]
    share = (3 * own[0] + own[1]) / passes
    backbones = share * (setup.fixed + batch_size / gpus * setup.per_image)
    networks = 2 if own[1] else 1
    gather = gather_seconds(gathered_bytes(method, batch_size), gpus, link) + (networks - 1) * (gpus > 1) * link.latency
    return {
        "backbones": backbones,
        "heads": heads,
        "gather": gather,
        "all-reduce": reduce_seconds(reduced_bytes(method), gpus, link),
    }


def bytes_table() -> str:
    rows = []
    for name in METHODS:
        cells = [name]
        for setup in SETUPS:
            method, size = build(name, setup), setup.batch_size
            cells += [f"{number / MIB:,.1f}" for number in (gathered_bytes(method, size), reduced_bytes(method))]
        rows.append(cells)
    heads = ["MiB per step", "CIFAR: features", "gradients", "224 pixels: features", "gradients"]
    return markdown_table(heads, rows, "lrrrr")


def model_table(setup: Setup, fixed_batch: bool) -> str:
    method, first = build("mnn", setup), 0.0
    size = setup.batch_size if fixed_batch else PER_GPU
    rows = []
    for gpus in (1, 2, 4, 8, 16, 32, 64):
        batch = size * (1 if fixed_batch else gpus)
        found = parts(setup, method, batch, gpus)
        rate = batch / sum(found.values())
        first = first or rate
        cells = [f"{1e3 * seconds:.2f}" for seconds in (*found.values(), sum(found.values()))]
        rows.append([str(gpus), *cells, f"{rate:,.0f}", f"{rate / first:.1f}", f"{100 * rate / first / gpus:.0f}%"])
    title = f"{setup.name}, batch {size}{'' if fixed_batch else ' per GPU'}: GPUs"
    times = ["backbones", "heads", "gather", "all-reduce", "ms per step"]
    return markdown_table([title, *times, "images/s", "times as fast", "efficiency"], rows, "r" * 9)


def heads_table() -> str:
    """From which batch on it pays to divide the heads too: then each of their batch norms sends its sums."""
    rows = []
    for setup in SETUPS:
        method = build("mnn", setup)
        norms = 2 * 2 + 1  # one in g and one in h of the student, each also backward; one in g of the teacher
        cells = [setup.name, str(norms)]
        for link, gpus in ((NVLINK, 8), (NETWORK, 64)):
            saved = head_seconds(method, 1) * (1 - 1 / gpus)
            cells.append(f"{norms * link.latency / saved:,.0f}")
        rows.append(cells)
    heads = ["largest batch at which replicated heads win", "batch norms", "8 GPUs, NVLink", "64 GPUs, 8 machines"]
    return markdown_table(heads, rows, "lrrr")


def measured_table(measured: list[dict[str, Any]]) -> str:
    """Steps that were measured, next to the line through them."""
    rows, lines = [], []
    for setup in SETUPS:
        method, fitted = build("mnn", setup), with_times(setup, measured)
        times = {(row["batch_size"], row["nccl"]): row["ms_per_step"] for row in measured if row["setup"] == setup.name}
        sizes = sorted({size for size, _ in times})
        for size in sizes:
            model = 1e3 * (fitted.fixed + fitted.per_image * size + head_seconds(method, size))
            numbers = times[size, False], times[size, True], model
            name = setup.name if size == sizes[0] else ""
            rows.append([name, str(size), *(f"{number:.2f}" for number in numbers)])
        line = f"{1e3 * fitted.fixed:.1f} ms plus {1e3 * fitted.per_image:.3f} ms per image"
        lines.append(f"- {setup.name}: the backbones take {line}.")
    table = markdown_table(["ms per step", "images", "without NCCL", "with NCCL", "model"], rows, "lrrrr")
    return table + "\n\n" + "\n".join(lines)


# Measurements on one GPU


def measure(path: Path, steps: int) -> None:
    torch_dist.init_process_group("cpu:gloo,cuda:nccl", store=torch_dist.HashStore(), rank=0, world_size=1)
    original, rows = dist.run_group, []
    about = environment(torch.device("cuda"))
    try:
        for setup, sizes in zip(SETUPS, ((32, 64, 128, 256), (32, 64, 128)), strict=True):
            images = random_images(setup.image_size + (32 if setup.image_size > 32 else 0), 2048)
            for batch_size in sizes:
                for group in (None, torch_dist.group.WORLD):
                    dist.run_group = lambda group=group: group  # type: ignore[assignment, misc]
                    times = time_steps(setup, images, batch_size, steps)
                    row = {"setup": setup.name, "batch_size": batch_size, "nccl": group is not None}
                    rows.append(row | {"ms_per_step": round(statistics.median(times), 4), "all_ms": times})
                    print(json.dumps(rows[-1]), flush=True)
                    path.write_text(json.dumps({"environment": about, "rows": rows}, indent=1) + "\n")
    finally:
        dist.run_group = original
        dist.shutdown()


def random_images(size: int, number: int) -> ImageSet:
    u8 = torch.randint(0, 256, (number, 3, size, size), dtype=torch.uint8)
    return ImageSet(u8, torch.arange(number) % 10, None, [*"0123456789"], (0.5,) * 3, (0.25,) * 3, True)


def time_steps(setup: Setup, images: ImageSet, batch_size: int, steps: int, mode: str = "recorded") -> list[float]:
    """Milliseconds per step, five times, after a warm-up."""
    config = Config(
        method="mnn", data="cifar10", backbone=setup.backbone, image_size=setup.image_size, batch_size=batch_size,
        bn_groups=8, mode=mode, device="cuda", options={"support_size": 4096, "hidden": setup.hidden},
    )  # fmt: skip
    trainer = Trainer(config, images, NullReporter())
    times = []
    for i in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(steps):
            trainer._one_step()
        end.record()
        end.synchronize()
        times += [round(begin.elapsed_time(end) / steps, 4)] * (i > 0)
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    return times


def with_times(setup: Setup, rows: list[dict[str, Any]]) -> Setup:
    """The setup with a line through its measured steps, less the heads' part."""
    own = [row for row in rows if row["setup"] == setup.name and row["nccl"]]
    if len(own) < 2:
        return setup
    method = build("mnn", setup)
    x = torch.tensor([row["batch_size"] for row in own], dtype=torch.float64)
    y = torch.tensor([row["ms_per_step"] / 1e3 - head_seconds(method, row["batch_size"]) for row in own]).double()
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
    fixed = float(y.mean()) - slope * float(x.mean())
    return Setup(*list(vars(setup).values())[:4], max(0.0, fixed), slope, setup.hidden, True)


def blocks(times: Path) -> dict[str, str]:
    """The tables of docs/scaling.md by name."""
    rows = json.loads(times.read_text())["rows"] if times.is_file() else []
    known = [(with_times(setup, rows), fixed) for setup in SETUPS for fixed in (True, False)]
    return {
        "scaling-bytes": bytes_table(),
        "scaling-heads": heads_table(),
        "scaling-measured": measured_table(rows),
        "scaling-model": "\n\n".join(model_table(*each) for each in known),
    }


def page(times: Path) -> str:
    """docs/scaling.md with its tables written again."""
    tables = blocks(times)
    return replace_blocks(PAGE.read_text(), tables.__getitem__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, help="measure this GPU, and write the times to this file")
    parser.add_argument("--times", type=Path, help="a file that --measure wrote")
    parser.add_argument("--steps", type=int, default=100, help="steps per measurement")
    parser.add_argument("--page", action="store_true", help="write the tables into docs/scaling.md")
    given = parser.parse_args()
    if given.measure:
        measure(given.measure, given.steps)
    times = given.times or given.measure or MEASURED
    if given.page:
        PAGE.write_text(page(times))
    else:
        print("\n\n".join(blocks(times).values()))


if __name__ == "__main__":
    main()
