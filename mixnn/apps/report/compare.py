"""Two or more runs beside each other: in what their settings differ, and whether their results may be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mixnn.apps.report.facts import NAMES_OF_RESULTS, Facts, code, meaning, settings, text
from mixnn.apps.report.verdict import is_number

# Of a result's protocol, what belongs to the run and not to the way it was measured.
OF_THE_RUN = ("checkpoint_step", "trained_epochs", "train_seed")


def differences(runs: Sequence[Facts]) -> list[dict[str, Any]]:
    """Settings that are not the same in all runs; null where a method has no such option."""
    every = [settings(facts.config) for facts in runs]
    rows = []
    for name in dict.fromkeys(name for values in every for name in values):
        values = [text(v[name]) if name in v else None for v in every]
        if len(set(values)) > 1:
            what = next(meaning(facts.config, name)[0] for facts, v in zip(runs, every, strict=True) if name in v)
            rows.append({"name": name, "values": values, "meaning": what})
    return rows


def warnings(runs: Sequence[Facts], letters: Sequence[str]) -> list[str]:
    """Why the runs' accuracies may not be comparable, a sentence each."""
    if len(runs) < 2:
        return []
    found = []
    data = {letter: facts.config.data for letter, facts in zip(letters, runs, strict=True)}
    if len(set(data.values())) > 1:
        found.append(f"The runs saw different data ({_each(data)}): their accuracies cannot be compared.")
    for kind, label in NAMES_OF_RESULTS.items():
        protocols = {
            letter: facts.results[kind].get("protocol", {})
            for letter, facts in zip(letters, runs, strict=True)
            if isinstance(facts.results.get(kind), dict)
        }
        unequal = [f"{name.replace('_', ' ')} ({_each(values)})" for name, values in _unequal(protocols).items()]
        if unequal:
            found.append(f"{label} was measured by different protocols: {', '.join(unequal)}.")
        if protocols and len(protocols) < len(runs):
            found.append(f"{label} was measured for {' and '.join(protocols)} only.")
    ks = {
        letter: next((str(r["knn_k"]) for r in facts.records if is_number(r.get("knn_k"))), "")
        for letter, facts in zip(letters, runs, strict=True)
    }
    ks = {letter: k for letter, k in ks.items() if k}
    if len(set(ks.values())) > 1:
        found.append(f"kNN during training was read with different k ({_each(ks)}).")
    versions = {
        letter: code(facts.results["evaluated_with"])
        for letter, facts in zip(letters, runs, strict=True)
        if isinstance(facts.results.get("evaluated_with"), dict)
    }
    if len(set(versions.values())) > 1:
        found.append(f"The results were made by different code ({_each(versions)}).")
    return found


def _unequal(protocols: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """What the protocols differ in: {name: {letter: value}}."""
    names = dict.fromkeys(name for protocol in protocols.values() for name in protocol if name not in OF_THE_RUN)
    values = {
        name: {letter: text(p[name]) if name in p else "not recorded" for letter, p in protocols.items()}
        for name in names
    }
    return {name: by_letter for name, by_letter in values.items() if len(set(by_letter.values())) > 1}


def _each(values: Mapping[str, str]) -> str:
    """A, B: 64; C: 12."""
    letters: dict[str, list[str]] = {}
    for letter, value in values.items():
        letters.setdefault(value, []).append(letter)
    return "; ".join(f"{', '.join(those)}: {value}" for value, those in letters.items())
