"""What to do next to get better predictions, from the results of `classify` and the state of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mixnn.apps.report.verdict import FAILURES, TITLES
from mixnn.config import setting

FEW = 5  # labels of a class below which it may be called rare
RARE = 5  # times fewer labels than the commonest class
LISTED = 5  # classes and files named in a sentence
UNTRAINED = ("untrained", "start")  # verdicts on a run without training
MANY_DOUBTFUL = 0.05  # share of the labels that contradict confident predictions


def advise(results: Mapping[str, Any], state: str = "") -> list[str]:
    """Sentences that each fit a cause, the most urgent first; `state` is the report's verdict on the run."""
    held = results["held_out"]
    if not held:
        return []
    advice = [*_check_labels(results), *_train(results, state), *_label_rare_classes(results["classes"])]
    curve = results["curve"]
    if curve and curve[-1].get("gain_low", 0) > 0:
        advice.append(f"Label more images: accuracy rises with their number. {setting('suggest', 20)} picks them.")
    return advice


def training_gain(comparison: Mapping[str, Any]) -> float:
    """Accuracy of the run less that of the better baseline, in points."""
    return -max(row["ahead"] for row in comparison["accuracy"].values() if "ahead" in row)


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


def _train(results: Mapping[str, Any], state: str) -> list[str]:
    """What to do about an encoder that is no better than the baselines, or was not trained on these images."""
    if "comparison" not in results or (state != "start" and training_gain(results["comparison"]) > 0):
        return []
    if state in FAILURES:
        return [
            f"Train again with another start or other settings: the run's verdict is {TITLES[state].lower()!r}. "
            "Training it for longer will not help."
        ]
    if state in UNTRAINED:
        return ["Train the encoder on these images with `mixnn pretrain`: so far it has not seen them."]
    return ["Train on more images, for longer, or from another start: so far the training does not help here."]


def _label_rare_classes(counts: Mapping[str, int]) -> list[str]:
    few = min(FEW - 1, max(counts.values()) // RARE)
    rare = [f"{c!r} ({counts[c]})" for c in sorted(counts, key=lambda c: counts[c]) if counts[c] <= few]
    return [f"Label more images of the rare classes: {_listed(rare, ', ')}."] if rare else []


def _listed(texts: list[str], separator: str) -> str:
    more = f" and {len(texts) - LISTED} more" if len(texts) > LISTED else ""
    return separator.join(texts[:LISTED]) + more
