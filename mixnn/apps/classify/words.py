"""What classify found, in a table and sentences."""

from __future__ import annotations

from typing import Any

from mixnn.apps.classify.models import MODELS
from mixnn.progress import plural, print_table, shown

SHOWN = 25  # classes in the table, the worst ones where there are more
FLAT = 1.0  # percent; a gain that is surely smaller, between the curve's last points, is called small


def show(found: dict[str, Any]) -> None:
    """Print it: tables of classes, classifiers and numbers of labels, then what they say and where the files are."""
    if "classifier" in found:
        _show_classes(found)
        _show_baselines(found)
        _show_curve(found["curve"])
    for sentence in sentences(found):
        print(shown(sentence))


def sentences(found: dict[str, Any]) -> list[str]:
    """One fact a line."""
    lines = []
    if "classifier" in found:
        kept, rest = found["classifier"], found["images"] - found["labelled"]
        lines += _accuracy(found)
        why = ", for its lower log loss, which counts confidence too" if kept["cv_log_loss"] is not None else ""
        lines.append(f"kept: {MODELS[kept['model']]} ({kept['setting']}){why}")
        where = ": for that see the interval above" if found["held_out"] else ""
        lines += _predicted(found["predicted"], "other", where) if rest else []
    lines += _predicted(found["applied"], "new") if "applied" in found else []
    if "suggested" in found:
        what, why = {
            "typical": ("typical image", "of regions without a label"),
            "uncertain": ("image", "that it hesitates over"),
        }[found["suggested_by"]]
        lines.append(f"worth labelling next: {plural(len(found['suggested']), what)} {why}")
        lines.append(f"fill in the labels in {found['files']['suggestions']} and give that file as the labels")
    named = {"predictions": "predictions", "applied": "predictions for the new images", "classifier": "classifier"}
    return lines + [f"{title}: {found['files'][name]}" for name, title in named.items() if name in found["files"]]


def _predicted(tally: dict[str, Any], which: str, where: str = "") -> list[str]:
    images, sure = f"{tally['images']:,} {which} images", f"{tally['sure']:,} of them with confidence 0.9 or more"
    return [f"{images} have a predicted label, {sure}; confidence ranks them, and is no accuracy{where}"]


def _accuracy(found: dict[str, Any]) -> list[str]:
    held = found["held_out"]
    if not held:
        return found["notes"]
    chosen = ", from the choice of the classifier too" if len(held["models"]) > 1 else ""
    lines = [
        f"accuracy {held['accuracy']:.1f}% (95% interval {held['low']:.1f} to {held['high']:.1f}), "
        f"on {held['images']:,} labelled images, each held out once{chosen}; always saying {held['commonest']!r} "
        f"would be right in {held['commonest_share']:.1f}%",
        *found["notes"],
    ]
    if "without" in found:
        best = max(found["without"].values(), key=lambda row: row["accuracy"])
        gain = held["accuracy"] - best["accuracy"]
        why = "" if held["low"] > best["accuracy"] else "; too few labels to be sure of a gain"
        why = why if gain > 0 else ": training has not paid here yet; train for longer, or on more images"
        lines.append(f"{gain:+.1f} points beside the better of raw pixels and the untrained network{why}")
    if held["confusions"]:
        pairs = [f"{c['label']!r} taken for {c['taken_for']!r} ({c['images']})" for c in held["confusions"][:3]]
        lines.append(f"most confused: {', '.join(pairs)}")
    if held["doubtful"]:
        files = [f"{d['file']} ({d['label']!r}, looks like {d['predicted']!r})" for d in held["doubtful"][:3]]
        lines.append(f"labels worth a second look: {', '.join(files)}")
    return lines


def _show_classes(found: dict[str, Any]) -> None:
    held, predicted = found["held_out"], found["predicted"]["by_class"]
    right = held["per_class"] if held else {}
    order = sorted(found["classes"], key=lambda c: right.get(c, {"accuracy": 101})["accuracy"])
    shown = [c for c in found["classes"] if c in set(order[:SHOWN])]
    rows = []
    for c in shown:
        cell = f"{right[c]['accuracy']:.0f}% of {right[c]['images']}" if c in right else "-"
        rows.append((c, str(found["classes"][c]), cell, str(predicted.get(c, 0))))
    print_table(("class", "labelled", "right when held out", "predicted among the others"), rows)
    if len(order) > len(shown):
        print(f"... and {len(order) - len(shown)} more with fewer mistakes")
    if held and len(held["models"]) > 1:
        print()
        kept = found["classifier"]["model"]
        tried = {MODELS[m] + " (kept)" * (m == kept): share for m, share in held["models"].items()}
        tried["either, chosen anew in each fold"] = held
        print_table(("classifier", "accuracy", "95% interval"), [(t, *_cells(row)) for t, row in tried.items()])
    print()


def _show_baselines(found: dict[str, Any]) -> None:
    if "without" in found:
        rows = {"this run": found["held_out"]} | found["without"]
        print_table(("the same labels on", "accuracy", "95% interval"), [(t, *_cells(row)) for t, row in rows.items()])
        print()


def _show_curve(points: list[dict[str, Any]]) -> None:
    if not points:
        return
    rows = [(str(point["labels_per_class"]), *_cells(point)) for point in points]
    print_table(("labels a class", "accuracy", "nine of ten draws"), rows)
    if "gain" in points[-1]:
        before, last = points[-2], points[-1]
        print(
            f"{last['labels_per_class']} in place of {before['labels_per_class']}: {last['gain']:+.1f} points "
            f"(95% interval {last['gain_low']:+.1f} to {last['gain_high']:+.1f}); {_outlook(last)}"
        )
    print()


def _outlook(last: dict[str, Any]) -> str:
    if last["gain_low"] > 0:
        return "more labels should help"
    return "more labels may help little" if last["gain_high"] < FLAT else "too few labels to say whether more will help"


def _cells(found: dict[str, Any]) -> tuple[str, str]:
    return f"{found['accuracy']:.1f}%", f"{found['low']:.1f} to {found['high']:.1f}"
