"""Times split batch norm on a GPU, forward and backward, in every layer of a ResNet-18 at 32 pixels (512 images, bf16).

    python benchmarks/batch_norm.py
    python benchmarks/batch_norm.py --tiles 1024x32/512x32/512x32/8x2 ...    tiles to compare
    python benchmarks/batch_norm.py --old FILE         also an older version of batch_norm_kernels.py
    python benchmarks/batch_norm.py --stress           no times: many replays of a graph must give the same bits

Tiles are ROWSxCOLS forward, forward with residual, and backward, then WARPSxPROGRAMS (of a program, and on a
multiprocessor); with a fifth part, /y, backward reads y instead of sign bits. First every layer is compared with plain
PyTorch in float32 (relative error of the worst output). Times are medians of graph replays, by device events, over more
memory than the L2 cache holds. TB/s count the bytes that a single pass must move, so a second pass lowers them. A step
is a student's forward and backward pass and a teacher's forward pass.

A wrong barrier would wait forever, so the script ends itself after --seconds.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import inspect
import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from mixnn.nn import batch_norm
from mixnn.nn import batch_norm_kernels as kernels

IMAGES, VIEWS, GROUPS, EPS = 512, 2, 8, 1e-5
TILES = ("FORWARD", "RESIDUAL", "BACKWARD")
PEAK = 4.8  # TB/s of an H200
CALLS, REPLAYS = 20, 15
ROTATED = 400e6  # bytes: several times the L2 cache


@dataclass(frozen=True)
class Layer:
    """A batch norm of the network, and how often it has one like it."""

    name: str
    channels: int
    side: int
    count: int = 1
    residual: bool = False
    relu: bool = True
    two: bool = False  # whether two gradients come back
    images: int = IMAGES

    def tensors(self, device: str = "cuda") -> dict[str, Tensor]:
        shape = (self.images, self.channels, self.side, self.side)
        maps = {
            name: torch.randn(shape, device=device, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
            for name in ("x", "dy", *["residual"] * self.residual, *["dy2"] * self.two)
        }
        weight, bias = torch.rand(self.channels, device=device) + 0.5, torch.randn(self.channels, device=device)
        return maps | {"weight": weight, "bias": bias}

    def form(self) -> tuple[Any, ...]:
        """Layers with the same form use the same kernels, whatever the tile."""
        rows = self.images // (VIEWS * GROUPS) * self.side**2
        return self.residual, self.relu, self.two, self.images, min(rows, 2048)

    def bytes(self, forward: bool) -> float:
        """What one pass must read and write."""
        tensor = 2 * self.images * self.channels * self.side**2
        signs = tensor / 16 if self.residual else 0
        return tensor * ((2 if forward else 3 + self.two) + self.residual) + signs


LAYERS = [
    Layer("stem", 64, 32, two=True),
    Layer("layer1 bn1", 64, 32, count=2),
    Layer("layer1 bn2", 64, 32, count=2, residual=True, two=True),
    Layer("layer2 bn1", 128, 16, count=2),
    Layer("layer2 bn2", 128, 16, count=2, residual=True, two=True),
    Layer("layer2 shortcut", 128, 16, relu=False),
    Layer("layer3 bn1", 256, 8, count=2),
    Layer("layer3 bn2", 256, 8, count=2, residual=True, two=True),
    Layer("layer3 shortcut", 256, 8, relu=False),
    Layer("layer4 bn1", 512, 4, count=2),
    Layer("layer4 bn2", 512, 4, count=2, residual=True, two=True),
    Layer("layer4 shortcut", 512, 4, relu=False),
    Layer("two launches", 64, 112, count=0, residual=True, two=True, images=64),
]


class Version:
    """The kernels with certain tiles; or an older module, which lacks some of the arguments."""

    def __init__(self, name: str, module: ModuleType, settings: dict[str, Any]) -> None:
        self.name, self.module, self.settings = name, module, settings
        self.takes_two = "dy2" in inspect.signature(module.backward).parameters

    def select(self) -> None:
        for name, value in self.settings.items():
            setattr(self.module, name, value)

    def forward(self, layer: Layer, t: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return self.module.forward(t["x"], t.get("residual"), t["weight"], t["bias"], VIEWS, GROUPS, EPS, layer.relu)

    def backward(self, layer: Layer, t: dict[str, Tensor], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        y, stats, *signs = output
        saved = (signs[0] if signs and signs[0].numel() else y) if layer.residual else None
        rest = t["x"], saved, stats, t["weight"], t["bias"], VIEWS, GROUPS, EPS, layer.relu
        if self.takes_two:
            return self.module.backward(t["dy"], t.get("dy2"), *rest)
        return self.module.backward(t["dy"] + t["dy2"] if layer.two else t["dy"], *rest)


def versions(tiles: list[str], old: str | None) -> list[Version]:
    found = []
    for text in tiles:
        sizes = [tuple(map(int, part.split("x"))) for part in text.split("/")[:4]]
        settings = {name: kernels.Tile(*size) for name, size in zip(TILES, sizes[:3], strict=True)}
        warps, programs = sizes[3]
        settings |= {"WARPS": warps, "PROGRAMS": programs, "SIGN_BITS": not text.endswith("/y")}
        found.append(Version(text, kernels, settings))
    if old:
        spec = importlib.util.spec_from_file_location("old_batch_norm_kernels", old)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found.append(Version("old", module, {}))
    return found


# Compilation


def compile_layers(tiles: list[str], old: str | None) -> None:
    """Fill Triton's cache on disk, in parallel."""
    different = {layer.form(): i for i, layer in enumerate(LAYERS)}.values()
    jobs = [(text, None, i) for i in different for text in tiles]
    jobs += [("", old, i) for i in different] if old else []
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        pool.starmap(compile_layer, jobs, chunksize=1)


