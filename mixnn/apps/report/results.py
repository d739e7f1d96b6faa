"""The outcome of a run: accuracies with the protocols behind them, curves, and whether runs can be compared."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mixnn import diagnostics
from mixnn.apps.report.run_data import RunData
from mixnn.apps.report.settings import as_text, code_version
from mixnn.apps.report.verdict import is_number
from mixnn.evaluation.evaluate import PROTOCOLS
from mixnn.evaluation.knn import KNN
from mixnn.progress import plural
from mixnn.training.judgement import NUMBERS

NOT_CURVES = ("epoch", "step", "seconds", "knn_k")
RUN_SETTINGS = ("checkpoint_step", "trained_epochs", "train_seed")  # in a protocol: about the run, not the measurement

# Logged numbers that are not diagnostics.
MEANINGS = {
    "loss": "the method's loss, mean over the steps of an epoch",
    "knn": "accuracy in %: test images classified by the weighted vote of their k nearest training images",
    "images_per_s": "training images per second",
} | diagnostics.NAMES
PANELS = (
    ("Is it learning?", ("loss", "knn", "purity", "accuracy")),
    (
        "Which neighbors does it use?",
        (
            *("purity_k", "inconsistency", "d_neighbors", "cos_neighbors"),
            *("cas_entropy", "cas_entropy_0.1", "own_image", "norm_ratio"),
        ),
    ),
    ("Does it collapse?", ("spread", "rank", "d_positive")),
    ("Speed", ("images_per_s",)),
)
PURITY_BY_RANK = re.compile(r"purity_(cas_)?(\d+)")


# Accuracies


def accuracies(data: RunData) -> list[dict[str, Any]]:
    """Every accuracy in percent, with the settings of the protocol behind it."""
    rows = []
    for name, protocol in PROTOCOLS.items():
        result = data.results.get(name, {})
        for number, label in protocol.numbers.items():
            if is_number(result.get(number)):
                settings = protocol.settings(result, number)
                rows.append(_row(f"{name}.{number}", label, result[number], settings))
    return rows + _knn_during_training(data)


def _knn_during_training(data: RunData) -> list[dict[str, Any]]:
    """The last and the best of the accuracies that were logged during training."""
    logged = [record for record in data.metrics if is_number(record.get("knn"))]
    if not logged:
        return []
    rows = []
    for number, label, record in (
        ("last", "kNN during training, last", logged[-1]),
        ("best", "kNN during training, best, chosen by the test images", max(logged, key=lambda r: r["knn"])),
    ):
        settings = {"k": record.get("knn_k", "not recorded"), "temperature": 0.1, "vote": "weighted"}
        settings["report"] = f"{number} of {plural(len(logged), 'evaluation')}, epoch {record['epoch']}"
        rows.append(_row(f"training.{number}", label, record["knn"], settings) | {"epoch": record["epoch"]})
    return rows


def _row(key: str, label: str, value: float, settings: Mapping[str, Any]) -> dict[str, Any]:
    protocol = {name.replace("_", " "): as_text(v) for name, v in settings.items()}
    return {"key": key, "label": label, "value": value, "protocol": protocol}


def headlines(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One number per protocol; the last kNN accuracy during training stands in for a missing evaluation."""
    by_key = {row["key"]: row for row in rows}
    found = []
    for name, protocol in PROTOCOLS.items():
        row, label = by_key.get(f"{name}.{protocol.headline}"), protocol.numbers[protocol.headline]
        if row is None and name == KNN.name and (row := by_key.get("training.last")):
            label = f"kNN during training, epoch {row['epoch']}"
        if row is not None:
            found.append({"label": label, "value": row["value"]})
    return found


def other_results(data: RunData) -> dict[str, str]:
    """The entries of results.json that no known protocol wrote, as JSON text."""
    known = {*PROTOCOLS, "evaluated_with"}
    return {k: json.dumps(v, indent=1, ensure_ascii=False) for k, v in data.results.items() if k not in known}


# Judgement without labels


