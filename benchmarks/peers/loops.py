"""The training loops that are compared: lightly's and solo-learn's BYOL, a plain PyTorch loop, and mixnn's.

Every loop is built from a `Task`. `train(loading, after_step)` trains until `after_step()`, which is called after each
step, returns True. With loading=False the batches are on the device before the first step. `encoder` maps normalized
images to features, and `mean` and `std` are the normalization it was trained with.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from mixnn.data import ImageSet
from mixnn.paper.baseline import PlainLoop
from mixnn.paper.measure import bench_config
from mixnn.progress import Reporter
from mixnn.training.trainer import Trainer

NUM_READY = 4  # different batches that are kept on the device; they are repeated
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Task:
    """What all loops are given: the images (on the host) and the settings they share."""

    images: ImageSet
    device: torch.device
    batch_size: int = 256
    workers: int = 0
    epochs: int = 200  # length of the learning rate's schedule
    mode: str = "auto"  # how mixnn runs a step
    backbone: str = "resnet18"  # of mixnn and the plain loop; the others have no smaller one
    solo_learn: Path | None = None  # source folder

    @property
    def steps_per_epoch(self) -> int:
        return len(self.images) // self.batch_size

    def autocast(self) -> Any:
        """bf16 on CUDA; float32 elsewhere, as mixnn does."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")


class Loop(Protocol):
    """One library's way to train."""

    about: str
    loads: bool  # has batches that are loaded outside the step
    encoder: nn.Module
    mean: Triple
    std: Triple

    def train(self, loading: bool, after_step: Callable[[], bool]) -> None: ...


class PillowImages(Dataset[tuple[Any, int]]):
    """Pillow images with labels, transformed as the libraries' own data sets do it."""

    def __init__(self, images: ImageSet, transform: Callable[[Image.Image], Any]) -> None:
        self.arrays = images.images[:].permute(0, 2, 3, 1).contiguous().numpy()
        self.labels, self.transform = images.labels.tolist(), transform

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return self.transform(Image.fromarray(self.arrays[i])), self.labels[i]


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch of tensors, in lists or tuples, on the device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    return [to_device(part, device) for part in batch]


class ReadyBatches(Sized, Iterable[Any]):
    """A few batches that are on the device already, repeated to the length of an epoch."""

    def __init__(self, loader: Iterable[Any], device: torch.device, length: int) -> None:
        self.batches = [to_device(batch, device) for batch in itertools.islice(loader, NUM_READY)]
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(itertools.cycle(self.batches), self.length)


def repeat_epochs(
    task: Task, loader: Iterable[Any], loading: bool, step: Callable[[Any, float], None], after_step: Callable[[], bool]
) -> None:
    """Call step(batch, progress) for every batch of every epoch, until after_step() says that it is enough."""
    batches = loader if loading else ReadyBatches(loader, task.device, task.steps_per_epoch)
    for epoch in range(task.epochs):
        for batch in batches:
            step(to_device(batch, task.device), epoch / task.epochs)
            if after_step():
                return


