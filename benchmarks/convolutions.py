"""Times the 3x3 convolutions of 64 channels on a Hopper GPU: cuDNN's and those of mixnn, in bf16.

    python benchmarks/convolutions.py
    python benchmarks/convolutions.py --images 1024 --sides 32
    python benchmarks/convolutions.py --json convolutions.json

Each is compared with cuDNN's result first (largest difference, as a share of the largest number). Times are medians of
graph replays, by device events, in microseconds. cuDNN tries its algorithms and takes the fastest. The table is
Markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mixnn.nn import convolution_kernels as kernels
from mixnn.runs.folder import environment

CHANNELS, GROUPS = 64, 8
CALLS, REPLAYS = 30, 5
WITH_SUMS = "forward, with sums for batch norm"


def main() -> None:
    parser = argparse.ArgumentParser(description="time convolutions")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--sides", type=int, nargs="+", default=[32, 24, 56])
    parser.add_argument("--json", type=Path, help="also write the times to this file")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    about, rows = environment(torch.device("cuda")), []
    print(f"{about['device']}, {args.images} images\n")
    print("| side | what | cuDNN, us | mixnn, us | difference |\n|---:|---|---:|---:|---:|")
    for side in args.sides:
        for what, cudnn, ours in pairs(args.images, side):
            want, found = cudnn(), ours()
            off = float((found.float() - want.float()).abs().max() / want.float().abs().max())
            theirs = None if what == WITH_SUMS else round(microseconds(cudnn), 1)  # cuDNN's has no sums
            row: dict[str, Any] = {"side": side, "what": what, "cudnn_us": theirs}
            rows.append(row | {"mixnn_us": round(microseconds(ours), 1), "difference": round(off, 5)})
            print(f"| {side} | {what} | {theirs or ''} | {rows[-1]['mixnn_us']} | {off:.4f} |", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"environment": about, "images": args.images, "rows": rows}, indent=1) + "\n")


def pairs(images: int, side: int) -> list[tuple[str, Callable[[], Tensor], Callable[[], Tensor]]]:
    """What is computed, cuDNN's function and ours."""
    torch.manual_seed(0)
    x, dy = (torch.randn(images, side, side, CHANNELS, device="cuda").bfloat16().permute(0, 3, 1, 2) for _ in range(2))
    weight = torch.randn(CHANNELS, CHANNELS, 3, 3, device="cuda").div(24).bfloat16()
    weight = weight.contiguous(memory_format=torch.channels_last)
    settings = None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1

    def forward() -> Tensor:
        return torch.ops.aten.convolution(x, weight, *settings)

    def gradient(of_weight: bool) -> Tensor:
        wanted = [not of_weight, of_weight, False]
        return torch.ops.aten.convolution_backward(dy, x, weight, *settings, wanted)[of_weight]

    with_sums = [(WITH_SUMS, forward, lambda: kernels.forward(x, weight, GROUPS)[0])]
    return [
        ("forward", forward, lambda: kernels.forward(x, weight)[0]),
        *([] if kernels.forward(x, weight, GROUPS)[1] is None else with_sums),  # not for every side
        ("gradient of x", lambda: gradient(False), lambda: kernels.input_gradient(dy, weight)),
        ("gradient of the weights", lambda: gradient(True), lambda: kernels.weight_gradient(x, dy, weight)),
    ]


def microseconds(call: Callable[[], Tensor]) -> float:
    """Median time of a call in a CUDA graph of many."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / CALLS * 1000)
    return statistics.median(times)


if __name__ == "__main__":
    main()
