"""Evaluation of an encoder by the paper's protocols: kNN and linear probe, every result with the protocol behind it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from mixnn import dist
from mixnn.augment import View
from mixnn.config import (
    DataDir,
    Device,
    MovedTo,
    NotSaved,
    Overwrite,
    Param,
    UserError,
    calling,
    setting,
    short_path,
    unknown,
    verb,
)
from mixnn.data import Dataset, ImageSet, open_dataset
from mixnn.data.dataset import FOLDER_SIZE, is_given
from mixnn.data.image_set import Normalization, read_normalization
from mixnn.device import pick_device
from mixnn.evaluation.encoders import Frozen, find_run, open_candidate
from mixnn.evaluation.features import features
from mixnn.evaluation.knn import KNN
from mixnn.evaluation.linear import LINEAR
from mixnn.evaluation.protocol import Protocol, Subject, make_protocol
from mixnn.files import check_writable, expand, why_not_writable, write_atomically
from mixnn.nn.folding import folded
from mixnn.processes import is_main_process
from mixnn.progress import NullReporter, Reporter, duration, plural, reporter_for
from mixnn.registry import Registry
from mixnn.runs import Run
from mixnn.runs.code import evaluation_digest
from mixnn.runs.folder import environment
from mixnn.runs.weights import trained_backbone

PROTOCOLS: Registry[Protocol] = Registry(
    "protocol", "protocols", {protocol.name: protocol for protocol in (KNN, LINEAR)}, make_protocol
)


ENCODER = Param(
    "a run folder, an exported file, imagenet, a file of weights, timm:NAME or torchvision:NAME; in Python also a "
    "network or a function from images to features",
    metavar="ENCODER",
)
SLOW = 60  # seconds; longer work is announced
ENOUGH = 0.05  # seconds; a measurement that takes longer is not repeated with more images


@verb
def evaluate(
    encoder: Annotated[Any, ENCODER],
    data: Annotated[
        Any, Param("a data set's name or a folder [a run's own data]", metavar="DATA", aliases=("--data",))
    ] = "",
    *,
    protocol: Annotated[str, Param("which evaluation: all, knn, linear, or one of your own")] = "all",
    epochs: Annotated[int, Param("epochs of the linear probe", low=1)] = 100,
    seed: Annotated[int, Param("seed of the linear probe", low=0, high=2**63 - 1)] = 0,
    image_size: Annotated[
        int, Param("side of the images for the encoder [what it was trained with, else the data's]", low=0, high=1024)
    ] = 0,
    normalization: Annotated[
        str | tuple,
        Param(
            "mean and std of the pixels: data, torchvision (ImageNet's), tensorflow, none (pixels from 0 to 1) or "
            "MEAN/STD, as in 0.5,0.5,0.5/0.2,0.2,0.2 [what the encoder was trained with, else data]"
        ),
    ] = "auto",
    labels: Annotated[Any, Param("labels of a folder: folders, or a CSV of file,label", metavar="CSV")] = "",
    holdout: Annotated[float, Param("share of a folder's images to use as test images", low=0, high=0.5)] = 0.0,
    limit: Annotated[int, Param("use only this many training and test images of DATA; 0: all", low=0)] = 0,
    source: MovedTo = "",
    device: Device = "auto",
    precision: Annotated[
        str,
        Param(
            "precision in which images are encoded; auto: that of the run for the linear probe, fp32 for kNN",
            choices=("auto", "bf16", "fp32"),
        ),
    ] = "auto",
    data_dir: DataDir = "",
    save: Annotated[str | Path, Param("also write the results to a JSON file", metavar="FILE")] = "",
    overwrite: Overwrite = False,
    verbose: bool | Reporter = False,
) -> dict[str, Any]:
    """Evaluate an encoder by kNN and a linear probe: a run's, a published one, or your own network or function.

    A run without `data` is evaluated on its own data, and the numbers also go to its results.json. Anything else needs
    `data`, and its results are only returned. `save` writes them to a file; for a run, with configuration and curves.

    If the run was trained on images in memory, give the same ones as `source`, with `labels` if `pretrain` got them:
    evaluate("runs/x", source=images, labels=labels).

    A network or function gets float32 images (B, 3, S, S) on its device and must return features (B, F): remove the
    classifier. By default, images have the data set's own size (64 pixels for a folder) and are normalized with the
    mean and std of its training images. `image_size` and `normalization` change that; in Python, `normalization` may
    also be (mean, std). A network is used in eval mode and left as it was; a function is called as it is.

    docs/evaluation.md says what the numbers mean.

    >>> found = mixnn.evaluate(backbone, "digits", protocol="knn", limit=100)
    >>> sorted(found["knn"])
    ['code', 'majority', 'protocol', 'seconds', 'weighted']

    Examples:
        mixnn evaluate runs/cifar10-mnn
        mixnn evaluate runs/cifar10-mnn --protocol knn --json
        mixnn evaluate imagenet --data digits --protocol knn
        mixnn evaluate timm:resnet18 --data cifar10
    """
    names = protocols_of(protocol)
    reporter, run = reporter_for(verbose) if is_main_process() else NullReporter(), find_run(encoder)
    if precision == "bf16" and pick_device(device).type != "cuda":
        raise UserError(f"precision=bf16 needs CUDA: use {setting('precision', 'fp32')} or leave it out")
    save = expand(save) if str(save) else ""
    dist.init(pick_device(device))
    if str(save) and is_main_process():
        check_writable(save, overwrite)
    if not is_given(data):
        if run is None:
            raise UserError(f"which images? use {setting('data', 'cifar10')}, or a folder with labels and test images")
        given: dict[str, Any] = {"image_size": image_size, "normalization": normalization != "auto"}
        given |= {"labels": is_given(labels) and not is_given(source), "holdout": holdout, "limit": limit}
        for name in [name for name, value in given.items() if value]:
            again = ", or source=images if these labels belong to images in memory" if name == "labels" else ""
            other = setting("data", "DATA")
            raise UserError(f"{setting(name)} is for other data than the run's own: add {other}{again}")
        subject, common = _run_on_its_data(run.moved(source, labels), data_dir, device, epochs, seed, reporter)
    else:
        if is_given(source):
            raise UserError(f"{setting('source')} is for a run's own data: use {setting('data')} alone")
        run, dataset = None, open_dataset(data, data_dir, labels=labels, holdout=holdout, limit=limit)
        _check_has_test(dataset)
        own_size = dataset.stored_size or FOLDER_SIZE
        candidate = open_candidate(encoder, device, own_size, reporter, image_size)
        mean_std = candidate.normalization if normalization == "auto" else read_normalization(normalization)
        size = image_size or candidate.size or own_size
        train, test = _labeled_images(dataset, size, candidate.device, mean_std)
        subject = Subject(Frozen(candidate, size), train, test, size, [], epochs, seed, reporter, candidate.device)
        common = {"encoder": candidate.name, "data": dataset.name, "image_size": size}
        common |= {"mean": train.mean, "std": train.std, "train_images": len(train), "test_images": len(test)}
    subject = subject if precision == "auto" else replace(subject, precision=precision)
    subject = replace(subject, group=dist.run_group())
    announce(subject, names)
    results: dict[str, Any] = {}
    for name in names:
        start = time.perf_counter()
        found, settings = _check_result(PROTOCOLS[name], PROTOCOLS[name].run(subject))
        results[name] = {**found, "protocol": settings | common, "seconds": round(time.perf_counter() - start, 2)}
        if name in (KNN.name, LINEAR.name):
            results[name]["code"] = evaluation_digest()
    about = {"evaluated_with": environment(subject.device)}
    if not is_main_process():
        return results
    try:
        if run is not None:
            run.save_results(results | about, reporter.warn)
            if str(save):
                save_summary(run.path, save, reporter.warn)
        elif str(save):
            write_atomically(Path(save), (json.dumps(results | about, indent=1) + "\n").encode())
    except UserError as error:
        raise NotSaved(error, results) from None
    return results


def _check_result(protocol: Protocol, result: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Numbers and settings as a protocol returned them; UserError if they cannot be shown or saved."""
    who, headline = f"the protocol {protocol.name}", protocol.headline
    is_pair = isinstance(result, tuple | list) and len(result) == 2
    if not (is_pair and all(isinstance(part, dict) for part in result)):
        parts = result if isinstance(result, tuple) else [result]
        what = ", ".join(type(part).__name__ for part in parts)
        raise UserError(
            f"{who} must return two dicts, its numbers and the settings that made them, and returns {what}\n"
            "write `return numbers, {}` if there are no settings"
        )
    for key, value in [item for part in result for item in part.items()]:
        try:
            json.dumps({key: value})
        except (TypeError, ValueError):
            raise UserError(
                f"{who} returns a {type(value).__name__} as {key!r}, which JSON cannot hold\n"
                "use numbers, text, lists and dicts: float(x) and x.tolist() make them of tensors and arrays"
            ) from None
    numbers, settings = result
    if headline not in numbers:
        raise UserError(
            f"the numbers of {who} lack {headline!r}, its headline: return it, or register the protocol with "
            f"headline= and one of {', '.join(map(str, numbers)) or 'its numbers'}"
        )
    if not isinstance(numbers[headline], int | float):
        raise UserError(f"{who} returns {numbers[headline]!r} as {headline!r}, its headline: return a number")
    return numbers, settings