def judgement(data: RunData) -> dict[str, Any]:
    """The numbers that were measured without labels, at the start and later; empty if there are none."""
    if not data.judgement:
        return {}
    checks = [data.judgement["start"], *data.judgement["points"]]
    rows = [
        {"name": name, "meaning": meaning, "values": [_judged_number(name, check[name]) for check in checks]}
        for name, meaning in NUMBERS.items()
    ]
    found = [", ".join(check.get("problems", [])) or "none" for check in checks[1:]]
    rows.append({"name": "problems", "meaning": "what was found wrong", "values": ["", *found]})
    return {"columns": ["start", *(f"{check['progress']:.0%} of the run" for check in checks[1:])], "rows": rows}


def _judged_number(name: str, value: float) -> str:
    return f"{value:.1f}" if name == "feature_rank" else f"{value:.0%}"


# Curves


def curves(data: RunData) -> dict[str, Any]:
    """Epochs, and the logged numbers by name: five digits, null where there is none."""
    names = dict.fromkeys(name for record in data.metrics for name, value in record.items() if is_number(value))
    return {
        "epochs": [record["epoch"] for record in data.metrics],
        "values": {name: [_rounded(r.get(name)) for r in data.metrics] for name in names if name not in NOT_CURVES},
    }


def _rounded(value: Any) -> float | None:
    return float(f"{value:.5g}") if is_number(value) else None


def panels(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """The curves of these runs in groups, with what each means; `purity_k` stands for the curves by rank."""
    names = dict.fromkeys(name for data in runs for name in curves(data)["values"])
    by_rank = any(PURITY_BY_RANK.fullmatch(name) for name in names)
    single = [name for name in names if not PURITY_BY_RANK.fullmatch(name)] + ["purity_k"] * by_rank
    known = {name for _, group in PANELS for name in group}
    groups = [(title, [name for name in group if name in single]) for title, group in PANELS]
    groups.append(("Other", [name for name in single if name not in known]))
    return [
        {"title": title, "panels": [{"name": name, "meaning": MEANINGS.get(name, "")} for name in group]}
        for title, group in groups
        if group
    ]


# Comparability


def comparison_warnings(runs: Sequence[RunData], letters: Sequence[str]) -> list[str]:
    """Reasons why the accuracies of these runs may not be comparable, one sentence each."""
    if len(runs) < 2:
        return []
    by_letter = dict(zip(letters, runs, strict=True))
    found = []
    trained_on = {letter: data.config.data for letter, data in by_letter.items()}
    if len(set(trained_on.values())) > 1:
        found.append(f"The runs were trained on different data ({_grouped(trained_on)}): do not compare accuracies.")
    for name, protocol in PROTOCOLS.items():
        results = {letter: data.results[name] for letter, data in by_letter.items() if name in data.results}
        settings = {letter: result.get("protocol", {}) for letter, result in results.items()}
        unequal = [f"{key.replace('_', ' ')} ({_grouped(values)})" for key, values in _unequal(settings).items()]
        if unequal:
            found.append(f"{protocol.label}: the runs were evaluated with different settings: {', '.join(unequal)}.")
        if results and len(results) < len(runs):
            found.append(f"{protocol.label}: evaluated for {' and '.join(results)} only.")
    ks = {
        letter: str(next(record["knn_k"] for record in data.metrics if is_number(record.get("knn_k"))))
        for letter, data in by_letter.items()
        if any(is_number(record.get("knn_k")) for record in data.metrics)
    }
    if len(set(ks.values())) > 1:
        found.append(f"kNN during training used different k ({_grouped(ks)}).")
    versions = {
        letter: code_version(data.results["evaluated_with"])
        for letter, data in by_letter.items()
        if "evaluated_with" in data.results
    }
    if len(set(versions.values())) > 1:
        found.append(f"The runs were evaluated with different code ({_grouped(versions)}).")
    return found


def _unequal(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Settings of the protocol that differ between runs: {name: {letter: value}}."""
    names = dict.fromkeys(name for of_run in settings.values() for name in of_run if name not in RUN_SETTINGS)
    values = {
        name: {letter: as_text(s[name]) if name in s else "not recorded" for letter, s in settings.items()}
        for name in names
    }
    return {name: of_letter for name, of_letter in values.items() if len(set(of_letter.values())) > 1}


def _grouped(values: Mapping[str, str]) -> str:
    """Letters by value: "A, B: 64; C: 12"."""
    letters: dict[str, list[str]] = {}
    for letter, value in values.items():
        letters.setdefault(value, []).append(letter)
    return "; ".join(f"{', '.join(those)}: {value}" for value, those in letters.items())
