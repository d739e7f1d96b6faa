"""From embeddings and labels to a classifier, with all that tells how far to trust it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from mixnn.apps.classify.choosing import Candidate, HeldOut, Task, choose, held_out, num_folds, wilson
from mixnn.apps.classify.curve import DRAWS, curve
from mixnn.apps.classify.models import Classifier, Frame, one_thread, settings
from mixnn.apps.embed import Embeddings
from mixnn.data.folder import natural_key
from mixnn.progress import Reporter

SURE = 0.9  # confidence from which on a prediction counts as sure, and a label that contradicts it as doubtful
# Held-out predictions share training images, so they tell less than as many independent ones. Counted in full, 95%
# intervals held the accuracy on fresh data in 89 to 94% of simulated sets; counted at 0.7, in 94 to 97% (nearest
# neighbors, 15 to 120 labels, 150 to 200 sets each; logistic regression from 15 labels: 25 of 30 either way).
WORTH = 0.7
LISTED = 20  # confusions and doubtful labels in the results


class Learned(NamedTuple):
    classifier: Classifier
    probabilities: np.ndarray  # (M, Y), of all images
    results: dict[str, Any]  # ready for JSON; accuracies in percent


@one_thread()
def learn(
    embeddings: Embeddings,
    given: dict[str, str],
    *,
    model: str = "auto",
    seed: int = 0,
    suggested: Collection[str] = (),
    draws: int = DRAWS,
    reporter: Reporter | None = None,
) -> Learned:
    """Choose and fit on all labels; accuracy from labels held out, and how it grew with their number.

    `suggested`: images that were picked for labelling, and so tell less about the others.
    """
    reporter = reporter or Reporter(quiet=True)
    rows, task = labelled(embeddings, given)
    y, classes, options = task.y, task.classes, settings(model)
    with reporter.bar("cross-validation", num_folds(len(y))) as advance:
        held = held_out(task, options, np.random.default_rng([seed, 0]), advance)
    with reporter.bar("fewer labels, draws", draws) as advance:
        points = curve(task, options, seed, draws, advance)
    best = choose(task, options, np.random.default_rng([seed, 1]))[0]
    classifier = task.train(best.setting, best.temperature)
    probabilities = classifier.probabilities(embeddings.vectors)
    names = [embeddings.names[i] for i in rows]
    results = {
        "images": len(embeddings),
        "labelled": len(y),
        "classes": {c: int(count) for c, count in zip(classes, np.bincount(y), strict=True)},
        "classifier": _about(best),
        "held_out": _trust(held, task, names) if held else None,
        "notes": _notes(held, task, _picked(embeddings.names, names, suggested)),
        "curve": points,
        "predicted": tally(np.delete(probabilities, rows, axis=0), classes),
    }
    return Learned(classifier, probabilities, results)


def labelled(embeddings: Embeddings, given: dict[str, str]) -> tuple[np.ndarray, Task]:
    """The rows that have a label, and what is to be learned from them."""
    rows = np.array([i for i, name in enumerate(embeddings.names) if name in given])
    texts = [given[embeddings.names[i]] for i in rows]
    classes = tuple(sorted(set(texts), key=natural_key))
    number = {label: i for i, label in enumerate(classes)}
    y = np.array([number[text] for text in texts])
    return rows, Task(embeddings.vectors[rows], y, classes, Frame.of(embeddings.vectors))


@one_thread()
def held_out_share(embeddings: Embeddings, given: dict[str, str], *, model: str, seed: int) -> dict[str, float]:
    """Accuracy with its interval and nothing else, on the folds of `learn` with this seed."""
    task = labelled(embeddings, given)[1]
    held = held_out(task, settings(model), np.random.default_rng([seed, 0]))
    assert held, "asked only where labels can be held out"
    return _share(int((held.best.argmax(1) == task.y[held.rows]).sum()), len(held.rows))


def tally(probabilities: np.ndarray, classes: Sequence[str]) -> dict[str, Any]:
    """How many images were predicted, how many with confidence, and as what."""
    counts = np.bincount(probabilities.argmax(1), minlength=len(classes))
    return {
        "images": len(probabilities),
        "sure": int((probabilities.max(1, initial=0) >= SURE).sum()),
        "mean_confidence": percent(probabilities.max(1).mean()) if len(probabilities) else None,
        "by_class": {c: int(count) for c, count in zip(classes, counts, strict=True)},
    }


def _about(best: Candidate) -> dict[str, Any]:
    tried = not math.isnan(best.loss)
    return {
        "model": best.setting.model,
        "setting": str(best.setting),
        "space": best.setting.space,
        "strength": best.setting.strength,
        "temperature": round(best.temperature, 4),
        "cv_accuracy": percent(best.accuracy) if tried else None,  # of the best of many: a little high
        "cv_log_loss": round(best.loss, 4) if tried else None,
    }


def _picked(names: Sequence[str], labelled: Sequence[str], suggested: Collection[str]) -> int:
    """How many of the labelled images had been suggested; 0 where chance would have it so."""
    picked = len(set(suggested) & set(labelled))
    by_chance = len(labelled) * len(set(suggested) & set(names)) / len(names)
    return picked if picked > by_chance + 2 * math.sqrt(by_chance) else 0


def _notes(held: HeldOut | None, task: Task, picked: int) -> list[str]:
    """What the labels do not allow to say."""
    if not held:
        return [
            "how accurate this is cannot be told yet, and its confidence is a guess: holding labels out takes two of "
            "each class; label more images, or look through the predictions"
        ]
    single = [c for c, count in zip(task.classes, np.bincount(task.y), strict=True) if count == 1]
    shown = ", ".join(repr(c) for c in single[:5]) + (f" and {len(single) - 5} more" if len(single) > 5 else "")
    notes = [f"one label only: {shown}; trained on, but never tested"] if single else []
    if picked:
        notes.append(
            f"{picked:,} of the {len(task.y):,} labelled images {'was' if picked == 1 else 'were'} suggested, "
            "which is no random sample: "
            "accuracy on the other images may be far from that held out, either way"
        )
    return notes


def _trust(held: HeldOut, task: Task, names: Sequence[str]) -> dict[str, Any]:
    """Accuracy with its interval, and where it fails."""
    y, guess, confidence = task.y[held.rows], held.best.argmax(1), held.best.max(1)
    counts, right = np.bincount(y, minlength=len(task.classes)), np.bincount(y[guess == y], minlength=len(task.classes))
    tested = np.flatnonzero(counts)
    wrong = Counter(zip(y[guess != y].tolist(), guess[guess != y].tolist(), strict=True)).most_common(LISTED)
    doubtful = [i for i in np.argsort(-confidence, kind="stable") if guess[i] != y[i] and confidence[i] >= SURE]
    return {
        "images": len(y),
        **_share(int(right.sum()), len(y)),
        "balanced_accuracy": percent(float((right[tested] / counts[tested]).mean())),
        "mean_confidence": percent(float(confidence.mean())),
        "commonest": task.classes[int(counts.argmax())],
        "commonest_share": percent(counts.max() / len(y)),
        "models": {m: _share(int((p.argmax(1) == y).sum()), len(y)) for m, p in held.models.items()},
        "per_class": {
            task.classes[c]: {"images": int(counts[c]), "accuracy": percent(right[c] / counts[c])} for c in tested
        },
        "confusions": [
            {"label": task.classes[a], "taken_for": task.classes[b], "images": count} for (a, b), count in wrong
        ],
        "doubtful": [
            {
                "file": names[held.rows[i]],
                "label": task.classes[y[i]],
                "predicted": task.classes[guess[i]],
                "confidence": round(float(confidence[i]), 4),
            }
            for i in doubtful[:LISTED]
        ],
    }


def _share(right: int, count: int) -> dict[str, float]:
    low, high = wilson(WORTH * right, WORTH * count)
    return {"accuracy": percent(right / count), "low": percent(low), "high": percent(high)}


def percent(share: float) -> float:
    """To six digits: what is shown is rounded again, and must not be rounded twice where that would show."""
    return round(100 * float(share), 6)