def _run_on_its_data(
    run: Run, data_dir: str | Path, device: str, epochs: int, seed: int, reporter: Reporter
) -> tuple[Subject, dict[str, Any]]:
    """A run's encoder and its own data; and what its results have in common."""
    where = pick_device(device)
    run.check_data(f"use {setting('source', 'FOLDER')}")
    if reason := why_not_writable(run.path):
        reporter.warn(f"the results will be printed, but cannot be saved: {reason}")
    config, dataset = run.config, run.dataset(data_dir)
    if not dataset.has_test:
        classify = calling("classify", run.path, config.labels or "folders")
        raise UserError(
            f"{short_path(config.data)} has no test images to evaluate on\n"
            f"use `{classify}`, which only needs labels, or hold some out: {calling('pretrain', ..., holdout=0.2)}"
        )
    tensors, state = run.load_checkpoint(reporter.warn)
    backbone = trained_backbone(run, tensors)
    backbone.to(where, memory_format=torch.channels_last)  # type: ignore[call-overload]
    train, test = (dataset.load(split, config.encoding_size).to_if_fits(where) for split in ("train", "test"))
    _check_labels(train, test, short_path(config.data), "train with labels")
    trained = state["step"] // (state["data"]["images"] // config.batch_size)
    if trained < config.epochs:
        resume = f"`{run.how_to_resume}` continues it"
        reporter.warn(
            f"{run.path} is unfinished: evaluated after {trained} of {plural(config.epochs, 'epoch')}; {resume}"
        )
    common = {
        "checkpoint_step": state["step"],
        "trained_epochs": trained,
        "train_seed": config.seed,
        "train_images": len(train),
        "test_images": len(test),
    }
    metrics, precision = run.metrics(reporter.warn), "fp32" if config.precision == "fp32" else "auto"
    return Subject(
        folded(backbone), train, test, config.encoding_size, metrics, epochs, seed, reporter, where, precision
    ), common


