"""Images that are nearly the same, in groups; and images that are like no other. Never all pairs in memory at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from mixnn.evaluation.neighbors import nearest

SIDE = 2048  # of a block of similarities: 16 MB, and some 200 MB of pairs if all of its images are alike
NEIGHBORS = 10  # that an image is judged by
SAMPLE = 2000  # images that the usual distance is taken from, spread evenly
NEARER = 10  # times nearer than the usual distance, to be called nearly the same
TOLERANCE = 1e-6  # float32's share in the cosine of a vector with itself


class Groups:
    """Union-find over M things; the root of a group is its first member."""

    def __init__(self, size: int) -> None:
        self.parent = np.arange(size)

    def join(self, a: np.ndarray, b: np.ndarray) -> None:
        """All pairs (a, b); every thing then points to its root."""
        a, b = self.parent[a], self.parent[b]
        apart = a != b
        for pair in np.unique(a[apart] * len(self.parent) + b[apart]).tolist():  # millions shrink to a few
            low, high = sorted(map(self._root, divmod(pair, len(self.parent))))
            self.parent[high] = low
        while (self.parent[self.parent] != self.parent).any():
            self.parent = self.parent[self.parent]

    def _root(self, i: int) -> int:
        while self.parent[i] != i:
            self.parent[i] = i = self.parent[self.parent[i]]
        return i

    def is_one(self, *parts: slice) -> bool:
        """Whether all things in these parts are of one group."""
        return all((self.parent[part] == self.parent[parts[0].start]).all() for part in parts)

    def members(self) -> list[np.ndarray]:
        """Groups of two and more, each in order."""
        order = np.argsort(self.parent, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(self.parent[order])) + 1)
        return [group for group in groups if len(group) > 1]


def near_duplicates(
    bank_MF: np.ndarray, threshold: float, advance: Callable[[int], None] = lambda _: None
) -> list[list[tuple[int, float]]]:
    """Groups linked by cosines of at least the threshold, most alike first: positions, and cosines to the first one.

    A member may be below the threshold to the first one, and linked to it by others.
    """
    groups = Groups(len(bank_MF))
    for done, (rows, columns) in enumerate(_blocks(len(bank_MF)), 1):
        if not groups.is_one(rows, columns):  # if all images are alike, most blocks need not be looked at
            groups.join(*_pairs(bank_MF, rows, columns, threshold - TOLERANCE))
        advance(done)
    found = []
    for group in groups.members():
        cos = np.minimum(bank_MF[group] @ bank_MF[group[0]], 1.0)
        cos[0] = 1.0
        order = np.argsort(-cos[1:], kind="stable") + 1
        found.append([(int(group[i]), float(cos[i])) for i in (0, *order)])
    return sorted(found, key=lambda group: (-round(group[1][1], 5), group[0][0]))


def least_alike(bank_MF: np.ndarray, group: Sequence[int]) -> float:
    """The lowest cosine of two images of a group; of a very large one, of a sample."""
    some = bank_MF[list(group[:: -(-len(group) // SAMPLE)])]
    return float((some @ some.T).min())


def num_blocks(num_images: int) -> int:
    sides = -(-num_images // SIDE)
    return sides * (sides + 1) // 2


def _blocks(num_images: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of the upper triangle, block by block."""
    parts = [slice(start, start + SIDE) for start in range(0, num_images, SIDE)]
    return ((rows, columns) for i, rows in enumerate(parts) for columns in parts[i:])


def _pairs(bank_MF: np.ndarray, rows: slice, columns: slice, least: float) -> tuple[np.ndarray, np.ndarray]:
    """Positions a < b in a block whose cosine is `least` or more."""
    alike = torch.from_numpy(bank_MF[rows]) @ torch.from_numpy(bank_MF[columns]).T >= least
    a, b = (alike.triu(1) if rows == columns else alike).nonzero(as_tuple=True)
    return a.numpy() + rows.start, b.numpy() + columns.start


def chosen_threshold(bank_MF: np.ndarray) -> tuple[float, str]:
    """A cosine that different images hardly reach, from how far apart the images usually are; and why.

    The usual distance is the median, over a sample, of 1 - cosine to the tenth nearest image: the tenth, so that an
    image with a few copies counts like any other. No fixed number will do: 0.995 calls 359 of 1,797 digits near-
    duplicates after 40 epochs and 9 after one, this rule 3 and none, and both find every copy saved as JPEG or resized.
    """
    bank, k = torch.from_numpy(bank_MF), min(NEIGHBORS, len(bank_MF) - 1)
    sample = torch.arange(0, len(bank), -(-len(bank) // SAMPLE))
    cosines = nearest(bank[sample], bank, k, sample)[0]
    usual = min(float(cosines[:, -1].median()), 1.0)
    threshold = round(1 - (1 - usual) / NEARER, 5)
    return threshold, f"{NEARER} times nearer than an image usually is to its neighbor number {k} ({usual:.4f})"


def unusual(bank_MF: np.ndarray, k: int, advance: Callable[[int], None] = lambda _: None) -> np.ndarray:
    """Mean cosine of every image to its k nearest others, (M,)."""
    bank = torch.from_numpy(bank_MF)
    return nearest(bank, bank, k, torch.arange(len(bank)), advance)[0].mean(dim=1).numpy()
