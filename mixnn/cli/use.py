"""Verbs that put an encoder to use: embed."""

from __future__ import annotations

import argparse

from mixnn.cli import words


def embed_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run folder")
    parser.add_argument("source", nargs="?", default="", help="folder, image or data set [what the run was trained on]")
    parser.add_argument(
        "--out", default="embeddings.npz", metavar="FILE", help=".npz, .parquet or .csv [embeddings.npz]"
    )
    parser.add_argument("--split", default="train", metavar="{train,test}", help="of a data set [train]")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N [auto]")
    parser.add_argument("--data-dir", default="", metavar="FOLDER", help="where data sets are kept [the run's own]")
    parser.add_argument("--quiet", action="store_true", help="print warnings and results alone")


def embed(args: argparse.Namespace) -> int:
    """vectors of a folder's images, with their file names"""
    from mixnn.embedding import embed
    from mixnn.progress import Reporter
    from mixnn.runs import Run

    run = Run.open(args.run)
    where = words.data_dir(args.data_dir, run.config.data_dir)
    say = Reporter(args.quiet)
    print(embed(run, args.source, args.out, split=args.split, device=args.device, data_dir=where, reporter=say))
    return 0
