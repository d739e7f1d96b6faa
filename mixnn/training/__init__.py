"""Pre-training: from a data set and a method to a run folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from mixnn.config import UserError
from mixnn.progress import Reporter
from mixnn.runs import Run
from mixnn.runs.encoder import load_backbone
from mixnn.runs.folder import environment
from mixnn.runs.images import load_split
from mixnn.training.setup import free_name, resolve
from mixnn.training.trainer import Trainer

__all__ = ["pretrain"]


def pretrain(
    data: str | Path = "",
    *,
    set: dict[str, Any] | None = None,
    out: str | Path = "",
    overwrite: bool = False,
    resume: str | Path = "",
    init_from: str | Path = "",
    command: str = "mixnn.pretrain(...)",
    reporter: Reporter | None = None,
    **settings: Any,
) -> Run:
    """Train an encoder without labels; returns the run folder.

    `settings` are Config's fields, `set` the method's own options: pretrain("cifar10", epochs=100, set={"topk": 1}).
    """
    say, start = reporter or Reporter(), time.perf_counter()
    if resume:
        if data or set or out or init_from or settings:
            raise UserError("--resume goes alone: all settings come from the run folder's config.yaml")
        return _resume(Run.open(resume), say)
    if not str(data):
        raise UserError("pretrain needs a data set or a folder of images: `mixnn data` lists the data sets")
    config, images = resolve(str(data), set or {}, settings)
    for name, reason in images.skipped:
        say.warn(f"skipped {name}: {reason}")
    path = Path(out) if str(out) else free_name(config)
    Run.check_free(path, overwrite)  # before the minute that compilation may take
    trainer = Trainer(config, images, say)
    if init_from:
        trainer.start_from(load_backbone(Run.open(init_from), say.warn)[0], str(init_from))
    run = Run.create(path, config, command, overwrite)
    startup = round(time.perf_counter() - start, 1)
    about = environment(trainer.images.images.device) | {"startup_s": startup}
    run.write("environment.json", json.dumps(about, indent=1) + "\n")
    say.say(f"{config.method} on {config.data}: {len(images):,} images, {config.epochs} epochs, to {path}")
    say.say(f"ready after {startup} s")
    trainer.fit(run)
    return run


def _resume(run: Run, say: Reporter) -> Run:
    tensors, state = run.load_checkpoint(say.warn)
    trainer = Trainer(run.config, load_split(run.config, "pretrain"), say)
    trainer.load(tensors, state)
    run.rewind(trainer.done)
    say.say(f"{run.path}: going on at step {trainer.done} of {trainer.total_steps}")
    trainer.fit(run)
    return run
