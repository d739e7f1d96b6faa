"""classify: a label for every image from a few labels, how accurate that is, and which images to label next."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np

from mixnn.apps.classify import files, page
from mixnn.apps.classify.advice import advise, training_gain
from mixnn.apps.classify.classifiers import (
    CONFIDENT,
    FEW_TO_CALIBRATE,
    MODELS,
    Classifier,
    TrainingResult,
    can_hold_out,
    summarize_predictions,
    train_classifier,
)
from mixnn.apps.classify.features import RUN as RUN_FEATURES
from mixnn.apps.classify.features import (
    SIGNIFICANCE,
    START,
    Features,
    all_features,
    best_features,
    compare,
    identical_copies,
    label_conflicts,
    numbered,
    pixel_copies,
    sample_pixels,
)
from mixnn.apps.classify.suggest import suggest_images
from mixnn.apps.embed import Embeddings
from mixnn.apps.report import run_data
from mixnn.config import RUN_OR_FOLDER, DataDir, Device, Param, UserError, setting, verb
from mixnn.data import Images, open_images
from mixnn.data.dataset import is_given
from mixnn.files import check_folder_creatable, check_may_write, expand, write_atomically
from mixnn.progress import Reporter, escape_controls, plural, print_table, reporter_for
from mixnn.runs import Run
from mixnn.runs.encoder import load_encoder
from mixnn.runs.start import DEFAULT_START, open_run

__all__ = ["Classification", "classify", "show_classify"]

MAX_CLASSES_SHOWN = 25  # if there are more, those with the lowest accuracy are shown
SMALL_GAIN = 1.0  # percent; if the curve's last gain is surely smaller, more labels may help little


class Classification(dict[str, Any]):
    """What `classify` found, as plain values. With labels it also holds the fitted classifier: `predict`."""

    fitted: tuple[Classifier, Features] | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        """The labels, in the order of the columns of `predict_proba`."""
        return self._fitted()[0].classes

    def predict(self, images: Any) -> list[str]:
        """The label of each image of a folder, of files, or of images in memory (docs/data.md)."""
        return [self.classes[i] for i in self.predict_proba(images).argmax(1)]

    def predict_proba(self, images: Any) -> np.ndarray:
        """The probability of each class, (M, Y); UserError if an image cannot be read."""
        classifier, features = self._fitted()
        found = open_images(images)
        embeddings = features.embed(found)
        if len(embeddings) < len(found):
            unread = next(name for name in found.names if name not in {*embeddings.names})
            raise UserError(f"{unread} in {found.title} cannot be read: leave it out")
        return classifier.predict_proba(embeddings.vectors)

    def _fitted(self) -> tuple[Classifier, Features]:
        if self.fitted is None:
            raise UserError("there is no classifier, since no labels were given")
        return self.fitted


@verb
def classify(
    run: Annotated[str | Path | Run, RUN_OR_FOLDER],
    labels: Annotated[
        Any,
        Param(
            "a CSV with the columns file (relative to the images' folder or to here, or absolute) and label; "
            "the word folders if each subfolder is a class; or the word data for labels that a data set comes with"
        ),
    ] = "",
    *,
    source: Annotated[Any, Param("the labeled images [what the run was trained on]", metavar="FOLDER")] = "",
    new_images: Annotated[
        Any,
        Param("new images to label; without LABELS, by the classifier saved before", flag="--apply", metavar="FOLDER"),
    ] = "",
    suggest: Annotated[
        int,
        Param(
            "suggest this many images to label next: suggestions.csv to fill in, and suggestions.html to do so in a "
            "browser (suggestions-2 and so on, if you have begun to fill in an earlier one)",
            low=0,
            high=2**32 - 1,
        ),
    ] = 0,
    out: Annotated[
        str | Path,
        Param(
            "where all files go; predictions.csv has a label per image, its confidence (the probability, 0 to 1, "
            "that it is right) and the second choice with its own [RUN/classifier]",
            metavar="FOLDER",
        ),
    ] = "",
    model: Annotated[str, Param("kind of classifier [auto: by cross-validation]", choices=("auto", *MODELS))] = "auto",
    seed: Annotated[int, Param("seed of the folds and of the suggestions", low=0, high=2**32 - 1)] = 0,
    device: Device = "auto",
    data_dir: DataDir = "",
    overwrite: Annotated[bool, Param("replace the files in the output folder")] = False,
    verbose: bool | Reporter = False,
) -> Classification:
    """Label all images from a few labels, and estimate the accuracy (in percent).

    `labels`: a CSV with the columns file and label, or "folders" if subfolders are classes. Files are named relative to
    `source` (by default what the run was trained on), relative to the current directory, or by absolute paths. In
    Python also a mapping of names to labels, a DataFrame with the columns file and label, one label per image (None: no
    label), or "data" for the labels that come with the images. `new_images`: images to label with this classifier or,
    without `labels`, with the one saved before. `source` and `new_images` may be images in memory (docs/data.md).
    `suggest`: how many images to suggest for labeling, with or without labels. All files go to `out`, by default
    RUN/classifier.

    The result is a dictionary; its method `predict` labels other images.

    If raw pixels or the network before training are clearly better on the held-out labels (p < 0.1, one-sided exact
    McNemar test), they are used instead of the run.

    >>> labels = {"cat0.png": "cat", "cat1.png": "cat", "dog0.png": "dog", "dog1.png": "dog"}
    >>> fitted = mixnn.classify("runs/photos", labels)
    >>> fitted.predict(["photos/cat2.png", "photos/dog2.png"])
    ['cat', 'dog']

    Examples:
        mixnn classify runs/photos labels.csv
        mixnn classify runs/photos --suggest 20
        mixnn classify runs/photos --apply ./new
    """
    reporter = reporter_for(verbose)
    run = open_run(run, reporter)
    folder = expand(out) if str(out) else run.path / "classifier"
    _check_arguments(run, labels, source, new_images, suggest, folder)
    check_folder_creatable(folder)
    if str(out):
        _check_outputs(folder, labels, new_images, overwrite)
    suggested_before = files.read_suggested(folder)
    images = run.images(source, str(data_dir)) if is_given(labels) or suggest else None
    others = run.images(new_images, str(data_dir)) if is_given(new_images) else None
    listed = files.read_labels(labels, images) if images is not None and is_given(labels) else {}
    features = all_features(run, load_encoder(run, device, reporter), reporter)
    results = Classification({"run": str(run.path), "seed": seed, "files": {}})
    if images is not None:
        embeddings, trained = features[RUN_FEATURES].embed(images), None
        given = files.readable_labels(labels, listed, embeddings, reporter) if listed else {}
        if suggest and len(given) == len(embeddings):
            raise UserError(f"every image has a label, so there is none to suggest: leave out {setting('suggest')}")
        if given:
            options: dict[str, Any] = {"model": model, "seed": seed, "suggested": suggested_before}
            embeddings, trained, found = _train(features, images, embeddings, given, options, reporter)
            results |= found
            start = run.config.data if run.config.init_from == DEFAULT_START else ""
            results["advice"] = advise(results, run_data.read_files(run).verdict.state, run.config.data, start)
            results.fitted = trained.classifier, features[results["features"]]
            results["files"] |= _save(folder, features[results["features"]], embeddings, given, trained)
        if suggest:
            results |= suggest_images(embeddings, given, suggest, seed, trained.probabilities if trained else None)
            written = labels if isinstance(labels, str | Path) else ""
            template = files.write_suggestions(folder, results["suggested"], given, written, suggested_before)
            results["files"] |= _write_page(run, images, results["suggested"], given, template)
    if others is not None:
        results.fitted = fitted = files.load_classifier(files.find_classifier(folder, run), features)
        path = folder / files.predictions_name(new_images)
        results["applied"] = _label_new_images(*fitted, others, path)
        results["files"]["applied"] = str(path)
    return results


def _train(
    features: dict[str, Features],
    images: Images,
    embeddings: Embeddings,
    given: dict[str, str],
    options: dict[str, Any],
    reporter: Reporter,
) -> tuple[Embeddings, TrainingResult, dict[str, Any]]:
    """A classifier of the best features, the embeddings it was trained on, and the results.

    `embeddings` are the run's. Other features are used only where they are clearly better on these labels.
    """
    found: dict[str, Any] = {"features": RUN_FEATURES}
    copies = identical_copies(embeddings, given)
    tested = {name: label for name, label in given.items() if name not in copies}
    pixels = None
    if can_hold_out(numbered(tested)):
        pixels = sample_pixels(images, embeddings, tested, options["seed"], reporter)
        copies |= pixel_copies(pixels, tested)
        tested = {name: label for name, label in tested.items() if name not in copies}
    trained = train_classifier(embeddings, given, copies=copies, **options, reporter=reporter)
    if trained.held and pixels is not None:
        about = {"model": options["model"], "seed": options["seed"], "reporter": reporter}
        if comparison := compare(features, images, embeddings, pixels, tested, trained.held, **about):
            comparison["contradictions"] = label_conflicts(pixels, given)
            found |= {"comparison": comparison, "features": best_features(comparison)}
    if found["features"] != RUN_FEATURES:
        embeddings = features[found["features"]].embed(images)
        trained = train_classifier(embeddings, given, copies=copies, **options, reporter=reporter)
    return embeddings, trained, trained.results | found


def _write_page(
    run: Run, images: Images, suggested: list[str], given: dict[str, str], template: Path
) -> dict[str, str]:
    """Write the page on which to label the suggested images; return its path and that of `template`, a CSV."""
    path = template.with_suffix(".html")
    command = f"{run.command_line('classify')} {template.name}"
    write_atomically(path, page.render(images, suggested, given, template.name, command))
    return {"suggestions": str(template), "page": str(path)}


def _label_new_images(classifier: Classifier, features: Features, images: Images, path: Path) -> dict[str, Any]:
    """Write predicted labels of images to `path`; return a summary."""
    embeddings = features.embed(images)
    probabilities = classifier.predict_proba(embeddings.vectors)
    files.write_predictions(path, embeddings.names, classifier.classes, probabilities, {})
    return summarize_predictions(probabilities, classifier.classes) | {"features": features.name}


def _check_arguments(
    run: Run,
    labels: Any,
    source: Any,
    new_images: Any,
    suggest: int,
    folder: Path,
) -> None:
    """UserError for what is wrong before any work is done."""
    if not (is_given(labels) or is_given(new_images) or suggest):
        raise UserError(
            f"nothing to do: give labels (a CSV of file,label), {setting('suggest', 'COUNT')} (images to label), "
            f"or {setting('new_images', 'FOLDER')} (new images, for a classifier made before)"
        )
    if is_given(new_images) and is_given(source) and not (is_given(labels) or suggest):
        alone = f"for new images, use {setting('new_images')} alone"
        raise UserError(f"{setting('source')} is the folder of the labeled images: {alone}")
    if isinstance(labels, str | Path) and expand(labels).resolve() == (folder / files.PREDICTIONS).resolve():
        raise UserError(f"{labels} would be overwritten by the predictions: copy it to another file first")
    if is_given(new_images) and not is_given(labels):
        files.find_classifier(folder, run)


def _check_outputs(folder: Path, labels: Any, new_images: Any, overwrite: bool) -> None:
    names = [files.CLASSIFIER, files.PREDICTIONS] if is_given(labels) else []
    names += [files.predictions_name(new_images)] if is_given(new_images) else []
    for name in names:
        check_may_write(folder / name, overwrite)


def _save(
    folder: Path, features: Features, embeddings: Embeddings, given: dict[str, str], trained: TrainingResult
) -> dict[str, str]:
    """Write the classifier and the predictions; return their paths."""
    saved, table = folder / files.CLASSIFIER, folder / files.PREDICTIONS
    files.save_classifier(saved, trained.classifier, features, trained.results)
    files.write_predictions(table, embeddings.names, trained.classifier.classes, trained.probabilities, given)
    return {"predictions": str(table), "classifier": str(saved)}


# --- what is printed ---


def show_classify(results: dict[str, Any]) -> None:
    """Print the results of `classify`: accuracy first, tables, then advice and the files."""
    if "classifier" in results:
        _show_accuracy(results)
        _show_classes(results)
        _show_curve(results["curve"])
        _print_lines(_mistakes(results["held_out"]))
        _print_lines(_predictions(results["predicted"], "unlabeled", calibrated=bool(results["held_out"])))
        _print_lines(_calibration(results))
        _print_lines(results["advice"])
    if "applied" in results:
        _print_lines(_predictions(results["applied"], "new", calibrated=True))
        _print_lines(
            ["Use the confidence to rank predictions; for images unlike the labeled ones it is not calibrated."]
        )
    paths = results["files"]
    if "suggested" in results:
        count, what = (
            len(results["suggested"]),
            {
                "typical": "each typical of a group of similar images without a label",
                "uncertain": "which the classifier is unsure about",
            }[results["suggested_by"]],
        )
        _print_lines(
            [
                f"Label next: {plural(count, 'image')}, {what}.",
                f"Fill in the labels in {paths['suggestions']}, then use it as the labels."
                + " It also has those you gave." * ("classifier" in results),
                f"Or see the images and label them in a browser: {paths['page']}",
            ]
        )
    titles = {"predictions": "Predictions", "applied": "Predictions for the new images", "classifier": "Classifier"}
    _print_lines([f"{title}: {paths[key]}" for key, title in titles.items() if key in paths])


def _print_lines(lines: list[str]) -> None:
    for line in lines:
        print(escape_controls(line))


def _show_accuracy(results: dict[str, Any]) -> None:
    """Print the headline and, where accuracy is known, the baselines and the models it compares with."""
    held = results["held_out"]
    if not held:
        _print_lines([*results["notes"], ""])
        return
    where = " on images like the labeled ones" if held["labels_alike"] else ""
    _print_lines(
        [
            f"Accuracy{where}: {held['accuracy']:.1f}% (95% interval {held['low']:.1f} to {held['high']:.1f}), "
            f"measured by cross-validation on {plural(held['images'], 'labeled image')}."
        ]
    )
    comparison = results["comparison"]
    _print_lines([*_chosen(results), _gain(results), *results["notes"], ""])
    cells = [(title, *_cells(row)) for title, row in comparison["accuracy"].items()]
    cells.append((f"always {held['commonest']!r}", f"{held['commonest_share']:.1f}%", ""))
    print_table(("same labels, trained on", "accuracy", "95% interval"), cells)
    if comparison["labels"] < (tested := results["labeled"] - results["copies"]):
        print(f"Compared on {comparison['labels']:,} of the {tested:,} labels, chosen at random.")
    print()
    if len(held["models"]) > 1:
        kept = results["classifier"]["model"]
        models = {MODELS[m] + " (kept)" * (m == kept): row for m, row in held["models"].items()}
        models["chosen in each fold (accuracy above)"] = held
        print_table(
            ("classifier", "accuracy", "95% interval"), [(title, *_cells(row)) for title, row in models.items()]
        )
        if held["models"][kept]["accuracy"] != held["accuracy"]:
            print("Report the last row: its test labels had no part in choosing the model.")
        print()


def _chosen(results: dict[str, Any]) -> list[str]:
    """Say which features are used, if they are not the run's."""
    name = results["features"]
    if name == RUN_FEATURES:
        return []
    row = results["comparison"]["accuracy"][name]
    return [
        f"Predictions use {name}, not {RUN_FEATURES}: {row['ahead']:.1f} points better on these labels.",
        f"That is clearly better (p = {row['p']:.1g}, limit {SIGNIFICANCE}): "
        f"{row['only']:,} labels are right only with {name}, {row['run_only']:,} only with {RUN_FEATURES}.",
    ]


