"""The plain PyTorch loop that `bench` compares with: Pillow views in a DataLoader, eager execution, fp32.

Networks and loss are ours (on CUDA their batch norm has kernels of its own), so the comparison is about the loop: where
views are made, what is launched, and the precision.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mixnn import methods
from mixnn.augment import View
from mixnn.config import Config
from mixnn.data import ImageSet
from mixnn.device import pick_device
from mixnn.methods import Batch
from mixnn.runs.weights import make_backbone
from mixnn.training.views import configured_views

NUM_WARMUP_STEPS = 5


class PillowViews(Dataset[tuple[Tensor, ...]]):
    """For each image: its views, made by Pillow, its label and its index."""

    def __init__(self, images: ImageSet, views: list[View]) -> None:
        self.arrays = images.images[:].permute(0, 2, 3, 1).contiguous().numpy()
        self.mean, self.std = (np.array(v, np.float32)[:, None, None] for v in (images.mean, images.std))
        self.views, self.labels = views, images.labels

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        image = Image.fromarray(self.arrays[i])
        return *(self._tensor(transform(image, view)) for view in self.views), self.labels[i], torch.tensor(i)

    def _tensor(self, image: Image.Image) -> Tensor:
        x = np.asarray(image, np.float32).transpose(2, 0, 1) / 255
        return torch.from_numpy((x - self.mean) / self.std)


def transform(image: Image.Image, view: View) -> Image.Image:
    """One random view of an image."""
    image = crop(image, view)
    if random.random() < view.flip:
        image = ImageOps.mirror(image)
    if random.random() < view.jitter:
        image = jitter(image, view)
    if random.random() < view.gray:
        image = ImageOps.grayscale(image).convert("RGB")
    if random.random() < view.blur:
        image = image.filter(ImageFilter.GaussianBlur(random.uniform(*view.sigma)))
    return image


def crop(image: Image.Image, view: View) -> Image.Image:
    """A random crop, resized to the view's size."""
    width, height = image.size
    for _ in range(10):
        area = width * height * random.uniform(*view.area)
        ratio = np.exp(random.uniform(*np.log(view.ratio)))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            image = image.crop((left, top, left + w, top + h))
            break
    return image.resize((view.size, view.size), Image.Resampling.BILINEAR)


def jitter(image: Image.Image, view: View) -> Image.Image:
    """Brightness, contrast, saturation and hue changed at random, in random order."""
    steps: list[Any] = [
        (ImageEnhance.Brightness, view.brightness),
        (ImageEnhance.Contrast, view.contrast),
        (ImageEnhance.Color, view.saturation),
        None,  # hue
    ]
    random.shuffle(steps)
    for step in steps:
        if step is None:
            hsv = np.array(image.convert("HSV"))
            hsv[..., 0] += np.uint8(round(random.uniform(-view.hue, view.hue) * 255) % 256)
            image = Image.fromarray(hsv, "HSV").convert("RGB")
        else:
            image = step[0](image).enhance(random.uniform(1 - step[1], 1 + step[1]))
    return image


class PlainLoop:
    """The parts of the plain loop: a DataLoader of views, the method with its optimizer, and a step."""

    def __init__(self, images: ImageSet, config: Config, workers: int) -> None:
        self.device = pick_device(config.device)
        facts = {"num_classes": images.num_classes, "num_images": len(images)}
        self.method = methods.build(config.method, make_backbone(config), config.options, **facts).to(self.device)
        self.optimizer = torch.optim.SGD(
            self.method.trained_parameters(), config.base_lr, config.sgd_momentum, weight_decay=config.weight_decay
        )
        self.loader: DataLoader[tuple[Tensor, ...]] = DataLoader(
            PillowViews(images, configured_views(config, images.mirror, self.method.views)),
            config.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            pin_memory=self.device.type == "cuda",
        )

    def step(self, batch: Iterable[Tensor]) -> None:
        """Forward, backward, update, and a read of the loss."""
        *views, labels, index = (t.to(self.device, non_blocking=True) for t in batch)
        draws = {n: torch.rand(s, device=self.device) for n, s in self.method.draws(len(labels)).items()}
        loss, aux = self.method.forward_batch(Batch(tuple(views), labels, index, draws))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.method.update_state(aux)
        loss.item()  # for the log, as in most training loops


def time_baseline(images: ImageSet, config: Config, seconds: float) -> dict[str, Any]:
    """Milliseconds per step of the plain loop, measured for about `seconds` after warm-up."""
    workers = min(16, os.cpu_count() or 1)
    loop = PlainLoop(images, config, workers)
    steps, start = 0, time.perf_counter()
    for batch in loop.loader:
        loop.step(batch)
        steps += 1
        if steps == NUM_WARMUP_STEPS:
            start = time.perf_counter()
        if steps > NUM_WARMUP_STEPS and time.perf_counter() - start > seconds:
            break
    spent = time.perf_counter() - start
    return {
        "ms_per_step": round(1e3 * spent / (steps - NUM_WARMUP_STEPS), 2),
        "steps": steps - NUM_WARMUP_STEPS,
        "workers": workers,
        "precision": "fp32, TF32 convolutions" if loop.device.type == "cuda" else "fp32",
    }
