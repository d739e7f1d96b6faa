"""demo: MNN on scikit-learn's handwritten digits, without a download; about a minute on two CPU cores.

It makes a table (raw pixels, untrained network, MNN) and draws test images with their nearest training images, before
and after training. The few-label columns are means over random draws of the labeled images, the same for every row.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from mixnn.config import Interrupted, Param, UserError, calling, setting, verb
from mixnn.data import ImageSet, load
from mixnn.evaluation.features import features
from mixnn.evaluation.knn import accuracy_by_vote
from mixnn.evaluation.neighbors import nearest
from mixnn.files import expand
from mixnn.functional import unit
from mixnn.progress import Reporter, print_table, reporter_for
from mixnn.runs import Run
from mixnn.runs.weights import initial_backbone, load_backbone
from mixnn.training.pretrain import start_pretrain

COMMAND = "mixnn demo"  # marks a run folder that the next demo may replace
K = 20  # neighbors of the kNN column; the paper's 200 is for 50,000 images
LABELS = (1, 5, None)  # per class; None: all
NUM_DRAWS = 20
SHOWN = 8  # neighbors per test image in the picture


@verb
def demo(
    *,
    seed: Annotated[int, Param("seed of everything random", low=0)] = 0,
    out: Annotated[str | Path, Param("run folder; an earlier demo's is replaced", metavar="FOLDER")] = "runs/demo",
    epochs: Annotated[int, Param("passes over the images; 0: the recipe's 60", low=0)] = 0,
    verbose: bool | Reporter = False,
) -> dict[str, Any]:
    """Train and evaluate MNN on handwritten digits, and draw nearest neighbors before and after.

    The result holds the table as {row: {column: accuracy}}, the picture's path, the seconds of training and the run.

    >>> found = mixnn.demo(epochs=6, out="runs/demo")
    >>> sorted(found["table"])
    ['MNN', 'raw pixels', 'untrained network']

    Examples:
        mixnn demo
    """
    reporter, out = reporter_for(verbose), expand(out)
    command = out / "command.txt"
    if out.exists() and not (command.is_file() and command.read_text().strip() == COMMAND):
        raise UserError(f"{out} exists and was not made by the demo: use another {setting('out')}")
    reporter.info("MNN on 1,297 handwritten digits of 8 x 8 pixels, without their labels")
    settings: dict[str, Any] = {"seed": seed, "device": "cpu"} | ({"epochs": epochs} if epochs else {})
    start = time.perf_counter()
    try:
        given: dict[str, Any] = {"out": out, "overwrite": True, "command": COMMAND, "reporter": reporter}
        run = start_pretrain("digits", settings=settings, **given)
    except Interrupted as stop:
        raise Interrupted(f"stopped: `{calling('demo')}` starts again from the beginning", stop.signal) from None
    seconds = time.perf_counter() - start
    train, test = load("digits", "train"), load("digits", "test")
    spaces = embeddings(run, train, test)
    table = {name: accuracies(bank, train.labels, queries, test.labels) for name, (bank, queries) in spaces.items()}
    picture = draw_neighbors(spaces, train, test, run.path / "neighbors.png")
    run.save_results(
        {"demo": {"table": table, "k": K, "draws": NUM_DRAWS, "seed": seed, "train_seconds": round(seconds, 1)}}
    )
    return {"table": table, "picture": picture, "seconds": seconds, "run": run}


def embeddings(run: Run, train: ImageSet, test: ImageSet) -> dict[str, tuple[Tensor, Tensor]]:
    """Unit vectors of training and test images: their raw pixels, and the features of two networks."""
    networks = {"untrained network": initial_backbone(run.config), "MNN": load_backbone(run)[0]}
    spaces = {"raw pixels": tuple(images.images[:].flatten(1).float() for images in (train, test))}
    spaces |= {name: tuple(features(f, images) for images in (train, test)) for name, f in networks.items()}
    return {name: (unit(bank), unit(queries)) for name, (bank, queries) in spaces.items()}


def accuracies(bank: Tensor, labels: Tensor, queries: Tensor, truth: Tensor) -> dict[str, float]:
    """Percent right of kNN, and of a linear classifier with 1, 5 and all labels per class."""
    row = {"kNN": accuracy_by_vote(bank, labels, queries, truth, 10, K)["weighted"]}
    for count in LABELS:
        row["all" if count is None else str(count)] = linear_accuracy(
            bank.numpy(), labels.numpy(), queries.numpy(), truth.numpy(), count
        )
    return row


def linear_accuracy(
    bank: np.ndarray, labels: np.ndarray, queries: np.ndarray, truth: np.ndarray, count: int | None
) -> float:
    """Percent right of a logistic regression, averaged over draws of `count` labeled images per class."""
    from sklearn.linear_model import LogisticRegression

    rng, scores = np.random.default_rng(0), []
    for _ in range(NUM_DRAWS if count else 1):
        chosen = np.concatenate([rng.permutation(np.flatnonzero(labels == c))[:count] for c in range(10)])
        classifier = LogisticRegression(C=100.0, max_iter=2000).fit(bank[chosen], labels[chosen])
        scores.append(classifier.score(queries, truth))
    return round(100 * float(np.mean(scores)), 2)


def false_neighbors(bank: Tensor, queries: Tensor, train: ImageSet, test: ImageSet, k: int) -> tuple[Tensor, Tensor]:
    """The k nearest training images of each test image, and which of them have another class; both (500, k)."""
    index = nearest(queries, bank, k)[1]
    return index, train.labels[index] != test.labels[:, None]


def draw_neighbors(spaces: dict[str, tuple[Tensor, Tensor]], train: ImageSet, test: ImageSet, path: Path) -> Path:
    """Draw the worst test image per class for raw pixels, with its nearest training images before and after MNN."""
    import matplotlib.pyplot as plt

    wrong = false_neighbors(*spaces["raw pixels"], train, test, K)[1].sum(1)
    rows = [int(torch.where(test.labels == c, wrong, -1).argmax()) for c in range(10)]
    figure, ax = plt.subplots(figsize=(2.2 + 1.04 * SHOWN, 6.2), dpi=130, layout="constrained")
    ax.set(xlim=(-0.1, 2 * SHOWN + 2.1), ylim=(10.1, -0.6), aspect="equal")
    ax.axis("off")
    ax.text(0.5, -0.15, "test", ha="center")
    for r, i in enumerate(rows):
        _tile(ax, test, i, 0, r)
        ax.text(1.2, r + 0.5, str(int(test.labels[i])), ha="center", va="center", color="0.4")
    for block, name in enumerate(("untrained network", "MNN")):
        left = 1.6 + block * (SHOWN + 0.4)
        index, false = false_neighbors(*spaces[name], train, test, K)
        ax.text(
            left,
            -0.15,
            f"nearest, {name} ({100 * false.float().mean():.1f}% false among {K}, all test images)",
            fontsize=8,
        )
        for r, i in enumerate(rows):
            for k in range(SHOWN):
                _tile(ax, train, int(index[i, k]), left + k, r, bool(false[i, k]))
    figure.savefig(path)
    plt.close(figure)
    return path


def _tile(ax: Any, images: ImageSet, i: int, x: float, y: float, false: bool = False) -> None:
    """Draw one image in the unit square at (x, y); a false neighbor is framed and crossed out."""
    box = (x + 0.06, x + 0.94, y + 0.94, y + 0.06)
    ax.imshow(images.images[i, 0].numpy(), cmap="gray_r", extent=box, interpolation="nearest", vmin=0, vmax=255)
    outline = ([box[0], box[1], box[1], box[0], box[0]], [box[2], box[2], box[3], box[3], box[2]])
    ax.plot(*outline, color="crimson" if false else "0.8", linewidth=2 if false else 0.6)
    if false:
        ax.plot(box[:2], (box[3], box[2]), color="crimson", linewidth=1.2)


def show_demo(found: dict[str, Any]) -> None:
    """Print the table of `demo`, and where the picture is."""
    head = ("accuracy, %", f"kNN (k={K})", "linear, 1 label per class", "5 labels", "all labels")
    print_table(head, [(name, *(f"{value:.1f}" for value in row.values())) for name, row in found["table"].items()])
    print(
        f"\ntrained in {found['seconds']:.0f} s; 500 test images; "
        f"few-label columns are means over {NUM_DRAWS} draws of labels"
    )
    print(f"nearest images before and after, false ones crossed out: {found['picture']}")
