"""demo: MNN on scikit-learn's handwritten digits, which come with the package; two CPU cores, about a minute.

It ends with a table (raw pixels, untrained network, MNN) and a picture of test images with their nearest training
images, before and after. The table's few-label columns are means over draws of the labelled images, the same draws
for every row.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mixnn.config import Config
from mixnn.data import ImageSet, load
from mixnn.evaluation.features import features
from mixnn.evaluation.knn import knn
from mixnn.functional import unit
from mixnn.progress import Reporter, print_table
from mixnn.runs import Run
from mixnn.runs.encoder import load_backbone, make_backbone
from mixnn.training import pretrain

K = 20  # neighbors of the kNN column; the paper's 200 is for 50,000 images
LABELS = (1, 5, None)  # a class; None: all
NUM_DRAWS = 20
SHOWN = 6  # neighbors in the picture


def demo(
    *, seed: int = 0, out: str | Path = "runs/demo", epochs: int = 0, reporter: Reporter | None = None
) -> dict[str, Any]:
    """Train, evaluate and show; returns the table as {row: {column: accuracy}} and the picture's path."""
    say = reporter or Reporter()
    say.say("MNN on 1,297 handwritten digits of 8 x 8 pixels, without their labels")
    settings: dict[str, Any] = {"epochs": epochs} if epochs else {}
    start = time.perf_counter()
    run = pretrain(
        "digits",
        seed=seed,
        out=out,
        overwrite=True,
        device="cpu",
        command=f"mixnn demo --seed {seed}",
        reporter=say,
        **settings,
    )
    seconds = time.perf_counter() - start
    train, test = load("digits", "train"), load("digits", "test")
    spaces = embeddings(run, train, test)
    table = {name: accuracies(bank, train.labels, queries, test.labels) for name, (bank, queries) in spaces.items()}
    picture = draw_neighbors(spaces, train, test, run.path / "neighbors.png")
    show(table, seconds, picture)
    run.save_results(
        {"demo": {"table": table, "k": K, "draws": NUM_DRAWS, "seed": seed, "train_seconds": round(seconds, 1)}}
    )
    return {"table": table, "picture": picture, "run": run}


def embeddings(run: Run, train: ImageSet, test: ImageSet) -> dict[str, tuple[Tensor, Tensor]]:
    """Training and test images as unit vectors in three spaces."""
    networks = {"untrained network": untrained(run.config), "MNN": load_backbone(run)[0]}
    spaces = {"raw pixels": tuple(images.images.flatten(1).float() for images in (train, test))}
    spaces |= {name: tuple(features(f, images) for images in (train, test)) for name, f in networks.items()}
    return {name: (unit(bank), unit(queries)) for name, (bank, queries) in spaces.items()}


def untrained(config: Config) -> torch.nn.Module:
    """The network as training found it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return make_backbone(config).eval()


def accuracies(bank: Tensor, labels: Tensor, queries: Tensor, truth: Tensor) -> dict[str, float]:
    """kNN, and a linear classifier from 1, 5 and all labels a class."""
    row = {"kNN": knn(bank, labels, queries, truth, 10, K)["weighted"]}
    for count in LABELS:
        row["all" if count is None else str(count)] = linear_accuracy(
            bank.numpy(), labels.numpy(), queries.numpy(), truth.numpy(), count
        )
    return row


def linear_accuracy(
    bank: np.ndarray, labels: np.ndarray, queries: np.ndarray, truth: np.ndarray, count: int | None
) -> float:
    """Percent right of a logistic regression, averaged over draws of `count` labelled images a class."""
    from sklearn.linear_model import LogisticRegression

    rng, scores = np.random.default_rng(0), []
    for _ in range(NUM_DRAWS if count else 1):
        chosen = np.concatenate([rng.permutation(np.flatnonzero(labels == c))[:count] for c in range(10)])
        classifier = LogisticRegression(C=100.0, max_iter=2000).fit(bank[chosen], labels[chosen])
        scores.append(classifier.score(queries, truth))
    return 100 * float(np.mean(scores))


def draw_neighbors(spaces: dict[str, tuple[Tensor, Tensor]], train: ImageSet, test: ImageSet, path: Path) -> Path:
    """The first test image of each class and its nearest training images, before and after; false ones crossed out."""
    import matplotlib.pyplot as plt

    names = ["untrained network", "MNN"]
    rows = [int((test.labels == c).nonzero()[0]) for c in range(10)]
    figure, axes = plt.subplots(len(rows), 2 * SHOWN + 2, figsize=(2 * SHOWN * 0.55 + 1, len(rows) * 0.58 + 0.5))
    for ax in axes.flat:
        ax.axis("off")
    for r, i in enumerate(rows):
        _tile(axes[r, 0], test, i)
        for block, name in enumerate(names):
            bank, queries = spaces[name]
            for k, j in enumerate((bank @ queries[i]).topk(SHOWN).indices.tolist()):
                _tile(axes[r, 1 + block * (SHOWN + 1) + k], train, j, false=bool(train.labels[j] != test.labels[i]))
    axes[0, 0].set_title("test", fontsize=9)
    for block, name in enumerate(names):
        axes[0, 1 + block * (SHOWN + 1)].set_title(f"nearest, {name}", fontsize=9, loc="left")
    figure.tight_layout(pad=0.3, h_pad=0.2, w_pad=0.2)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _tile(ax: Any, images: ImageSet, i: int, false: bool = False) -> None:
    ax.axis("on")
    ax.imshow(images.images[i, 0], cmap="gray_r")
    ax.set(xticks=[], yticks=[])
    for side in ax.spines.values():
        side.set(color="crimson" if false else "0.8", linewidth=2.5 if false else 0.8)
    if false:
        ax.plot([-0.5, 7.5], [-0.5, 7.5], color="crimson", linewidth=1.5)


def show(table: dict[str, dict[str, float]], seconds: float, picture: Path) -> None:
    head = ("accuracy, %", f"kNN (k={K})", "linear, 1 label a class", "5 labels", "all labels")
    print_table(head, [(name, *(f"{value:.1f}" for value in row.values())) for name, row in table.items()])
    print(
        f"\ntrained in {seconds:.0f} s; 500 test images; few-label columns are means over {NUM_DRAWS} draws of labels"
    )
    print(f"neighbors before and after, false ones crossed out: {picture}")