def _check_has_test(dataset: Dataset) -> None:
    dataset.check()
    if not dataset.has_test:
        is_folder = dataset.recipe is None and dataset.is_stored
        classify = f"\n`{calling('classify', dataset.name, 'folders')}` needs none" if is_folder else ""
        raise UserError(
            f"{dataset.name} has no test images to evaluate on: put images into train/ and test/, or use "
            f"{setting('holdout', 0.2)}{classify}"
        )


def _labeled_images(
    dataset: Dataset, size: int, device: torch.device, normalization: Normalization | None
) -> tuple[ImageSet, ImageSet]:
    """Training and test images with this normalization, or with the data set's own."""
    train, test = (dataset.load(split, size).to_if_fits(device) for split in ("train", "test"))
    _check_labels(train, test, dataset.name, f"use {setting('labels', 'folders')} or a CSV file")
    if normalization is None:
        return train, test
    mean, std = normalization
    return replace(train, mean=mean, std=std), replace(test, mean=mean, std=std)


def _check_labels(train: ImageSet, test: ImageSet, name: str, how: str) -> None:
    """UserError if images lack labels or have only one class. `how`: how to give labels if there are none."""
    if train.fully_labeled and test.fully_labeled:
        return
    if not train.num_labeled and not test.num_labeled:
        raise UserError(f"{name} has no labels, so there is nothing to evaluate against: {how}")
    for part, images in (("training", train), ("test", test)):
        if missing := len(images) - images.num_labeled:
            count = "the" if missing == len(images) else f"{missing:,} of the {len(images):,}"
            raise UserError(f"{count} {part} images of {name} have no labels: give these labels too")
    raise UserError(f"all images of {name} have the label {train.classes[0]!r}: accuracy needs at least two classes")


