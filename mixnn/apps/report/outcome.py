"""What came out of a run: accuracies, each with the protocol that made it, and curves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mixnn.apps.report.facts import Facts, text
from mixnn.apps.report.verdict import is_number
from mixnn.progress import plural

NOT_CURVES = ("epoch", "step", "seconds", "knn_k")
RESULTS = (  # (of which result, key of its number, name)
    ("linear", "last", "Linear probe, last epoch"),
    ("linear", "best", "Linear probe, best epoch, chosen by the test images"),
    ("knn", "weighted", "kNN, weighted vote"),
    ("knn", "majority", "kNN, majority vote"),
)


def results(facts: Facts) -> list[dict[str, Any]]:
    """Every accuracy in percent, with the protocol that made it."""
    rows = []
    for kind, key, label in RESULTS:
        result = facts.results.get(kind, {})
        if is_number(result.get(key)):
            protocol = _protocol(result, key)
            rows.append({"key": f"{kind}.{key}", "label": label, "value": result[key], "protocol": _words(protocol)})
    readings = [r for r in facts.records if is_number(r.get("knn"))]
    if readings:
        best, last = max(readings, key=lambda r: r["knn"]), readings[-1]
        for key, label, record in (
            ("last", "kNN read during training, last reading", last),
            ("best", "kNN read during training, best reading, chosen by the test images", best),
        ):
            protocol = {"k": record.get("knn_k", "not recorded"), "temperature": 0.1, "vote": "weighted"}
            protocol |= {"report": f"{key} of {plural(len(readings), 'reading')}, epoch {record['epoch']}"}
            row = {"key": f"reading.{key}", "label": label, "value": record["knn"], "protocol": _words(protocol)}
            rows.append(row | {"epoch": record["epoch"]})
    return rows


def _protocol(result: Mapping[str, Any], key: str) -> dict[str, Any]:
    """What of a result's protocol made this one of its numbers."""
    protocol = dict(result.get("protocol", {}))
    if key == "last":
        protocol["report"] = "last epoch"
    elif key == "best":
        protocol["report"] = f"best epoch, {result.get('best_epoch', 'not recorded')}"
    elif key == "weighted":
        protocol["vote"] = "weighted by exp(cos / temperature)"
    elif key == "majority":
        protocol["vote"] = "majority"
        protocol.pop("temperature", None)
    return protocol


def _words(protocol: Mapping[str, Any]) -> dict[str, str]:
    return {name.replace("_", " "): text(value) for name, value in protocol.items()}


def others(facts: Facts) -> dict[str, str]:
    """What else results.json holds, as text."""
    known = {"linear", "knn", "evaluated_with"}
    return {k: json.dumps(v, indent=1, ensure_ascii=False) for k, v in facts.results.items() if k not in known}


def curves(facts: Facts) -> dict[str, Any]:
    """The logged numbers by name, to five digits, null where there is none."""
    names = dict.fromkeys(name for record in facts.records for name, v in record.items() if is_number(v))
    return {
        "epochs": [record["epoch"] for record in facts.records],
        "values": {name: [_rounded(r.get(name)) for r in facts.records] for name in names if name not in NOT_CURVES},
    }


def _rounded(value: Any) -> float | None:
    return float(f"{value:.5g}") if is_number(value) else None