def _gain(results: dict[str, Any]) -> str:
    comparison, chosen = results["comparison"], results["features"] != RUN_FEATURES
    gain = training_gain(comparison)
    points = f"{round(gain, 1) or 0.0:+.1f} points"
    if START in comparison["accuracy"]:
        text = f"Gain from training: {points} compared with the better baseline."
    else:  # a run that was not trained
        text = f"Gain from the encoder: {points} compared with raw pixels."
    error = max((row["ahead"], row["error"]) for row in comparison["accuracy"].values() if "ahead" in row)[1]
    return text if chosen or abs(gain) > 2 * error else f"{text} These are too few labels to be sure."


def _show_classes(results: dict[str, Any]) -> None:
    tested = results["held_out"]["per_class"] if results["held_out"] else {}
    order = sorted(results["classes"], key=lambda c: tested[c]["accuracy"] if c in tested else 101)
    listed, rows = set(order[:MAX_CLASSES_SHOWN]), []
    for c, count in results["classes"].items():
        if c in listed:
            accuracy = f"{tested[c]['accuracy']:.0f}%" if c in tested else "-"
            rows.append((c, str(count), accuracy, str(results["predicted"]["by_class"].get(c, 0))))
    columns = 4 if results["predicted"]["images"] else 3  # none is predicted if every image has a label
    print_table(("class", "labels", "held-out accuracy", "predicted images")[:columns], [row[:columns] for row in rows])
    if len(order) > len(rows):
        best = all(c in tested for c in order)  # then the table shows those with the lowest accuracy
        print(f"... and {len(order) - len(rows)} more classes{' with higher accuracy' * best}")
    print()