def announce(subject: Subject, names: Sequence[str]) -> None:
    """Say beforehand how long it will take, if that is long. An encoder that does not work fails here, at once."""
    each = seconds_per_image(subject)
    encoded = sum(PROTOCOLS[name].num_encoded(subject) for name in names) / dist.size()
    if each * encoded < SLOW:
        return
    subject.reporter.info(
        f"this takes about {duration(each * encoded)}: {encoded:,.0f} images are encoded at {1000 * each:.3g} ms each"
    )
    if LINEAR.name in names:
        knn = f"{setting('protocol', KNN.name)} takes about {duration(each * KNN.num_encoded(subject))}"
        subject.reporter.info(
            f"the linear probe encodes new crops of all training images in each of {plural(subject.epochs, 'epoch')}; "
            f"{knn}, and fewer {setting('epochs')} are faster but not the paper's protocol"
        )


def seconds_per_image(subject: Subject) -> float:
    """Time to crop and encode an image, measured on a few."""
    view, generator = View(subject.crop_size, area=(0.08, 1.0)), torch.Generator(subject.device).manual_seed(0)

    def encode(order: Tensor) -> float:
        start = time.perf_counter()
        features(subject.backbone, subject.train, order, view, generator, subject.bf16).sum().item()  # waits
        return time.perf_counter() - start

    each = 0.0
    for count in (2, 16, 128, 2048):  # the first call sets up the libraries; a GPU is fast with many only
        order = torch.arange(min(count, len(subject.train)))
        seconds = encode(order)
        if count > 2 and seconds > ENOUGH:  # again: on a GPU, the first batch of each size tries several algorithms
            seconds = min(seconds, encode(order))
        each = seconds / len(order)
        if count > 2 and seconds > ENOUGH:
            break
    return each


def protocols_of(choice: str) -> tuple[str, ...]:
    """Names of the protocols that --protocol asks for: one of them, or all."""
    if choice not in ("all", *PROTOCOLS):
        raise unknown("protocol", choice, ("all", *PROTOCOLS))
    return tuple(PROTOCOLS) if choice == "all" else (choice,)


def show_evaluate(results: dict[str, Any]) -> None:
    """Print the accuracies, one line per protocol."""
    print("\n".join(_lines(results)))


def _lines(results: dict[str, Any]) -> list[str]:
    lines = []
    for name, protocol in PROTOCOLS.items():
        if name in results:
            summary = protocol.summary(results[name])
            headline = f"{protocol.label:6}  {results[name][protocol.headline]:.2f}"
            lines.append(headline + f"  ({summary})" * bool(summary))
    return lines


def save_summary(run: str | Path, file: str | Path, warn: Callable[[str], None] = lambda _: None) -> None:
    """Write the run's configuration, command, environment, curves and results to one small JSON file.

    Such files are made to be shared, so the home folder is written as ~.
    """
    summary = Run.open(run).summary(warn)
    home = re.compile(rf"(?<![^\s'\"=]){re.escape(str(Path.home()))}(?=/|$)")
    summary["command"] = home.sub("~", summary["command"])
    for name in ("data", "data_dir"):
        summary["config"][name] = home.sub("~", summary["config"][name])
    summary["metrics"] = [_short(record) for record in summary["metrics"]]
    write_atomically(Path(file), (json.dumps(summary, separators=(",", ":")) + "\n").encode())


def _short(record: dict[str, Any]) -> dict[str, Any]:
    """Six digits are more than a curve shows; the run folder keeps them all."""
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in record.items()}
