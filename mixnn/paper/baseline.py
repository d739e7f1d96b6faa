"""The plain PyTorch loop that `bench` compares with: Pillow views in a DataLoader, eager execution, fp32.

Networks and loss are ours (on CUDA their batch norm has kernels of its own), so the comparison is about the loop: where
views are made, what is launched, and the precision.
"""

from __future__ import annotations

import os
import random
import time
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


def time_baseline(images: ImageSet, config: Config, views: list[View], seconds: float) -> dict[str, Any]:
    """Milliseconds per step of the plain loop, measured for about `seconds` after warm-up."""
    device = pick_device(config.device)
    workers = min(16, os.cpu_count() or 1)
    loader = DataLoader(
        PillowViews(images, views),
        config.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=device.type == "cuda",
    )
    facts = {"num_classes": images.num_classes, "num_images": len(images)}
    method = methods.build(config.method, make_backbone(config), config.options, **facts).to(device)
    parameters = [p for p in method.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, config.base_lr, config.sgd_momentum, weight_decay=config.weight_decay)
    steps, start = 0, time.perf_counter()
    for batch in loader:
        *x, labels, index = (t.to(device, non_blocking=True) for t in batch)
        plain_step(method, optimizer, tuple(x), labels, index)
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
        "precision": "fp32, TF32 convolutions" if device.type == "cuda" else "fp32",
    }


def plain_step(
    method: Any, optimizer: torch.optim.Optimizer, views: tuple[Tensor, ...], labels: Tensor, index: Tensor
) -> None:
    """Forward, backward, update, and a read of the loss."""
    draws = {n: torch.rand(s, device=labels.device) for n, s in method.draws(len(labels)).items()}
    loss, aux = method.forward_batch(Batch(views, labels, index, draws))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    method.update_state(aux)
    loss.item()  # for the log, as in most training loops
