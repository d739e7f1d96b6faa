"""The augmentations that a run's configuration asks for."""

from __future__ import annotations

from mixnn.augment import View, strong, weak
from mixnn.config import Config
from mixnn.data import ImageSet


def pipelines(config: Config, images: ImageSet, kinds: tuple[str, ...]) -> list[View]:
    """The augmentation of each view; no flips where a mirrored image is another image."""
    area = (config.crop_area, 1.0)
    made = {
        "strong": strong(config.image_size, area=area, flip=0.5 if images.mirror else 0.0),
        "weak": weak(config.image_size, area=area, flip=config.weak_flip if images.mirror else 0.0),
        "plain": weak(config.image_size, area=area, flip=0.5 if images.mirror else 0.0),
    }
    return [made[kind] for kind in kinds]
