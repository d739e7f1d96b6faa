"""Times mixnn's augmentation and, where they import, kornia's and torchvision's (v2) on the same batch.

    python benchmarks/augment.py                         the CPU, or the GPU if there is one
    python benchmarks/augment.py --device cpu --seconds 5

Two views are timed: weak (random-resized crop and flip) and strong (also color jitter, grayscale and Gaussian blur),
with the probabilities and strengths of `mixnn.augment`. Every pipeline starts from a uint8 batch on the device and ends
with a float32 batch in 0..1, and every image has its own random numbers. torchvision's transforms make the same crop
and jitter for a whole batch, so they are called image by image.

What differs: kornia shrinks without antialiasing. The blur of kornia and torchvision has a kernel of 9 pixels, while
ours has no limit.

A time is the best of many calls after a warm-up, on CUDA by device events, on a CPU by the clock. The libraries take
turns. The table is Markdown.
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mixnn import augment
from mixnn.augment import View
from mixnn.runs.folder import device_name

CASES = {  # images in a batch, their side, side of the view; short calls on a CPU, which others may use as well
    "cpu": ((256, 32, 32), (16, 256, 224)),
    "cuda": ((256, 32, 32), (1024, 32, 32), (128, 256, 224)),
}
KERNEL = 9
Pipeline = Callable[[Tensor], Tensor]


def ours(view: View, device: torch.device) -> Iterator[tuple[str, Pipeline]]:
    yield "mixnn", augment.Augment(view)
    if device.type == "cuda":
        yield "mixnn, in a CUDA graph", captured(view)


def captured(view: View) -> Pipeline:
    """The view of one batch as a CUDA graph, as the trainer runs it; the uniforms are drawn outside."""
    graph, inputs, outputs = torch.cuda.CUDAGraph(), [], []

    def call(images: Tensor) -> Tensor:
        if not outputs:
            inputs.append(torch.rand(len(images), view.num_draws, device=images.device))
            augment.augment(images, view, inputs[0])  # libraries set themselves up outside the capture
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                outputs.append(augment.augment(images, view, inputs[0]))
        inputs[0].uniform_()
        graph.replay()
        return outputs[0]

    return call


def kornias(view: View, device: torch.device) -> Iterator[tuple[str, Pipeline]]:
    import kornia.augmentation as K

    stages = [K.RandomResizedCrop((view.size,) * 2, view.area, view.ratio), K.RandomHorizontalFlip(view.flip)]
    if view.jitter:
        stages.append(K.ColorJitter(view.brightness, view.contrast, view.saturation, view.hue, p=view.jitter))
    if view.gray:
        stages.append(K.RandomGrayscale(p=view.gray))
    if view.blur:
        stages.append(K.RandomGaussianBlur((KERNEL, KERNEL), view.sigma, p=view.blur))
    chain = torch.nn.Sequential(*stages).to(device)
    yield "kornia", lambda images: chain(images.float() / 255)


def torchvisions(view: View, _: torch.device) -> Iterator[tuple[str, Pipeline]]:
    """In the order that its documentation recommends: uint8 to the end, then floats."""
    from torchvision.transforms import v2

    stages = [
        v2.RandomResizedCrop(view.size, view.area, view.ratio, antialias=True),
        v2.RandomHorizontalFlip(view.flip),
    ]
    if view.jitter:
        jitter = v2.ColorJitter(view.brightness, view.contrast, view.saturation, view.hue)
        stages.append(v2.RandomApply([jitter], view.jitter))
    if view.gray:
        stages.append(v2.RandomGrayscale(view.gray))
    if view.blur:
        stages.append(v2.RandomApply([v2.GaussianBlur(KERNEL, view.sigma)], view.blur))
    chain = v2.Compose([*stages, v2.ToDtype(torch.float32, scale=True)])
    yield "torchvision v2, image by image", lambda images: torch.stack([chain(image) for image in images])


LIBRARIES = {"mixnn": ours, "kornia": kornias, "torchvision": torchvisions}


def milliseconds(call: Callable[[], Tensor], device: torch.device) -> float:
    """Time of one call."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - start)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before.record()
    call()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after)


def measure(pipelines: dict[str, Pipeline], images: Tensor, seconds: float) -> dict[str, list[float]]:
    """Times of every pipeline, in turns, so that a busy machine slows all of them down; five at least."""
    for pipeline in pipelines.values():
        pipeline(images)  # warm-up: libraries choose their algorithms
    times: dict[str, list[float]] = {name: [] for name in pipelines}
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 5 or time.perf_counter() < end:
        for name, pipeline in pipelines.items():
            times[name].append(milliseconds(lambda f=pipeline: f(images), images.device))
        rounds += 1
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each view of each batch [10]")
    options = parser.parse_args()
    device = torch.device(options.device)
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.import_module(name).__version__
        except Exception as error:  # a build for another torch raises RuntimeError
            print(f"{name} does not import, and is left out: {error}")
    print(f"{device_name(device)}; torch {torch.__version__}, {torch.get_num_threads()} threads; {versions}")
    print(f"load of the machine before: {', '.join(f'{load:.2f}' for load in os.getloadavg())}\n")
    print("| images | view | library | best, ms per batch | median | images per second, at best | best / mixnn's |")
    print("|---|---|---|---:|---:|---:|---:|")
    for count, side, size in CASES[device.type]:
        images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, device=device)
        for kind in ("weak", "strong"):
            view = augment.VIEWS[kind](size, flip=0.5)
            pipelines = {name: call for library in versions for name, call in LIBRARIES[library](view, device)}
            times = measure(pipelines, images, options.seconds)
            for name, values in times.items():
                best, median = min(values), sorted(values)[len(values) // 2]
                print(
                    f"| {count} of {side} to {size} | {kind} | {name} | {best:.2f} | {median:.2f} "
                    f"| {1000 * count / best:,.0f} | {best / min(times['mixnn']):.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    with torch.no_grad():
        main()