def _show_curve(points: list[dict[str, Any]]) -> None:
    if not points:
        return
    rows = [(str(point["labels_per_class"]), *_cells(point)) for point in points]
    print_table(("labels per class", "accuracy", "5th to 95th percentile"), rows)
    if "gain" in points[-1]:
        before, last = points[-2], points[-1]
        print(
            f"{last['labels_per_class']} labels per class instead of {before['labels_per_class']}: "
            f"{last['gain']:+.1f} points (95% interval {last['gain_low']:+.1f} to {last['gain_high']:+.1f}). "
            f"{_outlook(last)}"
        )
    print()


def _outlook(last: dict[str, Any]) -> str:
    if last["gain_low"] > 0:
        return "More labels should help."
    if last["gain_high"] < SMALL_GAIN:
        return "More labels may help little."
    return "These are too few labels to say whether more will help."


def _mistakes(held: dict[str, Any] | None) -> list[str]:
    lines = []
    if held and held["confusions"]:
        pairs = [f"{c['label']!r} as {c['taken_for']!r} ({c['images']})" for c in held["confusions"][:3]]
        lines.append(f"Most frequent mistakes: {', '.join(pairs)}.")
    if held and held["doubtful"]:
        doubtful = [f"{d['file']} ({d['label']!r}, predicted {d['predicted']!r})" for d in held["doubtful"][:3]]
        lines.append(f"Labels to check: {', '.join(doubtful)}")
    return lines


def _predictions(summary: dict[str, Any], which: str, calibrated: bool) -> list[str]:
    if not summary["images"]:
        return []
    images = plural(summary["images"], f"{which} image")
    if not calibrated:  # then numbers of confident predictions would only mislead
        return [f"Predicted labels for {images}."]
    return [
        f"Predicted labels for {images}, {summary['sure']:,} with a confidence of {CONFIDENT} or more. "
        f"Confidences average {summary['mean_confidence']:.1f}%."
    ]


def _calibration(results: dict[str, Any]) -> list[str]:
    held, labels_per_class = results["held_out"], results["labeled"] / len(results["classes"])
    if not held:
        return ["Use the confidence to rank predictions; it is not calibrated."]
    lines = [
        f"On held-out labels, confidences average {held['mean_confidence']:.1f}%, and {held['right']:.1f}% are right."
    ]
    if labels_per_class < FEW_TO_CALIBRATE:
        lines.append(
            f"With fewer than {FEW_TO_CALIBRATE} labels per class, the average confidence can be 20 points too high or "
            "too low. Use it to rank predictions."
        )
    return lines


def _cells(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['accuracy']:.1f}%", f"{row['low']:.1f} to {row['high']:.1f}"
