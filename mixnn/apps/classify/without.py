"""What the same labels give without the training: on raw pixels, and on the run's network before its first step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from mixnn.apps.classify.learning import held_out_share
from mixnn.apps.embed import Embeddings, Encoder, load
from mixnn.progress import Reporter
from mixnn.runs import Run
from mixnn.runs.weights import untrained

SIDE = 16  # pixels of the shrunken images at most: 768 numbers, about as many as an embedding has
BATCH = 256
UNLABELLED = 1000  # images beside the labelled ones that features are standardized by


def without_training(
    run: Run,
    source: str | Path,
    given: dict[str, str],
    model: str,
    seed: int,
    *,
    device: str = "auto",
    data_dir: str = "",
    reporter: Reporter | None = None,
) -> dict[str, dict[str, float]]:
    """Held-out accuracy of each, in percent: the folds of `learn`, so that a difference is one of the features."""
    images, trained = run.images(source, data_dir), load(run, device, reporter=reporter)
    fresh = Encoder(untrained(run.config), trained.size, trained.mean.cpu(), trained.std.cpu()).to(trained.device)
    others = [name for name in images.names if name not in given]
    kept = {*given, *others[:: -(-len(others) // UNLABELLED) or 1]}
    names, pixels, features = [], [], []
    for batch in images.named(kept).batches(BATCH, trained.size):
        u8 = torch.from_numpy(np.ascontiguousarray(batch.u8)).to(trained.device)
        names += batch.names
        pixels.append(torch.nn.functional.adaptive_avg_pool2d(u8.float(), min(SIDE, *u8.shape[2:])).flatten(1).cpu())
        features.append(fresh(u8).cpu())
    rows = {"raw pixels": torch.cat(pixels), "untrained network": torch.cat(features)}
    return {
        title: held_out_share(Embeddings(names, vectors.numpy()), given, model=model, seed=seed)
        for title, vectors in rows.items()
    }
