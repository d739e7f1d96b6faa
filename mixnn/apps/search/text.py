"""Results on a terminal: names come last and whole, so that no width cuts them."""

from __future__ import annotations

from typing import Any

from mixnn.progress import plural, shown

LARGE = 5  # images; copies of one image are seldom more
FAR = 0.98  # a cosine that copies of one image hardly fall below
LINKED = "Similarity is to the group's first image; one below the threshold is linked to it by others"


def render(result: dict[str, Any]) -> str:
    lines = {"nearest": _nearest, "duplicates": _duplicates, "outliers": _outliers}[result["kind"]](result)
    return "\n".join(lines)


def summary(result: dict[str, Any]) -> list[str]:
    """What was found, in a sentence or two; the page says it too."""
    among = f"among {plural(result['images'], 'image')}"
    if result["kind"] == "nearest":
        count = len(result["queries"])
        return [f"the {result['topk']} nearest {among} by cosine similarity" + f", for {count:,} queries" * (count > 1)]
    if result["kind"] == "outliers":
        k = result["neighbors"]
        return [
            f"the {len(result['outliers']):,} most unusual {among}, by mean cosine to their {k} nearest (the score)"
        ]
    groups, bound = result["groups"], f"threshold: cosine {result['threshold']:g}, {result['threshold_is']}"
    if not groups:
        return [f"no near-duplicates {among}", bound]
    members = plural(sum(map(len, groups)), "image")
    return [f"{plural(len(groups), 'group')} of near-duplicates, {members}, {among}", f"{bound}. {LINKED}"]


def titles(result: dict[str, Any]) -> list[str]:
    """Of each group of near-duplicates; the page has them too."""
    found = []
    for number, (group, lowest) in enumerate(zip(result["groups"], result["lowest"], strict=True), 1):
        apart = len(group) >= LARGE and lowest < max(FAR, result["threshold"] - 1e-5)  # float32
        kind = f"; two of them reach {lowest:.4f} only: probably images of one kind, not copies" if apart else ""
        found.append(f"group {number}, {len(group)} images{kind}")
    return found


def _nearest(result: dict[str, Any]) -> list[str]:
    lines = summary(result)
    for row in result["queries"]:
        lines += ["", f"nearest to {shown(row['query'])}", "rank  similarity  image"]
        lines += [f"{hit['rank']:4}  {hit['similarity']:10.4f}  {shown(hit['name'])}" for hit in row["nearest"]]
    return lines


def _outliers(result: dict[str, Any]) -> list[str]:
    rows = [f"{row['rank']:4}  {row['score']:6.4f}  {shown(row['name'])}" for row in result["outliers"]]
    return [*summary(result), "", "rank   score  image", *rows]


def _duplicates(result: dict[str, Any]) -> list[str]:
    lines = summary(result)
    for title, group in zip(titles(result), result["groups"], strict=True):
        lines += ["", title, "similarity  image"]
        for i, image in enumerate(group):
            same, cos = image["same_content_as"], f"{image['similarity']:.4f}" if i else "first"
            note = f"  (identical to {shown(same)})" if same else ""
            lines.append(f"{cos:>10}  {shown(image['name'])}{note}")
    return lines
