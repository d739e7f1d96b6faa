"""classify: from embeddings and a few labels to a label for every image; and which images to label next."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np

from mixnn.apps.classify import saving, suggesting, tables
from mixnn.apps.classify.learning import Learned, learn, tally
from mixnn.apps.classify.models import MODELS
from mixnn.apps.classify.without import without_training
from mixnn.apps.classify.words import show as show_classify
from mixnn.apps.embed import Embeddings, collect
from mixnn.config import RUN, DataDir, Device, Param, UserError, setting, verb
from mixnn.files import check_free
from mixnn.progress import Reporter
from mixnn.runs import Run

__all__ = ["classify", "show_classify"]

COMPARED = 2000  # labels up to which raw pixels and the untrained network are tried too; more would take minutes


@verb
def classify(
    run: Annotated[str | Path | Run, RUN],
    labels: Annotated[str | Path, Param("CSV of file,label; or the word folders, where subfolders are classes")] = "",
    *,
    source: Annotated[str | Path, Param("the labelled images [what the run was trained on]", metavar="FOLDER")] = "",
    new_images: Annotated[
        str | Path,
        Param(
            "images to classify with this classifier, or with the one saved before", flag="--apply", metavar="FOLDER"
        ),
    ] = "",
    suggest: Annotated[int, Param("how many images to name that are most worth labelling", low=0, high=2**32 - 1)] = 0,
    out: Annotated[str | Path, Param("where all files go [RUN/classifier]", metavar="FOLDER")] = "",
    model: Annotated[str, Param("kind of classifier [auto: by cross-validation]", choices=("auto", *MODELS))] = "auto",
    seed: Annotated[int, Param("seed of the folds and of the suggestions", low=0, high=2**32 - 1)] = 0,
    device: Device = "auto",
    data_dir: DataDir = "",
    overwrite: Annotated[bool, Param("replace the files in the output folder")] = False,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Label all images from a CSV of file,label, and say how far to trust it; accuracies are in percent.

    `labels`: a CSV, or "folders" where subfolders are classes; names are relative to `source`, by default what the run
    was trained on. `new_images`: a folder for the classifier just made, or made earlier. `suggest`: how many images to
    name that are most worth labelling, with or without labels. All files go to `out`, by default RUN/classifier.

    Examples:
        mixnn classify runs/photos labels.csv
        mixnn classify runs/photos --suggest 20
        mixnn classify runs/photos --apply ./new
    """
    reporter, run = reporter or Reporter(), run if isinstance(run, Run) else Run.open(run)
    folder = Path(out).expanduser() if str(out) else run.path / "classifier"
    _check(labels, source, new_images, suggest, folder)
    if str(out):
        for file in (saving.FILE, tables.PREDICTIONS) if str(labels) else ():
            check_free(folder / file, overwrite)
        if str(new_images):
            check_free(folder / _applied(new_images), overwrite)
    tables.ever_suggested(folder)  # refused, if it is another's file
    where: dict[str, Any] = {"device": device, "data_dir": str(data_dir), "reporter": reporter}
    found: dict[str, Any] = {"run": str(run.path), "seed": seed, "files": {}}
    if str(labels) or suggest:
        embeddings = _finite(collect(run, source, **where))
        given: dict[str, str] = {}
        if str(labels):
            place = Path(source or run.config.data).expanduser()
            given, unreadable = tables.read_labels(labels, embeddings, place)
            for name in unreadable:
                reporter.warn(f"{name} has a label but cannot be read")
        if suggest and len(given) == len(embeddings):
            raise UserError(f"every image has a label, so there is none to suggest: leave out {setting('suggest')}")
        learned = None
        if given:
            learned, files = _train(run, embeddings, given, folder, model, seed, reporter)
            found = found | learned.results | {"files": files}
            if learned.results["held_out"] and len(given) <= COMPARED:
                found["without"] = without_training(run, source, given, model, seed, **where)
        if suggest:
            found |= suggest_next(embeddings, given, suggest, seed, learned.probabilities if learned else None)
            template = tables.write_suggestions(folder, found["suggested"], given, labels)
            found["files"]["suggestions"] = str(template)
    if str(new_images):
        found["applied"], found["files"]["applied"] = _apply(run, new_images, folder, where)
    return found


