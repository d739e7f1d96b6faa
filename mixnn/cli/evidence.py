"""Verbs that show: diagnose, reproduce, figures, report."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from mixnn.cli import words
from mixnn.config import UserError


def diagnose_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run folder")
    parser.add_argument("--batches", default="20", metavar="INT", help="of training images to look at [20]")
    words.place_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


def diagnose(args: argparse.Namespace) -> int:
    """whom a run takes for neighbors, how pure they are, and whether its embeddings have collapsed"""
    import json

    from mixnn.progress import print_table
    from mixnn.runs import Run
    from mixnn.training import diagnose as diagnosis

    run = Run.open(args.run)
    found = diagnosis.diagnose(
        run,
        **words.numbers(args, batches=1),
        device=args.device,
        data_dir=words.data_dir(args.data_dir, run.config.data_dir),
    )
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print_table(("", "value", "what it is"), diagnosis.meanings(found))
    return 0


def reproduce_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", nargs="?", default="", help="which; without it, all are listed; `all` for all of them")
    parser.add_argument("--data", default="cifar10", help="data set, or a folder of images [cifar10]")
    parser.add_argument("--seeds", default="0", metavar="INT,INT,...", help="runs of each row [0]")
    parser.add_argument(
        "--row", action="append", default=[], metavar="NAME", help="only this row of the table; may be repeated"
    )
    parser.add_argument("--dry-run", action="store_true", help="show the plan and its time, run nothing")
    parser.add_argument("--no-run", action="store_true", help="print what is there, run nothing")
    parser.add_argument("--results", default="results", metavar="FOLDER", help="finished runs, a JSON each [results]")
    parser.add_argument("--runs", default="runs", metavar="FOLDER", help="run folders [runs]")
    parser.add_argument(
        "--format", default="terminal", metavar="{terminal,markdown,latex,json}", help="of the table [terminal]"
    )
    parser.add_argument("--protocol", default="all", metavar="{all,knn,linear}", help="how runs are evaluated [all]")
    parser.add_argument("--probe-epochs", default="100", metavar="INT", help="of the linear probe [100]")
    parser.add_argument("--tables", default="", metavar="FILE", help="YAML with tables of your own beside these")
    _setting_argument(parser)
    words.quiet_flag(parser)


def _setting_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of every run, as `mixnn pretrain --help` lists them: epochs=20",
    )


def _settings(args: argparse.Namespace, verb: Callable[..., Any]) -> dict[str, Any]:
    """What was typed as settings of runs; a word of the verb's own is not one of them."""
    settings = dict(words.pair(text, "--setting epochs=20") for text in args.setting)
    for name in signature(verb).parameters:
        if name in settings and name != "settings":
            raise UserError(f"{name} is no setting of a run: `mixnn {args.verb} --help` says how it is typed")
    return settings


@contextmanager
def _told_as_settings() -> Iterator[None]:
    """Mistakes in a run's settings, answered by what these verbs take."""
    try:
        yield
    except UserError as error:
        raise UserError(words.as_settings(str(error))) from None


def _seeds(text: str) -> list[int]:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise UserError(f"--seeds {text}: write it as 0 or as 0,1,2")
    return [int(part) for part in text.split(",")]


@_told_as_settings()
def reproduce(args: argparse.Namespace) -> int:
    """regenerate a table of the paper: run what is missing, print our numbers beside the paper's"""
    from mixnn.paper import reproduce as reproduction
    from mixnn.progress import Reporter, print_table

    if not args.table:
        known = reproduction.tables_with(args.tables)
        rows = [(name, table.title, str(len(table.rows))) for name, table in known.items()]
        print_table(("table", "what it compares", "rows"), rows)
        return 0
    settings = _settings(args, reproduction.reproduce)
    if os.environ.get("MIXNN_DATA"):
        settings.setdefault("data_dir", os.environ["MIXNN_DATA"])
    reproduction.reproduce(
        args.table,
        data=args.data,
        seeds=_seeds(args.seeds),
        rows=args.row,
        results=args.results,
        runs=args.runs,
        run=not args.no_run,
        dry_run=args.dry_run,
        format=args.format,
        protocol=args.protocol,
        tables=args.tables,
        **words.numbers(args, probe_epochs=1),
        reporter=Reporter(args.quiet, words.as_settings),
        **settings,
    )
    return 0


def figures_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", help="which; without a name, all for which the runs are there")
    parser.add_argument("--data", default="cifar10", help="data set [cifar10]")
    parser.add_argument("--results", default="results", metavar="FOLDER", help="finished runs, a JSON each [results]")
    parser.add_argument(
        "--run", action="append", default=[], metavar="RUN", help="a run folder, for t-SNE; may be repeated"
    )
    parser.add_argument("--out", default="figures", metavar="FOLDER", help="where they go [figures]")
    words.overwrite_flag(parser, "figures that exist")
    _setting_argument(parser)
    words.quiet_flag(parser)


@_told_as_settings()
def figures(args: argparse.Namespace) -> int:
    """the paper's figures and ours, as SVG and PNG, from finished runs"""
    from mixnn.paper.figures import figures
    from mixnn.progress import Reporter

    written = figures(
        args.names,
        results=args.results,
        out=args.out,
        data=args.data,
        runs=args.run,
        overwrite=args.overwrite,
        reporter=Reporter(args.quiet),
        **_settings(args, figures),
    )
    for path in written:
        print(path)
    return 0


def report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", help="run folders; two or more are put side by side")
    parser.add_argument("--out", default="report.html", metavar="FILE", help="[report.html]")
    words.overwrite_flag(parser)
    parser.add_argument("--images", default="500", metavar="INT", help="on the map; 0: no images at all [500]")
    words.place_flags(parser)
    words.quiet_flag(parser)


def report(args: argparse.Namespace) -> int:
    """one HTML file: what was run, results, curves, a map of images, neighbors, and a verdict in words"""
    from mixnn.apps.report.report import report
    from mixnn.progress import Reporter
    from mixnn.runs import Run

    known = next(filter(None, (Run.open(run).config.data_dir for run in args.runs)), "")
    path = report(
        args.runs,
        args.out,
        device=args.device,
        data_dir=words.data_dir(args.data_dir, known),
        **words.numbers(args, images=0),
        overwrite=args.overwrite,
        reporter=Reporter(args.quiet),
    )
    print(path)
    return 0