def compile_layer(tiles: str, old: str | None, index: int) -> None:
    run = JITFunction.run
    JITFunction.run = lambda *args, **kw: run(*args, **kw | {"warmup": True})
    try:
        version, layer = versions([tiles] if tiles else [], old)[0], LAYERS[index]
        version.select()
        tensors = layer.tensors()
        version.backward(layer, tensors, version.forward(layer, tensors))
    finally:
        JITFunction.run = run


@contextmanager
def record_kernels(found: dict[str, str]) -> Iterator[None]:
    """Registers and spills of every kernel that runs inside, by its name and sizes."""
    run = JITFunction.run

    def recorded(self: Any, *args: Any, **kw: Any) -> Any:
        kernel = run(self, *args, **kw)
        if self.__name__ != "bn_update_kernel":
            size = "x".join(str(kw.get(key, "")) for key in ("ROWS", "COLS", "num_warps"))
            form = "+".join(key for key, value in kw.items() if value is True)
            key = f"{self.__name__} {size} {form}"
            found[key] = f"{kernel.n_regs} registers, {kernel.n_spills} spilled, grid {kw['grid']}"
        return kernel

    JITFunction.run = recorded
    try:
        yield
    finally:
        JITFunction.run = run


# Checks


def error(version: Version, layer: Layer) -> float:
    """Norm of the difference to plain PyTorch in float32 relative to the norm, of the worst output."""
    t = layer.tensors()
    output = version.forward(layer, t)
    gradients = version.backward(layer, t, output)
    wide = {name: tensor.float() for name, tensor in t.items()}
    args = wide["weight"], wide["bias"], VIEWS, GROUPS, EPS, layer.relu
    y, stats = batch_norm.plain_forward(wide["x"], wide.get("residual"), *args)
    saved = output[0].float() if layer.residual else None
    dy = (t["dy"] + t["dy2"]).float() if layer.two else wide["dy"]
    wants = batch_norm.plain_backward(dy, None, wide["x"], saved, stats, *args)
    pairs = [(output[0], y), (output[1], stats), *zip(gradients, wants, strict=True)]
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in pairs if b.numel()]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def check_replays(chunks: int, streams: int, replays: int) -> str:
    """Replays of a graph in which kernels with this many chunks per group run at once on several streams."""
    layer = Layer("", 64, 16, residual=True, two=True, images=VIEWS * GROUPS * chunks)
    # a chunk of an image; all chunks that may wait by themselves, or half as many on each of two streams
    settings = {"RESIDUAL": kernels.Tile(256, 32), "BACKWARD": kernels.Tile(256, 32), "_max_chunks": lambda _: chunks}
    version = Version("", kernels, settings)
    version.select()
    inputs = [layer.tensors() for _ in range(streams)]
    others = [torch.cuda.Stream() for _ in inputs[1:]]

    def step() -> list[Tensor]:
        main, out = torch.cuda.current_stream(), []
        for stream, t in zip([*others, main], inputs, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                output = version.forward(layer, t)
                out += [*output, *version.backward(layer, t, output)]
        for stream in others:
            main.wait_stream(stream)
        return out

    wants = [t.clone() for t in step()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    wrong = 0
    for _ in range(replays):
        for t in outputs:
            t.zero_()
        graph.replay()
        wrong += not all(map(torch.equal, outputs, wants))
    return f"{chunks} chunks on {streams} streams: {wrong} of {replays} replays differ"


# Times


def time_calls(call: Callable[[int], Any]) -> float:
    """Seconds per call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(i) for i in range(CALLS)]  # kept, so that every output has its own memory
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / CALLS)
    del kept
    return statistics.median(times[2:])


def time_layer(version: Version, layer: Layer, sets: list[dict[str, Tensor]]) -> tuple[float, float]:
    outputs = [version.forward(layer, t) for t in sets]
    num = len(sets)
    return (
        time_calls(lambda i: version.forward(layer, sets[i % num])),
        time_calls(lambda i: version.backward(layer, sets[i % num], outputs[i % num])),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [*(getattr(kernels, name) for name in TILES), (kernels.WARPS, kernels.PROGRAMS)]
    parser.add_argument("--tiles", nargs="*", default=["/".join("x".join(map(str, size)) for size in sizes)])
    parser.add_argument("--old", metavar="FILE")
    parser.add_argument("--stress", action="store_true")
    parser.add_argument("--replays", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=80)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.seconds, exit=True)
    torch.manual_seed(0)
    if args.stress:
        most = kernels._max_chunks(torch.device("cuda", 0))
        for chunks, streams in ((2, 3), (most, 2), (2 * most - 1, 1), (2 * most, 1)):
            print(check_replays(chunks, streams, args.replays), flush=True)
        return
    compile_layers(args.tiles, args.old)
    compared = versions(args.tiles, args.old)
    registers: list[dict[str, str]] = [{} for _ in compared]
    rows, totals = [], [[0.0, 0.0] for _ in compared]
    for layer in LAYERS:
        num = min(CALLS, math.ceil(ROTATED / layer.bytes(True)) + 1)
        row = [f"{layer.name:15} {layer.count}"]
        torch.use_deterministic_algorithms(True)  # empty memory is filled with NaN, so that gaps show
        errors = []
        for version, found in zip(compared, registers, strict=True):
            version.select()
            with record_kernels(found):
                errors.append(error(version, layer))
        torch.use_deterministic_algorithms(False)
        sets = [layer.tensors() for _ in range(num)]
        for version, total, worst in zip(compared, totals, errors, strict=True):
            version.select()
            cells = []
            for way, seconds in enumerate(time_layer(version, layer, sets)):
                rate = layer.bytes(way == 0) / seconds / 1e12
                cells.append(f"{1e6 * seconds:6.1f} {rate:4.2f} {rate / PEAK:4.0%}")
                total[way] += layer.count * seconds * (2 - way)
            row.append(f"{' | '.join(cells)} {worst:.0e}")
        rows.append(row)
        print(" || ".join(row), file=sys.stderr, flush=True)
    for found, version in zip(registers, compared, strict=True):
        print(f"{version.name}:")
        for key, text in sorted(found.items()):
            print(f"  {key}: {text}")
    print("\nmicroseconds, TB/s and share of the peak, forward | backward; relative error")
    print(" || ".join([f"{'layer':15} n", *(f"{v.name:^43}" for v in compared)]))
    for row in rows:
        print(" || ".join(row))
    for version, (forward_s, backward_s) in zip(compared, totals, strict=True):
        step = 1e3 * (forward_s + backward_s)
        print(f"{version.name}: {1e3 * forward_s:.3f} + {1e3 * backward_s:.3f} = {step:.3f} ms per step")


if __name__ == "__main__":
    main()
