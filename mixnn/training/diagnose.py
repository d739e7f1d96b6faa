"""diagnose: neighbors and embeddings of a finished run, measured as in training, and the health of its features."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch

from mixnn import functional as F
from mixnn import methods
from mixnn.config import RUN, DataDir, Device, MovedTo, Param, setting, verb
from mixnn.device import seeded_generators
from mixnn.diagnostics import NAMES, effective_rank
from mixnn.evaluation.features import features
from mixnn.methods import Method
from mixnn.progress import Reporter, print_table, reporter_for
from mixnn.runs import Run
from mixnn.training.trainer import Trainer

ENTROPIES = ("cas_entropy", "cas_entropy_0.1")
DERIVED = {
    "cas_evenness": "entropy of the attention (CAS) as a share of ln K; at temperature 1 cosines cannot make it small",
    "cas_evenness_0.1": "entropy of the attention (CAS) at temperature 0.1 as a share of ln K",
    "neighbor_share": "share of the neighbors in the weights on z and z_i, including mixing, lengths and normalization",
}
FEATURES = {
    "feature_spread": "how different features are: 0 collapsed, 1 most different; deviation of unit features x sqrt(F)",
    "feature_rank": "effective rank of the features: exp(entropy of their covariance's eigenvalues)",
    "dead_features": "share of features that hardly vary: less than a thousandth of the mean deviation",
}
MAX_IMAGES = 10_000  # for the features


@verb
def diagnose(
    run: Annotated[str | Path | Run, RUN],
    *,
    batches: Annotated[int, Param("batches of training images to measure on", low=1)] = 20,
    source: MovedTo = "",
    labels: Any = "",
    device: Device = "auto",
    data_dir: DataDir = "",
    verbose: bool | Reporter = False,
) -> dict[str, float]:
    """Measure a run's neighbors and embeddings, and whether its features collapsed.

    The numbers are means over some batches of training images that the support set does not hold, augmented as in
    training. The run's files are only read. See `diagnostics.NAMES`, DERIVED and FEATURES for what each number means.

    If the run was trained on images in memory, give the same ones as `source`, with `labels` if `pretrain` got them.

    >>> found = mixnn.diagnose("runs/photos", batches=1)
    >>> 0 <= found["feature_spread"]
    True

    Examples:
        mixnn diagnose runs/photos
        mixnn diagnose runs/photos --batches 100 --json
    """
    reporter, run = reporter_for(verbose), run if isinstance(run, Run) else Run.open(run)
    run = run.moved(source, labels)
    run.check_data(f"use {setting('source', 'FOLDER')}")
    where = {"device": device, "data_dir": str(data_dir) or run.config.data_dir}
    config = replace(run.config, **where, mode="eager", knn_every=0, loggers="")  # type: ignore[arg-type]
    tensors, state = run.load_training(reporter.warn)
    with run.explain_unknown_names():
        images = run.dataset(data_dir).load(methods.find(config.method).split, config.reading_size)
        trainer = Trainer(config, images, reporter, network=run.network)
    trainer.load(tensors, state)
    health = feature_health(trainer)  # first: batch norm's running statistics move when batches are observed
    means = {name: value for name, value in _observe(trainer, batches, reporter).items() if name != "loss"}
    return means | _derived(means, trainer.method) | health


def show_diagnose(numbers: dict[str, float]) -> None:
    """Print the numbers with what they mean."""
    print_table(("", "value", "what it is"), meanings(numbers))


def _derived(means: dict[str, float], method: Method) -> dict[str, float]:
    """Numbers that follow from the means and the method's options."""
    out = {}
    if "cas_entropy" in means and method.topk > 1:
        out = {name.replace("entropy", "evenness"): means[name] / math.log(method.topk) for name in ENTROPIES}
    if "norm_ratio" in means and _share_is_of_its_loss(type(method)):
        share = method.neighbor_share(means["norm_ratio"], means["cos_neighbors"])
        out |= {} if share is None else {"neighbor_share": share}
    return out


def _share_is_of_its_loss(method: type[Method]) -> bool:
    """Whether `neighbor_share` is about the method's loss: the loss is mixnn's, or no subclass replaced it alone."""
    loss, share = (
        next((cls for cls in method.__mro__ if name in vars(cls)), object) for name in ("loss", "neighbor_share")
    )
    return loss.__module__.startswith("mixnn.methods.") or issubclass(share, loss)


def _observe(trainer: Trainer, batches: int, reporter: Reporter) -> dict[str, float]:
    """Means over some batches, if possible of images that the support set does not hold."""
    size, step = trainer.config.batch_size, trainer.step
    generator = torch.Generator(trainer.order.device).manual_seed(trainer.config.seed)
    fresh = torch.ones(len(trainer.images), dtype=torch.bool, device=trainer.order.device)
    if (support := trainer.method.support) is not None:
        fresh[support.index_Q[support.index_Q >= 0]] = False
    if holds_all := int(fresh.sum()) < size:
        fresh[:] = True
    candidates = fresh.nonzero()[:, 0]
    order = candidates[torch.randperm(len(candidates), generator=generator, device=candidates.device)]
    chosen = [part for part in order.split(size) if len(part) == size][:batches]
    step.reset()
    for i, index in enumerate(chosen):
        with seeded_generators(trainer.order.device, trainer.config.seed, i):  # for dropout in a user's network
            step.observe(index, generator)
    means = trainer.reliable_means()
    if holds_all and "own_image" in means:
        reporter.warn("the support set holds nearly all images: own_image counts those too")
    return means


def feature_health(trainer: Trainer) -> dict[str, float]:
    """Spread and rank of the student backbone's features, on images without augmentation."""
    images = trainer.images
    index = torch.arange(min(len(images), MAX_IMAGES), device=images.images.device)
    x = features(trainer.method.student.f, images, index, bf16=False).double()
    unit = F.unit(x)
    deviation = unit.std(0)
    return {
        "feature_spread": float(F.spread(x)),
        "feature_rank": float(effective_rank(torch.linalg.eigvalsh(unit.T.cov()))),
        "dead_features": float((deviation < 1e-3 * deviation.mean()).double().mean()),
    }


def meanings(numbers: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of a table: name, value, meaning. In the order of NAMES; what else a method logs comes last."""
    known = NAMES | DERIVED | FEATURES
    places = {name: i for i, name in enumerate(known)}
    rows = []
    for name, value in numbers.items():
        stem, _, rank = name.rpartition("_")
        key, k = (f"{stem}_k", int(rank)) if name not in known and rank.isdigit() else (name, 0)  # purity_3: purity_k
        text = known.get(key, "").replace("number k", f"number {k}")
        rows.append((places.get(key, len(known)), k, (name, f"{value:.4f}", text)))
    return [row for _, _, row in sorted(rows)]
