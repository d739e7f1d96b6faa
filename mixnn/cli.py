"""The command line: a dict from verb to function, flags made from the dataclasses.

torch is imported by the verb that needs it, so that help comes at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mixnn.config import Config, Interrupted, UserError, unknown

EPILOG = """examples:
  mixnn demo                                  embedded data, a minute on a CPU: train, evaluate, show
  mixnn pretrain cifar10                      the paper's recipe, MNN
  mixnn pretrain cifar10 --method msf --set topk=1 --set views=s/s --seed 3
  mixnn pretrain ./photos --epochs 100 --out runs/photos
  mixnn pretrain --resume runs/photos
  mixnn evaluate runs/photos
`mixnn VERB --help` says more."""


class Parser(argparse.ArgumentParser):
    """argparse, with errors in this project's manner: what is wrong, what is near, what is valid."""

    def error(self, message: str) -> Any:
        raise UserError(f"{message}\n`{self.prog} --help` lists what is valid")

    def flags(self) -> list[str]:
        return [s for action in self._actions for s in action.option_strings if s.startswith("--")]


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(
        prog="mixnn",
        description="Self-supervised learning of images from nearest neighbors.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=Parser)
    parsers = {}
    for name, (function, add_arguments) in VERBS.items():
        summary = (function.__doc__ or "").splitlines()[0]
        parsers[name] = verb = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        add_arguments(verb)
    return parser, parsers


def _flags_of(cls: type, parser: argparse.ArgumentParser, skip: Sequence[str] = ()) -> None:
    """One flag a field; values are checked by the dataclass, so that the command and Python answer alike."""
    for field in dataclasses.fields(cls):
        if field.metadata and field.name not in skip:
            choices = field.metadata["choices"]
            text = f"{field.metadata['help']} [{field.default}]".replace(" []", "").replace("%", "%%")
            metavar = "{" + ",".join(choices) + "}" if choices else str(field.type).upper()
            flag = f"--{field.name.replace('_', '-')}"
            parser.add_argument(flag, default=argparse.SUPPRESS, metavar=metavar, help=text)


def _pretrain_arguments(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--overwrite", action="store_true", help="replace the run folder if it exists")
    parser.add_argument("--resume", default="", metavar="RUN", help="continue a run where its last checkpoint left it")
    parser.add_argument("--init-from", default="", metavar="RUN", help="begin with the encoder of another run")
    parser.add_argument("--quiet", action="store_true", help="print warnings and results alone")
    _flags_of(Config, parser, skip=("data",))


def _pretrain(args: argparse.Namespace) -> int:
    """train an encoder without labels; settings default to the paper's (digits: to the demo's)"""
    from mixnn.progress import Reporter
    from mixnn.training import pretrain

    settings = vars(args)
    for name in ("verb", "version"):
        settings.pop(name)
    options = dict(_pair(text) for text in settings.pop("set"))
    if "data_dir" not in settings and not settings["resume"] and os.environ.get("MIXNN_DATA"):
        settings["data_dir"] = os.environ["MIXNN_DATA"]
    command = shlex.join(["mixnn", *settings.pop("words")])
    run = pretrain(set=options, command=command, reporter=Reporter(settings.pop("quiet")), **settings)
    print(run.path)
    return 0


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UserError(f"--set {text}: write it as OPTION=VALUE, as in --set topk=5")
    return name, value


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run folder")
    parser.add_argument("--protocol", default="all", metavar="{all,knn,linear}", help="which [all]")
    parser.add_argument("--epochs", default="100", metavar="INT", help="of the linear probe [100]")
    parser.add_argument("--seed", default="0", metavar="INT", help="of the linear probe [0]")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [auto]")
    parser.add_argument("--data-dir", default="", metavar="FOLDER", help="where data sets are kept [the run's own]")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, protocols included")
    parser.add_argument(
        "--save", default="", metavar="FILE", help="write the whole run, curves and results, as one JSON"
    )
    parser.add_argument("--quiet", action="store_true", help="print warnings and results alone")


def _evaluate(args: argparse.Namespace) -> int:
    """linear probe and kNN of a run, by the paper's protocols"""
    import json

    from mixnn.evaluation import check_writable, evaluate, save_summary
    from mixnn.progress import Reporter
    from mixnn.runs import Run

    run = Run.open(args.run)
    if args.save:
        check_writable(args.save)
    results = evaluate(
        run,
        protocol=args.protocol,
        epochs=_number(args.epochs, "epochs", 1),
        seed=_number(args.seed, "seed", 0),
        device=args.device,
        data_dir=args.data_dir or ("" if run.config.data_dir else os.environ.get("MIXNN_DATA", "")),
        reporter=Reporter(args.quiet),
    )
    if args.save:
        save_summary(args.run, args.save)
    if args.json:
        print(json.dumps(results, indent=1))
        return 0
    if "knn" in results:
        r = results["knn"]
        print(f"kNN     {r['weighted']:.2f}  (k={r['protocol']['k']}, weighted vote; majority {r['majority']:.2f})")
    if "linear" in results:
        r = results["linear"]
        print(f"linear  {r['last']:.2f}  (last of {r['protocol']['epochs']} epochs; best {r['best']:.2f})")
    return 0


def _number(text: str, name: str, low: int, high: int = 2**63 - 1) -> int:
    try:
        value = int(text)
    except ValueError:
        raise UserError(f"--{name} {text}: {name} takes a whole number") from None
    if value < low:
        raise UserError(f"--{name} {text}: {name} must be at least {low}")
    if value > high:
        raise UserError(f"--{name} {text}: {name} must be at most {high}")
    return value


def _methods_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default="", help="a method, to see its options")


def _methods(args: argparse.Namespace) -> int:
    """list the methods, or one method's options with default, meaning and source"""
    from mixnn import methods
    from mixnn.progress import print_table

    if not args.name:
        print_table(("method", "year", "idea", "passes", "paper"), methods.overview())
        print("passes: views that the student (with gradient) and the teacher (without) encode in a step, by default")
        return 0
    print(methods.explain(args.name), end="\n\n")
    print_table(("option", "default", "meaning", "source"), [_option_cells(row) for row in methods.describe(args.name)])
    return 0


def _option_cells(row: dict[str, str]) -> tuple[str, ...]:
    values = f" ({row['values']})" if row["values"] else ""
    return row["name"], row["default"], row["meaning"] + values, row["source"]


def _data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        default="list",
        metavar="get",
        help="`get NAME` fetches a data set; without it, all are listed",
    )
    parser.add_argument("name", nargs="?", default="", help="which data set to fetch")
    parser.add_argument(
        "--data-dir",
        default=os.environ.get("MIXNN_DATA", ""),
        help="where data sets are kept [~/.cache/mixnn/data, or $MIXNN_DATA]",
    )


