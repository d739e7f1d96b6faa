"""Where the time goes before a run's first step, and in the evaluation of a frozen network.

    python benchmarks/startup.py                               start-up of MNN on random images, with warm caches
    python benchmarks/startup.py --cold --mode recorded        with empty caches of the compilers
    python benchmarks/startup.py --evaluation                  linear probe and kNN, part by part

Start-up is timed in this process from its first line on, so every mode needs a process of its own. Parts that run
inside another one are indented. What remains of the first warm-up step is cuDNN's choice of algorithms and whatever
libraries set up on first use. Evaluation is timed on random images with a random network: the work is the same.
"""

from __future__ import annotations

import time

BEGIN = time.perf_counter()

import argparse  # noqa: E402
import os  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from typing import Any  # noqa: E402

rows: list[tuple[str, float]] = []  # parts of the start-up and their seconds


@contextmanager
def part(name: str) -> Iterator[None]:
    """Time what happens inside, including the work on the device."""
    place = len(rows)
    rows.append((name, 0.0))
    start = time.perf_counter()
    yield
    synchronize()
    rows[place] = name, time.perf_counter() - start


def synchronize() -> None:
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()


def startup(options: argparse.Namespace) -> None:
    """Build a trainer as a run does, take its first step, and print the seconds of each part."""
    with part("import torch"):
        import torch
    with part("import mixnn"):
        from mixnn.device import pick_device
        from mixnn.paper import bench
        from mixnn.progress import Reporter
        from mixnn.training import step as step_module
        from mixnn.training import trainer as trainer_module
    device = pick_device(options.device)
    with part("first use of the device"):
        torch.zeros(1, device=device)
    if options.few_plans:
        step_module.MAX_PIXELS_TO_TRY_ALL = 0
    compiled = count_triton_kernels()
    with part("images"):
        images = bench.random_images(options.image_size)
    config = bench._config(options.method, {}, options.backbone, options.image_size, 0, options.device, options.mode)
    trainer_module.Step = timed_step(step_module)  # type: ignore[misc]
    with part("trainer"):
        trainer = trainer_module.Trainer(config, images, Reporter(quiet=True))
    advance = bench._stepper(trainer)
    with part("first step"):
        advance()
    total = time.perf_counter() - BEGIN
    print(f"{trainer.mode}, {config.method}, {config.backbone}, batch {config.batch_size}, torch {torch.__version__}")
    for name, seconds in rows:
        print(f"{seconds:8.2f} s  {name}")
    print(f"{total:8.2f} s  in all")
    if compiled:
        fresh = [seconds for seconds, hit in compiled if not hit]
        print(f"Triton, in this process: {len(fresh)} kernels compiled in {sum(fresh):.2f} s of the above, ", end="")
        print(f"{len(compiled) - len(fresh)} read from its cache")
    steps = options.steps or (200 if device.type == "cuda" else 1)
    times = sorted(bench._time(advance, steps, device) for _ in range(3))
    print(f"then {times[1]:.3f} ms per step ({times[0]:.3f} to {times[2]:.3f})")


def count_triton_kernels() -> list[tuple[float, bool]]:
    """Seconds of every kernel that Triton compiles from now on, and whether its cache had it."""
    found: list[tuple[float, bool]] = []
    try:
        from triton import knobs
    except ImportError:  # torch installs Triton with CUDA only
        return found

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        found.append((times.total / 1e6, cache_hit))

    knobs.compilation.listener = listen
    return found


def timed_step(module: Any) -> type:
    """The class Step with its warm-up steps, its first views and the recording timed."""
    compiled = module.compiled

    def first_call_timed(function: Callable[..., Any]) -> Callable[..., Any]:
        call, called = compiled(function), []

        def timed(*arguments: Any) -> Any:
            if called:
                return call(*arguments)
            called.append(True)
            with part(f"    compiled {function.__name__}, first call"):
                return call(*arguments)

        return timed

    module.compiled = first_call_timed

    class TimedStep(module.Step):  # type: ignore[misc,name-defined]
        calls = 0

        def __init__(self, *arguments: Any) -> None:
            with part("  step"):
                super().__init__(*arguments)

        def _train_step(self) -> None:
            import torch

            capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            self.calls += 1
            with part("   recording" if capturing else f"   step {self.calls}, not recorded"):
                super()._train_step()

    return TimedStep


