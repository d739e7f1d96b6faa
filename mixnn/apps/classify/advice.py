"""What to do next to get better predictions, from the results of `classify` and the state of the run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mixnn.apps.classify.features import RUN, START
from mixnn.apps.report.verdict import FAILURES, TITLES
from mixnn.config import calling, setting

RARE_LABELS = 5  # a class with fewer labels may be called rare
RARE_RATIO = 5  # if it also has this many times fewer than the most common class
LISTED = 5  # classes and files named in a sentence
MANY_DOUBTFUL = 0.05  # share of the labels that contradict confident predictions
ENOUGH, NO_BETTER = 20, 5.0  # labels that were tested, and points above guessing, below which labels may be wrong
LOW_ACCURACY = 70.0  # percent, below which training an encoder that came as it is may help
FEW_LABELS = 10  # per class, below which more labels help a healthy encoder more than anything else
HEALTHY = ("judged", "start")  # verdicts on encoders whose training is not the cause of errors
NOT_LONGER = (*FAILURES, "worse")  # verdicts on runs that training for longer does not improve
KEPT = ("kept_start", "kept_earlier")  # verdicts on runs that ended worse than they began


def advise(results: Mapping[str, Any], state: str = "", folder: str = "", start: str = "") -> list[str]:
    """Sentences of advice, one per cause, the most urgent first.

    state: the report's verdict on the run. folder: the images to train on, if the run has not been trained. start: what
    to give to a command instead of a run, to use the encoder before its training; empty if that is not possible.
    """
    spelling = _spell_alike(results["classes"])
    if not results["held_out"]:
        return spelling
    advice = [*spelling, *_check_sense(results["held_out"]), *_check_labels(results)]
    advice += [*_train(results, state, folder), *_use_start(results, start)]
    return [*advice, *_label_rare_classes(results), *_label_more(results, state)]


def training_gain(comparison: Mapping[str, Any]) -> float:
    """Accuracy of the run less that of the better baseline, in points."""
    return -max(row["ahead"] for row in comparison["accuracy"].values() if "ahead" in row)


def _spell_alike(classes: Iterable[str]) -> list[str]:
    """Classes whose names differ only in case, spaces, hyphens or underscores."""
    by_letters: dict[str, list[str]] = {}
    for name in classes:
        by_letters.setdefault(re.sub(r"[\s_-]", "", name.casefold()) or name, []).append(name)
    alike = [" and ".join(map(repr, names)) for names in by_letters.values() if len(names) > 1]
    return [f"Spell these classes alike if they are the same: {_listed(alike, '; ')}."] if alike else []


def _check_sense(held: Mapping[str, Any]) -> list[str]:
    """A doubt about labels that are predicted hardly better than by guessing, all classes counting the same."""
    guessing = 100 / max(1, len(held["per_class"]))
    if held["images"] < ENOUGH or held["balanced_accuracy"] >= guessing + NO_BETTER:
        return []
    return ["Check that labels and files belong together: predictions are hardly better than guessing."]


def _check_labels(results: Mapping[str, Any]) -> list[str]:
    """Copies of one image with different labels, and labels that many confident predictions contradict."""
    copies = results.get("comparison", {}).get("contradictions", [])
    doubtful = results["held_out"]["doubtful"]
    advice = []
    if copies:
        pairs = [f"{c['file']} ({c['label']!r}) and {c['copy']} ({c['copy_label']!r})" for c in copies]
        advice.append(f"Check these labels, the images look the same: {_listed(pairs, '; ')}.")
    if len(doubtful) > MANY_DOUBTFUL * results["held_out"]["images"]:
        share = f"{len(doubtful)} of {results['held_out']['images']}"
        advice.append(f"Check your labels: {share} contradict a confident prediction.")
    return advice


def _train(results: Mapping[str, Any], state: str, folder: str) -> list[str]:
    """Advice on an encoder that is no better than the baselines, or that has not been trained."""
    if "comparison" not in results:
        return []
    ahead = training_gain(results["comparison"]) > 0
    if state == "start" and not (ahead and results["held_out"]["accuracy"] >= LOW_ACCURACY):
        command = f"`{calling('pretrain', folder or 'FOLDER', time_budget='10m')}`"
        return [f"Train the encoder on these images, which may help: {command}. So far it is used as it comes."]
    if ahead or state in HEALTHY:
        return []
    if state in KEPT:
        return ["Label more images rather than train again: training on these images did not improve the encoder."]
    if state in NOT_LONGER:
        return [
            f"Train again with another start or other settings: the run's verdict is {TITLES[state].lower()!r}. "
            "Training it for longer will not help."
        ]
    if state == "untrained":
        return [f"Train the encoder: {RUN} has not been trained."]
    return ["Train on more images, for longer, or from another start: so far the training does not help here."]


def _use_start(results: Mapping[str, Any], start: str) -> list[str]:
    """Advice to use the encoder before training elsewhere too, if the predictions use it because it is better."""
    if results.get("features") != START or not start:
        return []
    return [f"Use the encoder before training for other commands as well, as in `{calling('explore', start)}`."]


def _label_more(results: Mapping[str, Any], state: str) -> list[str]:
    """Advice to label more, if accuracy rises with the labels, or if labels are few and the encoder is fine."""
    curve, counts = results["curve"], results["classes"]
    if not results["predicted"]["images"]:  # every image has a label
        rises = bool(curve) and curve[-1].get("gain_low", 0) > 0
        return ["Add images with labels: accuracy rises with their number."] if rises else []
    picks = f"{setting('suggest', 20)} picks them."
    if curve and curve[-1].get("gain_low", 0) > 0:
        return [f"Label more images: accuracy rises with their number. {picks}"]
    if state in HEALTHY and sum(counts.values()) < FEW_LABELS * len(counts):
        return [f"Label more images: {sum(counts.values())} labels are few for {len(counts)} classes. {picks}"]
    return []


def _label_rare_classes(results: Mapping[str, Any]) -> list[str]:
    counts, verb = results["classes"], "Label more" if results["predicted"]["images"] else "Add"
    few = min(RARE_LABELS - 1, max(counts.values()) // RARE_RATIO)
    rare = [f"{c!r} ({counts[c]})" for c in sorted(counts, key=lambda c: counts[c]) if counts[c] <= few]
    return [f"{verb} images of the rare classes: {_listed(rare, ', ')}."] if rare else []


def _listed(texts: list[str], separator: str) -> str:
    more = f" and {len(texts) - LISTED} more" if len(texts) > LISTED else ""
    return separator.join(texts[:LISTED]) + more
