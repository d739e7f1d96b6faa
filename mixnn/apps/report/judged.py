"""What the judgement without labels says of one run, in words; training/judgement.py makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mixnn.runs.weights import NO_START
from mixnn.training.judgement import NEIGHBORS, NUMBERS, problems

# What is wrong, as `problems` calls it, and the state of the verdict; the most serious one first.
STATES = {"collapse": "shrunk", "color": "color", "worse": "below_start"}


@dataclass(frozen=True)
class Judged:
    """judgement.json of a run that was trained, to its end or not."""

    content: Mapping[str, Any]
    init_from: str
    unfinished: bool

    @property
    def from_weights(self) -> bool:
        """Whether the run started from weights that are worth keeping, not from random ones."""
        return self.init_from not in NO_START

    @property
    def last(self) -> Mapping[str, Any]:
        return self.content["points"][-1]

    @property
    def view_retrieval(self) -> list[tuple[int, float]]:
        """View retrieval before and after training."""
        return [(i, check["view_retrieval"]) for i, check in enumerate((self.content["start"], self.last))]

    def problems(self, check: Mapping[str, Any]) -> dict[str, str]:
        """What is wrong at one check of the run, by name, each in words."""
        return problems(self.content["start"], {name: check[name] for name in NUMBERS}, self.from_weights)

    def _is_worse(self, check: Mapping[str, Any]) -> bool:
        return self.from_weights and not {"worse", "collapse"}.isdisjoint(self.problems(check))

    @property
    def kept(self) -> float:
        """Share of the run after which the kept weights were taken; 1 if they are the last ones."""
        kept, looks = self.content["kept"], self.content["points"]
        if not self.unfinished and kept < self.last["progress"]:
            return kept
        if self.unfinished or not self._is_worse(self.last):
            return 1.0
        # There was no time for a check at the end, so the file does not say which weights were kept.
        return max((check["progress"] for check in looks if not self._is_worse(check)), default=0.0)

    def reverted(self) -> str:
        """The state of a run that did not keep its last weights; empty for one that did."""
        return "" if self.kept == 1 else "kept_earlier" if self.kept else "kept_start"

    def failure(self) -> str:
        """The state that follows from what is wrong at the end; empty if nothing is."""
        found = self.problems(self.last)
        return next((state for name, state in STATES.items() if name in found), "")

    def reasons(self) -> list[str]:
        """What is wrong at the end, in sentences, and which weights were kept for that reason."""
        found, state = self.problems(self.last).values(), self.reverted()
        if not state:
            return [f"{text[0].upper()}{text[1:]}." for text in found]
        which = {
            "kept_start": f"that the run started from ({self.init_from})",
            "kept_earlier": f"after {self.kept:.0%} of the run",
        }
        numbers = [text.partition(": ")[2] for text in found]  # the words before say that things are getting worse
        return [f"The encoder is the one {which[state]}.", *(f"With the last weights, {text}." for text in numbers)]

    def evidence(self) -> list[str]:
        """The numbers at the end of training and at the start, in sentences, without those that `reasons` states."""
        start, last, share, found = self.content["start"], self.last, self.content["share"], self.problems(self.last)
        origin = "the start" if self.from_weights else "the network before training"
        sentences = []
        if "worse" not in found:
            now, before = (f"{check['view_retrieval']:.0%}" for check in (last, start))
            share_found = f"{now} of cases; with {origin}, in {before}"
            sentences.append(f"An image's other view is the most similar image of a sample in {share_found}.")
        if self.from_weights:
            neighbors = f"{last['kept_neighbors']:.0%} of an image's {NEIGHBORS} nearest neighbors"
            sentences.append(f"{neighbors} are those it had with the start.")
        if "collapse" not in found:
            rank = f"{last['feature_rank']:.1f}; with {origin}, {start['feature_rank']:.1f}"
            sentences.append(f"Effective rank of the features: {rank}.")
        if share < 1 and not self.reverted():
            parts = f"{share:.0%} of the trained ones and {1 - share:.0%} of the start's"
            sentences.append(f"The encoder is an average of weights: {parts}.")
        return sentences
