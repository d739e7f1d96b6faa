"""Verbs that put an encoder to use: embed, search, classify, explore, export."""

from __future__ import annotations

import argparse
from typing import Any

from mixnn.cli import words


def embed_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run folder")
    parser.add_argument("source", nargs="?", default="", help="folder, image or data set [what the run was trained on]")
    parser.add_argument("--out", default="embeddings.npz", metavar="FILE", help=".npz, .parquet, .csv [embeddings.npz]")
    words.overwrite_flag(parser)
    parser.add_argument("--split", default="train", metavar="{train,test}", help="of a data set [train]")
    _common_arguments(parser)


def embed(args: argparse.Namespace) -> int:
    """vectors of a folder's images, with their file names"""
    from mixnn.apps.embed import embed

    print(embed(source=args.source, out=args.out, split=args.split, overwrite=args.overwrite, **_common(args)))
    return 0


def _common_arguments(parser: argparse.ArgumentParser) -> None:
    words.place_flags(parser)
    words.quiet_flag(parser)


def _common(args: argparse.Namespace) -> dict[str, Any]:
    """The run, and what those arguments say."""
    from mixnn.progress import Reporter
    from mixnn.runs import Run

    run = Run.open(args.run)
    where = words.data_dir(args.data_dir, run.config.data_dir)
    return {"run": run, "device": args.device, "data_dir": where, "reporter": Reporter(args.quiet)}


def search_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run folder")
    parser.add_argument("query", nargs="*", help="image files, or a folder of them")
    parser.add_argument("--source", default="", metavar="FOLDER", help="where to search [what the run was trained on]")
    parser.add_argument("--topk", default="10", metavar="INT", help="images for each query, or outliers [10]")
    parser.add_argument("--duplicates", action="store_true", help="groups of nearly the same image instead of a query")
    parser.add_argument("--outliers", action="store_true", help="the images least like any other instead of a query")
    parser.add_argument("--threshold", default="", metavar="COSINE", help="from which images count as duplicates")
    parser.add_argument("--method", default="auto", metavar="{auto,exact,faiss}", help="how to search [auto]")
    parser.add_argument(
        "--format", default="terminal", metavar="{terminal,json,html}", help="of the results [terminal]"
    )
    parser.add_argument("--out", default="", metavar="FILE", help="write them here; with --format html, a page")
    words.overwrite_flag(parser)
    _common_arguments(parser)


def search(args: argparse.Namespace) -> int:
    """the images most like a given one; near-duplicates; outliers"""
    from mixnn.apps.search.search import search

    search(
        query=args.query[0] if len(args.query) == 1 else args.query or "",
        source=args.source,
        **words.numbers(args, topk=1),
        duplicates=args.duplicates,
        outliers=args.outliers,
        threshold=words.real(args.threshold, "threshold") if args.threshold else None,
        method=args.method,
        format=args.format,
        out=args.out,
        overwrite=args.overwrite,
        **_common(args),
    )
    return 0


def classify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run folder")
    parser.add_argument(
        "labels", nargs="?", default="", help="CSV of file,label; or folders, where subfolders are classes"
    )
    parser.add_argument("--source", default="", metavar="FOLDER", help="the images [what the run was trained on]")
    parser.add_argument(
        "--apply", default="", metavar="FOLDER", help="new images for the classifier, just made or saved"
    )
    parser.add_argument(
        "--suggest", default="0", metavar="INT", help="name so many images that are most worth labelling"
    )
    parser.add_argument("--model", default="auto", metavar="{auto,logistic,knn}", help="[auto: by cross-validation]")
    parser.add_argument("--out", default="", metavar="FOLDER", help="where all files go [RUN/classifier]")
    words.overwrite_flag(parser, "files in the folder of --out")
    parser.add_argument("--seed", default="0", metavar="INT", help="of folds and draws [0]")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    _common_arguments(parser)


def classify(args: argparse.Namespace) -> int:
    """a classifier from a handful of labels: accuracy, predictions, and which images to label next"""
    import json

    from mixnn.apps.classify.classify import classify, show

    found = classify(
        labels=args.labels,
        source=args.source,
        apply=args.apply,
        **words.numbers(args, suggest=0, seed=0),
        model=args.model,
        out=args.out,
        overwrite=args.overwrite,
        **_common(args),
    )
    print(json.dumps(found, indent=1)) if args.json else show(found)
    return 0


def explore_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run folder")
    parser.add_argument("source", nargs="?", default="", help="folder or data set [what the run was trained on]")
    parser.add_argument("--out", default="", metavar="FILE", help="[RUN/explore.html]")
    words.overwrite_flag(parser, "the file of --out if it exists")
    parser.add_argument("--serve", action="store_true", help="on a local address instead, until Ctrl-C")
    parser.add_argument("--port", default="0", metavar="INT", help="of that address [any that is free]")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    parser.add_argument(
        "--labels", default="", metavar="LABELS", help="folders, a CSV of file,label, or none [the run's]"
    )
    parser.add_argument("--layout", default="auto", metavar="{auto,tsne,pca}", help="of the map [auto]")
    parser.add_argument("--neighbors", default="10", metavar="INT", help="shown of an image [10]")
    parser.add_argument("--max-images", default="50000", metavar="INT", help="on the map [50000]")
    parser.add_argument("--seed", default="0", metavar="INT", help="of the map [0]")
    _common_arguments(parser)


def explore(args: argparse.Namespace) -> int:
    """a web page: a map of all images, their neighbors, groups to name and export as labels"""
    from mixnn.apps.explore.explore import explore

    path = explore(
        source=args.source,
        out=args.out,
        serve=args.serve,
        labels=args.labels,
        layout=args.layout,
        **words.numbers(args, port=0, neighbors=1, max_images=2, seed=0),
        open=args.open,
        overwrite=args.overwrite,
        **_common(args),
    )
    if path is not None:
        print(path)
    return 0


def export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run folder")
    parser.add_argument("--out", default="", metavar="FILE", help="[RUN/encoder.FORMAT]")
    parser.add_argument("--format", default="safetensors", metavar="{safetensors,onnx,pt2}", help="[safetensors]")
    parser.add_argument("--licence", default="", metavar="TEXT", help="for the card that lies beside the weights")
    parser.add_argument("--opset", default="17", metavar="INT", help="of ONNX [17]")
    words.overwrite_flag(parser)
    words.quiet_flag(parser)


def export(args: argparse.Namespace) -> int:
    """the encoder for other programs: safetensors with torchvision's names, ONNX, torch.export"""
    from mixnn.apps.export import export
    from mixnn.progress import Reporter

    path = export(
        args.run,
        args.out,
        format=args.format,
        licence=args.licence,
        **words.numbers(args, opset=1),
        overwrite=args.overwrite,
        reporter=Reporter(args.quiet),
    )
    print(path)
    return 0