def _data(args: argparse.Namespace) -> int:
    """list the data sets, or fetch one: mixnn data get NAME"""
    from pathlib import Path

    from mixnn.progress import Reporter, print_table

    root = Path(args.data_dir).expanduser() if args.data_dir else None
    if args.action == "get":
        from mixnn.data.download import get

        if not args.name:
            raise UserError("which data set? type: mixnn data get NAME; `mixnn data` lists the names")
        with Reporter().bytes_bar(args.name) as progress:
            print(get(args.name, root, progress=progress))
        return 0
    if args.action != "list" or args.name:
        raise UserError(f"mixnn data {args.action}: type `mixnn data` for the list, or `mixnn data get NAME`")
    from mixnn.data import default_root, describe

    print_table(("name", "data set", "train + test", "classes", "side", "where"), [p.cells() for p in describe(root)])
    print(f"\nfetch one with `mixnn data get NAME`, into {root or default_root()}; a folder of images needs no name")
    return 0


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", default="0", metavar="INT", help="of everything random [0]")
    parser.add_argument(
        "--out", default="runs/demo", metavar="FOLDER", help="run folder, replaced if it exists [runs/demo]"
    )


def _demo(args: argparse.Namespace) -> int:
    """train, evaluate and show MNN on embedded data: about a minute on two CPU cores"""
    from mixnn.showcase import demo

    demo(seed=_number(args.seed, "seed", 0), out=args.out)
    return 0


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
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


def _bench(args: argparse.Namespace) -> int:
    """time the training step, beside a plain PyTorch loop with a Pillow DataLoader"""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler's own chatter; read when torch is imported
    from mixnn.benchmark import bench

    bench(
        method=args.method,
        set=dict(_pair(text) for text in args.set),
        backbone=args.backbone,
        image_size=_number(args.image_size, "image-size", 4),
        batch_size=_number(args.batch_size, "batch-size", 0),
        steps=_number(args.steps, "steps", 0),
        device=args.device,
        mode=args.mode,
        baseline=not args.no_baseline,
        json=args.json,
    )
    return 0


VERBS: dict[str, tuple[Callable[[argparse.Namespace], int], Callable[[argparse.ArgumentParser], None]]] = {
    "demo": (_demo, _demo_arguments),
    "pretrain": (_pretrain, _pretrain_arguments),
    "evaluate": (_evaluate, _evaluate_arguments),
    "methods": (_methods, _methods_arguments),
    "data": (_data, _data_arguments),
    "bench": (_bench, _bench_arguments),
}


def parse(words: Sequence[str]) -> tuple[Parser, argparse.Namespace]:
    parser, verbs = build_parser()
    if words and not words[0].startswith("-") and words[0] not in VERBS:
        raise unknown("verb", words[0], VERBS)
    args, rest = parser.parse_known_args(words)
    for word in rest:
        if word.startswith("-"):
            raise unknown(
                f"option of {args.verb or 'mixnn'}", word.partition("=")[0], (verbs.get(args.verb) or parser).flags()
            )
    if rest:
        raise UserError(f"too many words: {' '.join(rest)}\n`mixnn {args.verb} --help` lists what is valid")
    return parser, args


def main(words: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 a mistake of the user's, 128 + signal when interrupted (and saved)."""
    try:
        words = sys.argv[1:] if words is None else words
        parser, args = parse(words)
        args.words = words  # as typed, for the run folder
        if args.version:
            from mixnn import __version__

            print(__version__)
            return 0
        if not args.verb:
            parser.print_help()
            return 0
        return VERBS[args.verb][0](args)
    except UserError as error:
        print(f"mixnn: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `mixnn methods mnn | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("mixnn: interrupted", file=sys.stderr)
        return 130
    except Interrupted as error:
        print(f"mixnn: {error}", file=sys.stderr)
        return 128 + error.signal
