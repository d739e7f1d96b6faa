"""Verbs that list: methods, data."""

from __future__ import annotations

import argparse
import os

from mixnn.config import UserError


def methods_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default="", help="a method, to see its options")


def methods(args: argparse.Namespace) -> int:
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


def data_arguments(parser: argparse.ArgumentParser) -> None:
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


def data(args: argparse.Namespace) -> int:
    """list the data sets, or fetch one: mixnn data get NAME"""
    from pathlib import Path

    from mixnn.progress import Reporter, print_table

    root = Path(args.data_dir).expanduser() if args.data_dir else None
    if args.action == "get":
        from mixnn.data.download import get

        if not args.name:
            raise UserError("which data set? type: mixnn data get NAME; `mixnn data` lists the names")
        with Reporter().bytes_bar(args.name) as progress:
            place = get(args.name, root, progress=progress)
        if place is not None:
            print(place)
        return 0
    if args.action != "list" or args.name:
        raise UserError(f"mixnn data {args.action}: type `mixnn data` for the list, or `mixnn data get NAME`")
    from mixnn.data import default_root, describe

    print_table(("name", "data set", "train + test", "classes", "side", "where"), [p.cells() for p in describe(root)])
    print(f"\nfetch one with `mixnn data get NAME`, into {root or default_root()}; a folder of images needs no name")
    return 0