class LightlyBYOL:
    """lightly's heads, loss, momentum update, transforms and ResNet, in the loop of its PyTorch example.

    Settings are those of lightly's CIFAR-10 benchmark: SGD, momentum 0.99 of the teacher, cosine schedule per epoch,
    and no blur.
    """

    about, loads = "lightly's BYOL loop", True
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    packages: ClassVar = ("lightly.loss", "lightly.models", "lightly.transforms")

    def __init__(self, task: Task) -> None:
        from lightly.loss import NegativeCosineSimilarity
        from lightly.models import ResNetGenerator
        from lightly.models.modules.heads import BYOLPredictionHead, BYOLProjectionHead
        from lightly.models.utils import deactivate_requires_grad, update_momentum
        from lightly.transforms.byol_transform import BYOLTransform, BYOLView1Transform, BYOLView2Transform

        self.task, self.update_momentum = task, update_momentum
        resnet = ResNetGenerator("resnet-18")
        self.encoder = nn.Sequential(*list(resnet.children())[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.projector, self.predictor = BYOLProjectionHead(512, 1024, 256), BYOLPredictionHead(256, 1024, 256)
        self.teacher, self.teacher_projector = copy.deepcopy(self.encoder), copy.deepcopy(self.projector)
        for module in (self.teacher, self.teacher_projector):
            deactivate_requires_grad(module)
        parts = nn.ModuleList([self.encoder, self.projector, self.predictor])
        for module in (parts, self.teacher, self.teacher_projector):
            module.to(task.device)
        self.base_lr = 6e-2 * task.batch_size / 128
        self.optimizer = torch.optim.SGD(parts.parameters(), self.base_lr, momentum=0.9, weight_decay=5e-4)
        self.criterion = NegativeCosineSimilarity()
        size = task.images.size[0]
        transform = BYOLTransform(
            BYOLView1Transform(input_size=size, gaussian_blur=0.0),
            BYOLView2Transform(input_size=size, gaussian_blur=0.0),
        )
        self.loader = DataLoader(
            PillowImages(task.images, transform),
            task.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=task.workers,
            pin_memory=task.device.type == "cuda",
            persistent_workers=task.workers > 0,
        )

    def train(self, loading: bool, after_step: Callable[[], bool]) -> None:
        repeat_epochs(self.task, self.loader, loading, self.step, after_step)

    def step(self, batch: Any, progress: float) -> None:
        x0, x1 = batch[0]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.5 * self.base_lr * (1 + math.cos(math.pi * progress))
        self.update_momentum(self.encoder, self.teacher, m=0.99)
        self.update_momentum(self.projector, self.teacher_projector, m=0.99)
        with self.task.autocast():
            p0, p1 = (self.predictor(self.projector(self.encoder(x))) for x in (x0, x1))
            with torch.no_grad():
                z0, z1 = (self.teacher_projector(self.teacher(x)) for x in (x0, x1))
            loss = 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def solo_settings(task: Task) -> dict[str, Any]:
    """solo-learn's own settings for BYOL on CIFAR-10 (its scripts/pretrain/cifar), with our schedule's length."""
    view = {
        "rrc": {"enabled": True, "crop_min_scale": 0.08, "crop_max_scale": 1.0},
        "color_jitter": {"prob": 0.8, "brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1},
        "grayscale": {"prob": 0.2},
        "gaussian_blur": {"prob": 0.0},
        "solarization": {"prob": 0.0},
        "equalization": {"prob": 0.0},
        "horizontal_flip": {"prob": 0.5},
        "crop_size": task.images.size[0],
        "num_crops": 1,
    }
    return {
        "method": "byol",
        "backbone": {"name": "resnet18"},
        "method_kwargs": {"proj_hidden_dim": 4096, "proj_output_dim": 256, "pred_hidden_dim": 4096},
        "momentum": {"base_tau": 0.99, "final_tau": 1.0},
        "data": {"dataset": "cifar10", "num_classes": 10, "num_large_crops": 2, "num_small_crops": 0},
        "optimizer": {
            "name": "lars",
            "batch_size": task.batch_size,
            "lr": 1.0 * task.batch_size / 256,
            "classifier_lr": 0.1 * task.batch_size / 256,
            "weight_decay": 1e-5,
            "kwargs": {"clip_lr": True, "eta": 0.02, "exclude_bias_n_norm": True, "momentum": 0.9},
        },
        "scheduler": {"name": "warmup_cosine"},
        "max_epochs": task.epochs,
        "augmentations": [view, view | {"solarization": {"prob": 0.2}}],
    }


class SoloLearnBYOL:
    """solo-learn's BYOL module and transforms, trained by Lightning's Trainer as its main_pretrain.py does.

    bf16 replaces fp16, there is no logger, and one device needs no distributed strategy. Its ResNet-18 pads the first
    convolution by 2, so that feature maps are 34 pixels wide, and it also trains a linear classifier.
    """

    about, loads = "solo-learn's BYOL loop (LARS, 34-pixel feature maps, an online classifier)", True
    mean, std = CIFAR_MEAN, CIFAR_STD
    packages: ClassVar = ("solo.methods", "solo.data.pretrain_dataloader")

    def __init__(self, task: Task) -> None:
        from omegaconf import OmegaConf
        from solo.data import pretrain_dataloader as data
        from solo.methods import METHODS
        from solo.utils.misc import make_contiguous

        self.task, settings = task, OmegaConf.create(solo_settings(task))
        self.model = METHODS["byol"](settings)
        make_contiguous(self.model)
        self.model = self.model.to(memory_format=torch.channels_last)
        self.encoder = self.model.backbone
        views = [data.build_transform_pipeline("cifar10", view) for view in settings.augmentations]
        transform = data.prepare_n_crop_transform(views, [1, 1])
        dataset = data.dataset_with_index(PillowImages)(task.images, transform)
        self.loader = data.prepare_dataloader(dataset, task.batch_size, task.workers)

    def train(self, loading: bool, after_step: Callable[[], bool]) -> None:
        from lightning.pytorch import Callback
        from lightning.pytorch import Trainer as LightningTrainer

        class StopAfterStep(Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                trainer.should_stop = after_step()

        task, cuda = self.task, self.task.device.type == "cuda"
        batches = self.loader if loading else ReadyBatches(self.loader, task.device, task.steps_per_epoch)
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # advice, not errors
        trainer = LightningTrainer(
            max_epochs=task.epochs,
            accelerator="gpu" if cuda else "cpu",
            devices=[task.device.index or 0] if cuda else 1,
            precision="bf16-mixed" if cuda else "32-true",
            callbacks=[StopAfterStep()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(self.model, batches)


class PlainBYOL:
    """The plain PyTorch loop that `mixnn bench` compares with, here with bf16 autocast."""

    about, loads = "plain PyTorch loop, mixnn's networks", True
    packages: ClassVar = ()

    def __init__(self, task: Task) -> None:
        config = our_config(task, "byol")
        self.task, self.mean, self.std = task, task.images.mean, task.images.std
        self.plain = PlainLoop(task.images, config, task.workers)
        self.encoder = self.plain.method.student.f
        self.config = config

    def train(self, loading: bool, after_step: Callable[[], bool]) -> None:
        repeat_epochs(self.task, self.plain.loader, loading, self.step, after_step)

    def step(self, batch: Any, progress: float) -> None:
        for group in self.plain.optimizer.param_groups:
            group["lr"] = 0.5 * self.config.base_lr * (1 + math.cos(math.pi * progress))
        with self.task.autocast():
            self.plain.step(batch)


class Mixnn:
    """mixnn's trainer. The images are on the device and views are part of the step, so that nothing is loaded."""

    loads = False
    packages: ClassVar = ()

    def __init__(self, task: Task, method: str) -> None:
        self.task, self.mean, self.std = task, task.images.mean, task.images.std
        self.trainer = Trainer(our_config(task, method), task.images, Reporter(quiet=True))
        self.encoder = self.trainer.method.student.f
        self.about = f"mixnn, {method} ({self.trainer.mode}); a step makes its own views"

    def train(self, loading: bool, after_step: Callable[[], bool]) -> None:  # noqa: ARG002
        while not self.trainer.over:
            self.trainer._one_step()
            if after_step():
                return


def our_config(task: Task, method: str) -> Any:
    """mixnn's recipe of a method, with the task's settings."""
    config = bench_config(method, {}, task.backbone, task.images.size[0], task.batch_size, str(task.device), task.mode)
    return replace(config, epochs=task.epochs)


LOOPS: dict[str, Callable[[Task], Loop]] = {
    "lightly": LightlyBYOL,
    "solo-learn": SoloLearnBYOL,
    "plain": PlainBYOL,
    "mixnn-byol": lambda task: Mixnn(task, "byol"),
    "mixnn-mnn": lambda task: Mixnn(task, "mnn"),
}


def missing(name: str, task: Task) -> str:
    """Why a library cannot be used: what its import raises; empty if it can."""
    if name == "solo-learn" and task.solo_learn is not None and str(task.solo_learn) not in sys.path:
        sys.path.insert(0, str(task.solo_learn))
    for package in getattr(LOOPS[name], "packages", ()):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # deprecations inside the library
                importlib.import_module(package)
        except Exception as error:  # a build for another torch raises RuntimeError
            return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""