def _train(
    run: Run, embeddings: Embeddings, given: dict[str, str], folder: Path, model: str, seed: int, reporter: Reporter
) -> tuple[Learned, dict[str, str]]:
    """The classifier with its results, saved, and predictions for all images; and where these are."""
    before = tables.ever_suggested(folder)
    learned = learn(embeddings, given, model=model, seed=seed, suggested=before, reporter=reporter)
    saved, table = folder / saving.FILE, folder / tables.PREDICTIONS
    saving.save(saved, learned.classifier, saving.identity(run, reporter), {"results": learned.results})
    tables.write_predictions(table, embeddings.names, learned.classifier.classes, learned.probabilities, given)
    return learned, {"predictions": str(table), "classifier": str(saved)}


def suggest_next(
    embeddings: Embeddings, given: dict[str, str], count: int, seed: int, probabilities: np.ndarray | None
) -> dict[str, Any]:
    """Names of images worth labelling, the most telling first, and by what they were picked."""
    x = embeddings.unit()
    labelled = np.array([i for i, name in enumerate(embeddings.names) if name in given], int)
    few = len(given) < suggesting.FEW * len(set(given.values()))
    if probabilities is None or few:
        rows, by = suggesting.typical(x, labelled, count, seed), "typical"
    else:
        rows, by = suggesting.uncertain(x, labelled, probabilities, count, seed), "uncertain"
    return {"suggested": [embeddings.names[i] for i in rows], "suggested_by": by}


def _apply(run: Run, new_images: str | Path, folder: Path, where: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Predictions for other images by the classifier in the folder or, failing that, in the run's own."""
    places = [folder / saving.FILE, run.path / "classifier" / saving.FILE]
    saved = next((path for path in places if path.is_file()), None)
    if saved is None:
        raise UserError(f"there is no {places[0]}: classify with a CSV of labels first, which makes it")
    classifier, about = saving.load(saved)
    saving.check_encoder(saved, about, saving.identity(run, where["reporter"]))
    embeddings = _finite(collect(run, new_images, **where))
    probabilities = classifier.probabilities(embeddings.vectors)
    table = folder / _applied(new_images)
    tables.write_predictions(table, embeddings.names, classifier.classes, probabilities, {})
    return tally(probabilities, classifier.classes), str(table)


def _applied(new_images: str | Path) -> str:
    """The file of the predictions for other images."""
    place = Path(new_images).expanduser().resolve()
    return f"predictions-{place.stem if place.is_file() else place.name}.csv"


def _check(labels: str | Path, source: str | Path, new_images: str | Path, suggest: int, folder: Path) -> None:
    """What can be refused before anything is read."""
    if not (str(labels) or str(new_images) or suggest):
        raise UserError(
            f"classify needs labels (a CSV of file,label), {setting('suggest')} (how many images to name that are "
            f"worth labelling), or {setting('new_images')} (new images, for a classifier made before)"
        )
    if str(new_images) and str(source) and not (str(labels) or suggest):
        alone = f"new images need {setting('new_images')} alone"
        raise UserError(f"{setting('source')} is where the labelled images lie: {alone}")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give the name of a folder as {setting('out')}")
    if str(labels) and Path(labels).resolve() == (folder / tables.PREDICTIONS).resolve():
        raise UserError(f"{labels} would be overwritten by the predictions: copy it to a file of its own")


def _finite(embeddings: Embeddings) -> Embeddings:
    if not np.isfinite(embeddings.vectors).all():
        raise UserError("some embeddings are not numbers: the run has diverged; train it with a smaller lr")
    return embeddings