def evaluation(options: argparse.Namespace) -> None:
    """Print seconds of the parts of the linear probe and of kNN, for the network and its folded copy."""
    import torch

    from mixnn.augment import View, augment
    from mixnn.device import pick_device
    from mixnn.evaluation.features import CHUNK, features
    from mixnn.evaluation.knn import accuracy_by_vote
    from mixnn.evaluation.linear import Classifier, LinearProbe, linear
    from mixnn.nn.backbone import build_backbone
    from mixnn.nn.folding import folded
    from mixnn.paper.bench import random_images

    device = pick_device(options.device)
    size = options.image_size
    network = build_backbone(options.backbone or "resnet18", size, 1).eval()
    network.to(device, memory_format=torch.channels_last)
    train = random_images(size)
    train = (train.limit(options.images) if options.images else train).to(device)
    view, generator = View(size, area=(0.08, 1.0)), torch.Generator(device).manual_seed(0)
    order, probe = torch.arange(len(train), device=device), LinearProbe(epochs=options.epochs)
    test = train
    print(f"{len(train):,} images of {size} pixels; best of three: seconds in all, and until the host was free")

    def show(name: str, call: Callable[[], Any], repeats: int = 3) -> None:
        times = []
        for _ in range(repeats):
            synchronize()
            start = time.perf_counter()
            call()
            queued = time.perf_counter() - start
            synchronize()
            times.append((time.perf_counter() - start, queued))
        first = f"; the first time {times[0][0]:.3f}" if repeats > 1 else ""
        print(f"{min(times)[0]:8.3f} {min(times)[1]:8.3f}  {name}{first}", flush=True)

    def crops() -> None:
        for index in order.split(CHUNK):
            augment(train.images[index], view, generator=generator)

    def classify() -> None:
        weights = torch.zeros(10, network.num_features, device=device), torch.zeros(10, device=device)
        classifier = Classifier(*weights, probe)
        for x_B, y_B in zip(vectors.split(256), train.labels.split(256), strict=True):
            classifier.step(x_B, y_B, 1.0)

    show("crops of one epoch", crops)
    copy = folded(network)
    for label, one, tries in (
        ("network", network, False),
        ("folded", copy, False),
        ("folded, plans tried", copy, True),
    ):
        torch.backends.cudnn.benchmark = tries
        show(f"features, {label}", lambda one=one: features(one, train))
        show(f"features of crops, {label}", lambda one=one: features(one, train, order, view, generator))
        show(f"features in fp32, {label}", lambda one=one: features(one, train, bf16=False))
        name = f"linear probe of {options.epochs} epochs, {label}"
        show(name, lambda one=one: linear(one, train, test, size, probe), repeats=1)
    vectors = features(copy, train)
    show("classifier's steps of one epoch", classify)
    queries, labels = vectors[: len(vectors) // 5], train.labels[: len(vectors) // 5]
    show("kNN search", lambda: accuracy_by_vote(vectors, train.labels, queries, labels, 10, 200))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluation", action="store_true", help="time the evaluation, not the start-up")
    parser.add_argument("--cold", action="store_true", help="begin with empty caches of Inductor and Triton")
    parser.add_argument("--mode", default="auto", help="how a step runs [as in a long run]")
    parser.add_argument("--few-plans", action="store_true", help="let cuDNN try ten algorithms, not all")
    parser.add_argument("--method", default="mnn")
    parser.add_argument("--backbone", default="", help="[resnet18; for start-up without CUDA resnet8]")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=0, help="timed steps after the start")
    parser.add_argument("--epochs", type=int, default=10, help="of the linear probe")
    parser.add_argument("--images", type=int, default=0, help="for the evaluation [50,000]")
    options = parser.parse_args()
    if options.evaluation:
        evaluation(options)
        return
    with tempfile.TemporaryDirectory() as empty:
        if options.cold:
            os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor", "TRITON_CACHE_DIR": f"{empty}/triton"}
        startup(options)


if __name__ == "__main__":
    main()
