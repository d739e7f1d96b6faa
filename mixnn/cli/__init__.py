"""The command line: a dict from verb to function, flags made from the dataclasses.

torch is imported by the verb that needs it, so that help comes at once.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Sequence

from mixnn.cli import evidence, look, train, use
from mixnn.cli.words import Parser
from mixnn.config import Interrupted, UserError, unknown
from mixnn.processes import is_main_process, world_size

EPILOG = """examples:
  mixnn demo                                  embedded data, a minute on a CPU: train, evaluate, show
  mixnn pretrain cifar10                      the paper's recipe, MNN
  mixnn pretrain cifar10 --method msf --set topk=1 --set views=s/s --seed 3
  mixnn pretrain ./photos --epochs 100 --out runs/photos
  mixnn pretrain --resume runs/photos
  mixnn embed runs/photos ./photos            vectors with file names
  mixnn reproduce main --data cifar10         a table of the paper, with our numbers beside
`mixnn VERB --help` says more."""


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


VERBS: dict[str, tuple[Callable[[argparse.Namespace], int], Callable[[argparse.ArgumentParser], None]]] = {
    "demo": (train.demo, train.demo_arguments),
    "pretrain": (train.pretrain, train.pretrain_arguments),
    "evaluate": (train.evaluate, train.evaluate_arguments),
    "methods": (look.methods, look.methods_arguments),
    "data": (look.data, look.data_arguments),
    "embed": (use.embed, use.embed_arguments),
    "search": (use.search, use.search_arguments),
    "classify": (use.classify, use.classify_arguments),
    "explore": (use.explore, use.explore_arguments),
    "export": (use.export, use.export_arguments),
    "diagnose": (evidence.diagnose, evidence.diagnose_arguments),
    "reproduce": (evidence.reproduce, evidence.reproduce_arguments),
    "figures": (evidence.figures, evidence.figures_arguments),
    "report": (evidence.report, evidence.report_arguments),
    "bench": (train.bench, train.bench_arguments),
}


def parse(words: Sequence[str]) -> tuple[Parser, argparse.Namespace]:
    parser, verbs = build_parser()
    if words and not words[0].startswith("-") and words[0] not in VERBS:
        raise unknown("verb", words[0], VERBS)
    args, rest = parser.parse_known_args(words)
    for word in rest:
        if word.startswith("-") and os.path.exists(word):
            raise UserError(f"{word} looks like an option: type ./{word} for the file")
        if word.startswith("-"):
            raise _unknown_flag(word.partition("=")[0], (verbs.get(args.verb) or parser).flags(), args)
    if rest:
        raise UserError(f"too many words: {' '.join(rest)}\n`mixnn {args.verb} --help` lists what is valid")
    return parser, args


def _unknown_flag(flag: str, valid: Sequence[str], args: argparse.Namespace) -> UserError:
    if "--set" in valid:
        from mixnn.training.configure import check_setting

        check_setting(flag.lstrip("-").replace("-", "_"), getattr(args, "method", "mnn"))
    return unknown(f"option of {args.verb or 'mixnn'}", flag, valid)


def main(words: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 a mistake of the user's, 128 + signal when interrupted (and saved)."""
    words = sys.argv[1:] if words is None else words
    try:
        parser, args = parse(words)
        args.words = words  # as typed, for the run folder
        if args.version:
            from mixnn import __version__
            from mixnn.runs.folder import code_digest

            print(f"{__version__}, code {code_digest()}")
            return 0
        if not args.verb:
            parser.print_help()
            return 0
        if args.verb != "pretrain" and world_size() > 1:
            raise UserError(
                f"only pretrain runs on several processes: type mixnn {args.verb} without torchrun, or unset WORLD_SIZE"
            )
        return VERBS[args.verb][0](args)
    except UserError as error:
        from mixnn.progress import shown

        if not is_main_process():
            time.sleep(3)  # the first process' message is enough, if it has one: then this one is stopped by now
        print("\n".join(map(shown, f"mixnn: {error}".split("\n"))), file=sys.stderr)
        return 2
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not re.search(r"can't allocate memory|out of memory", str(error)):
            raise
        less = ": a smaller --batch-size, --image-size or support_size takes less" * ("pretrain" in words[:1])
        print(f"mixnn: there is not enough memory for this{less}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `mixnn methods mnn | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("mixnn: interrupted", file=sys.stderr)
        return 130
    except Interrupted as error:
        if is_main_process():
            print(f"mixnn: {error}", file=sys.stderr)
        return 128 + error.signal
