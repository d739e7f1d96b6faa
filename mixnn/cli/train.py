"""Verbs that train and measure: demo, pretrain, evaluate, bench."""

from __future__ import annotations

import argparse
import os
import shlex
import time

from mixnn.cli import words
from mixnn.config import Config


def demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", default="0", metavar="INT", help="of everything random [0]")
    parser.add_argument(
        "--out", default="runs/demo", metavar="FOLDER", help="run folder, replaced if it exists [runs/demo]"
    )


def demo(args: argparse.Namespace) -> int:
    """train, evaluate and show MNN on embedded data: about a minute on two CPU cores"""
    from mixnn.apps.demo import demo

    demo(**words.numbers(args, seed=0), out=args.out)
    return 0


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--method", default="mnn", help="which method, or all [mnn]")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="an option of the method")
    parser.add_argument(
        "--backbone", default="", metavar="{resnet18,resnet8}", help="[resnet18 on CUDA, resnet8 elsewhere]"
    )
    parser.add_argument("--image-size", default="32", metavar="INT", help="[32]")
    parser.add_argument("--batch-size", default="0", metavar="INT", help="[256 on CUDA, 64 elsewhere]")
    parser.add_argument(
        "--steps", default="0", metavar="INT", help="timed steps, five times over [100 on CUDA, 1 elsewhere]"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [auto]")
    parser.add_argument(
        "--mode", default="auto", metavar="{auto,eager,captured,compiled}", help="how a step runs [auto]"
    )
    parser.add_argument(
        "--no-baseline", action="store_true", help="leave out the plain PyTorch loop with a Pillow DataLoader"
    )
    parser.add_argument("--json", default="", metavar="FILE", help="also write the numbers here")
    words.overwrite_flag(parser)


def bench(args: argparse.Namespace) -> int:
    """time the training step, beside a plain PyTorch loop with a Pillow DataLoader"""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's own chatter; read when torch is imported
    from mixnn.paper.bench import bench

    bench(
        method=args.method,
        set=dict(words.pair(text) for text in args.set),
        backbone=args.backbone,
        **words.numbers(args, image_size=4, batch_size=0, steps=0),
        device=args.device,
        mode=args.mode,
        baseline=not args.no_baseline,
        json=args.json,
        overwrite=args.overwrite,
    )
    return 0


def pretrain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data", nargs="?", default="", help="cifar10, cifar100, stl10, tiny-imagenet, digits, or a folder of images"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="an option of the method; `mixnn methods NAME` lists them",
    )
    parser.add_argument("--out", default="", metavar="FOLDER", help="run folder to make [runs/DATA-METHOD]")
    words.overwrite_flag(parser, "the run folder if it exists")
    parser.add_argument("--resume", default="", metavar="RUN", help="continue a run where its last checkpoint left it")
    parser.add_argument("--init-from", default="", metavar="RUN", help="begin with the encoder of another run")
    parser.add_argument(
        "--time-budget",
        default="",
        metavar="TIME",
        help="as many epochs as fit from the command's start to its end, by the pace of the first steps: 90s, 30m, 2h",
    )
    words.quiet_flag(parser)
    words.flags_of(Config, parser, skip=("data",))


def pretrain(args: argparse.Namespace) -> int:
    """train an encoder without labels; settings default to the paper's (digits: to the demo's)"""
    started = time.perf_counter()  # before torch is imported
    from mixnn import dist
    from mixnn.processes import is_main_process
    from mixnn.progress import Reporter
    from mixnn.training.pretrain import pretrain

    settings = vars(args)
    for name in ("verb", "version"):
        settings.pop(name)
    options = dict(words.pair(text) for text in settings.pop("set"))
    if "data_dir" not in settings and not settings["resume"] and os.environ.get("MIXNN_DATA"):
        settings["data_dir"] = os.environ["MIXNN_DATA"]
    command = shlex.join(["mixnn", *settings.pop("words")])
    reporter = Reporter(settings.pop("quiet"))
    run = pretrain(set=options, command=command, started=started, reporter=reporter, **settings)
    if is_main_process():
        print(run.path)
    dist.shutdown()
    return 0


def evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run folder")
    parser.add_argument("--protocol", default="all", metavar="{all,knn,linear}", help="which [all]")
    parser.add_argument("--epochs", default="100", metavar="INT", help="of the linear probe [100]")
    parser.add_argument("--seed", default="0", metavar="INT", help="of the linear probe [0]")
    words.place_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the results as JSON, protocols included")
    parser.add_argument(
        "--save", default="", metavar="FILE", help="write the whole run, curves and results, as one JSON"
    )
    words.overwrite_flag(parser)
    words.quiet_flag(parser)


def evaluate(args: argparse.Namespace) -> int:
    """linear probe and kNN of a run, by the paper's protocols"""
    import json

    from mixnn.evaluation.evaluate import evaluate
    from mixnn.progress import Reporter, plural
    from mixnn.runs import Run

    run = Run.open(args.run)
    results = evaluate(
        run,
        protocol=args.protocol,
        **words.numbers(args, epochs=1, seed=0),
        device=args.device,
        data_dir=words.data_dir(args.data_dir, run.config.data_dir),
        save=args.save,
        overwrite=args.overwrite,
        reporter=Reporter(args.quiet),
    )
    if args.json:
        print(json.dumps(results, indent=1))
        return 0
    if "knn" in results:
        r = results["knn"]
        print(f"kNN     {r['weighted']:.2f}  (k={r['protocol']['k']}, weighted vote; majority {r['majority']:.2f})")
    if "linear" in results:
        r = results["linear"]
        print(f"linear  {r['last']:.2f}  (last of {plural(r['protocol']['epochs'], 'epoch')}; best {r['best']:.2f})")
    return 0
