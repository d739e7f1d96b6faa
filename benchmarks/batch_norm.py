"""Times split batch norm on a GPU, forward and backward, in every layer of a ResNet-18 at 32 pixels (512 images, bf16).

    python benchmarks/batch_norm.py
    python benchmarks/batch_norm.py --settings default COLS=32 BACKWARD.rows=64,BACKWARD.warps=4   also constants
    python benchmarks/batch_norm.py --files OLD.py ...   also other versions of batch_norm_kernels.py

First every layer is compared with plain PyTorch in float32 (relative error of the worst output). Times are medians of
graph replays, by device events, over more memory than the L2 cache holds; the first version is timed again at the end,
as a measure of noise. TB/s count the bytes that a single pass must move, so a second pass over memory lowers them. A
step is a student's forward and backward pass and a teacher's forward pass.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import math
import multiprocessing
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from mixnn.nn import batch_norm
from mixnn.nn import batch_norm_kernels as kernels

IMAGES, VIEWS, GROUPS, EPS = 512, 2, 8, 1e-5
CALLS, REPLAYS = 20, 15
ROTATED = 400e6  # bytes: several times the L2 cache
NAMES = "FORWARD RESIDUAL BACKWARD COLS SUM_PROGRAMS SUM_ROWS SUM_WARPS SUM_STAGES"
CONSTANTS = {name: getattr(kernels, name) for name in NAMES.split()}


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
        return self.residual, self.relu, self.two, min(rows, 2048)

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
    Layer("112 pixels", 64, 112, count=0, residual=True, two=True, images=64),
]


class Version:
    """The kernels with some of their constants changed; or another file, whose functions may lack some arguments."""

    def __init__(self, name: str) -> None:
        self.name, self.module = name, kernels
        self.settings: dict[str, Any] = {}
        if name.endswith(".py"):
            self.name, self.module = Path(name).stem, load(name)
        elif name != "default":
            self.settings = dict(map(setting, re.split(r",(?=[\w.]+=)", name)))
        self.takes_two = "dy2" in inspect.signature(self.module.backward).parameters

    def select(self) -> None:
        for name, value in (CONSTANTS | self.settings).items() if self.module is kernels else ():
            setattr(kernels, name, value)

    def forward(self, layer: Layer, t: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return self.module.forward(t["x"], t.get("residual"), t["weight"], t["bias"], VIEWS, GROUPS, EPS, layer.relu)

    def backward(self, layer: Layer, t: dict[str, Tensor], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        y, stats, *signs = output
        saved = (signs[0] if signs and signs[0].numel() else y) if layer.residual else None
        rest = t["x"], saved, stats, t["weight"], t["bias"], VIEWS, GROUPS, EPS, layer.relu
        if self.takes_two:
            return self.module.backward(t["dy"], t.get("dy2"), *rest)
        return self.module.backward(t["dy"] + t["dy2"] if layer.two else t["dy"], *rest)


def setting(text: str) -> tuple[str, Any]:
    """A constant and its value, from NAME=VALUE or NAME.FIELD=VALUE."""
    name, value = text.split("=")
    name, _, field = name.partition(".")
    assert name in CONSTANTS, f"{name} is not one of {', '.join(CONSTANTS)}"
    found = ast.literal_eval(value)
    return name, CONSTANTS[name]._replace(**{field: found}) if field else found


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Compilation


def compile_layers(names: list[str]) -> None:
    """Fill Triton's cache on disk, in parallel."""
    jobs = [(name, i) for i in {layer.form(): i for i, layer in enumerate(LAYERS)}.values() for name in names]
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        pool.starmap(compile_layer, jobs, chunksize=1)


def compile_layer(name: str, index: int) -> None:
    run = JITFunction.run
    JITFunction.run = lambda *args, **kw: run(*args, **kw | {"warmup": True})
    try:
        version, layer = Version(name), LAYERS[index]
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
    parser.add_argument("--settings", nargs="*", default=["default"])
    parser.add_argument("--files", nargs="*", default=[])
    args = parser.parse_args()
    torch.manual_seed(0)
    names = args.settings + args.files
    compile_layers(names)
    compared = [Version(name) for name in names]
    again = Version(names[0])
    again.name += " again"
    compared.append(again)
    registers: list[dict[str, str]] = [{} for _ in compared]
    times = [compare(layer, compared, registers) for layer in LAYERS]
    for found, version in zip(registers[:-1], compared, strict=False):
        print(f"{version.name}:")
        for key, text in sorted(found.items()):
            print(f"  {key}: {text}")
    show(compared, times)


def compare(layer: Layer, compared: list[Version], registers: list[dict[str, str]]) -> list[tuple[float, float, float]]:
    """Seconds forward and backward and the relative error, of each version."""
    torch.use_deterministic_algorithms(True)  # empty memory is filled with NaN, so that gaps show
    errors = []
    for version, found in zip(compared, registers, strict=True):
        version.select()
        with record_kernels(found):
            errors.append(error(version, layer))
    torch.use_deterministic_algorithms(False)
    sets = [layer.tensors() for _ in range(min(CALLS, math.ceil(ROTATED / layer.bytes(True)) + 1))]
    times = []
    for version, worst in zip(compared, errors, strict=True):
        version.select()
        times.append((*time_layer(version, layer, sets), worst))
        print(f"{layer.name} {version.name} {times[-1]}", file=sys.stderr, flush=True)
    return times


def show(compared: list[Version], times: list[list[tuple[float, float, float]]]) -> None:
    """A table of all layers and the sums over a step, also with the fastest version of each layer."""
    for i, version in enumerate(compared):
        print(f"{chr(65 + i)}: {version.name}")
    print("\nmicroseconds and TB/s, forward | backward, relative error")
    print(" || ".join([f"{'layer':15} n", *(f"{chr(65 + i):^29}" for i in range(len(compared)))]))
    totals = [[0.0, 0.0] for _ in [*compared, "best"]]
    for layer, row in zip(LAYERS, times, strict=True):
        best = [min(range(len(row)), key=lambda i: row[i][way]) for way in (0, 1)]
        cells = []
        for i in range(len(row)):
            parts = []
            for way in (0, 1):
                rate = layer.bytes(way == 0) / row[i][way] / 1e12
                parts.append(f"{1e6 * row[i][way]:6.1f} {rate:4.2f}{'*' if best[way] == i else ' '}")
                totals[i][way] += layer.count * row[i][way] * (2 - way)
            cells.append(f"{'| '.join(parts)} {row[i][2]:.0e}")
        for way in (0, 1):
            totals[-1][way] += layer.count * row[best[way]][way] * (2 - way)
        print(" || ".join([f"{layer.name:15} {layer.count}", *cells]))
    for name, (forward, backward) in zip([v.name for v in compared] + ["fastest of each"], totals, strict=True):
        print(f"{name}: {1e3 * forward:.3f} + {1e3 * backward:.3f} = {1e3 * (forward + backward):.3f} ms per step")


if __name__ == "__main__":
    main()
