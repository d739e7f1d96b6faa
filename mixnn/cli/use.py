"""Verbs that put an encoder to use: embed, export."""

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


def export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run folder")
    parser.add_argument("--out", default="", metavar="FILE", help="[RUN/encoder.FORMAT]")
    parser.add_argument("--format", default="safetensors", metavar="{safetensors,onnx,pt2}", help="[safetensors]")
    parser.add_argument("--licence", default="", metavar="TEXT", help="for the card that lies beside the weights")
    parser.add_argument("--opset", default="17", metavar="INT", help="of ONNX [17]")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    parser.add_argument("--quiet", action="store_true", help="print warnings and results alone")


def export(args: argparse.Namespace) -> int:
    """the encoder for other programs: safetensors with torchvision's names, ONNX, torch.export"""
    from mixnn.exporting import export
    from mixnn.progress import Reporter

    path = export(
        args.run,
        args.out,
        form=args.format,
        licence=args.licence,
        opset=words.number(args.opset, "opset", 1),
        overwrite=args.overwrite,
        reporter=Reporter(args.quiet),
    )
    print(path)
    return 0
