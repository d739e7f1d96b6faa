"""A run's encoder, ready to use: uint8 images in, float32 vectors out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from mixnn.augment import normalize
from mixnn.config import Config, UserError, calling
from mixnn.data import Images, open_images
from mixnn.data.image_set import NORMALIZATIONS
from mixnn.device import pick_device
from mixnn.files import expand
from mixnn.nn.backbone import Network, build_backbone
from mixnn.nn.folding import folded
from mixnn.progress import Reporter, reporter_for
from mixnn.registry import UnknownName
from mixnn.runs import Run
from mixnn.runs.checkpoint import name_of
from mixnn.runs.layout import PREFIX, Layout, read_layout
from mixnn.runs.weights import STARTS, load_weights, read_backbone, read_card, read_tensors, trained_backbone

BATCH = 256  # images decoded and encoded at a time


def image_features(backbone: nn.Module, images_BCHW: Tensor, mean_C: Tensor, std_C: Tensor) -> Tensor:
    """Features of a batch, float32 (B, F). The images are uint8, or float32 in 0..1; they are normalized here."""
    if images_BCHW.dtype == torch.uint8:
        images_BCHW = (images_BCHW.float() / 255).contiguous(memory_format=torch.channels_last)
    return backbone(normalize(images_BCHW, mean_C, std_C)).float()


def enlarged(images_u8: Tensor, size: int) -> Tensor:
    """Images whose shorter side is smaller than `size`, enlarged to it; others as they are."""
    height, width = images_u8.shape[2:]
    if min(height, width) >= size:
        return images_u8
    sides = [max(size, round(side * size / min(height, width))) for side in (height, width)]
    large = torch.nn.functional.interpolate(images_u8.float(), sides, mode="bilinear", align_corners=False)
    return large.round_().to(torch.uint8)


class Encoder(nn.Module):
    """A run's backbone in eval mode, with the normalization it was trained with.

    encoder(images) takes a uint8 tensor or array (B, 3, H, W), best at `size` x `size`, and returns a tensor (B, F).
    Smaller images are enlarged to `size`, as files are; an exported program leaves that to its caller.
    encoder.files(paths) returns an array (M, F) for image files. `origin` is the name of the file with the weights.
    `layout`, for a folder of aligned images: then a vector also says where things are (see layout.py).
    """

    mean: Tensor
    std: Tensor
    layout: Layout | None

    def __init__(
        self, backbone: nn.Module, size: int, mean: Tensor, std: Tensor, origin: str = "", layout: Layout | None = None
    ) -> None:
        super().__init__()
        self.backbone, self.size, self.origin = backbone, size, origin
        features: int = backbone.num_features  # type: ignore[assignment]
        self.num_features = features + (0 if layout is None else layout.mean.numel())
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.layout = layout
        self.eval().requires_grad_(False)

    def forward(self, images_u8: Tensor | np.ndarray) -> Tensor:
        return self._vectors(images_u8, self.backbone)

    def _vectors(self, images_u8: Tensor | np.ndarray, backbone: nn.Module) -> Tensor:
        if isinstance(images_u8, np.ndarray):
            images_u8 = torch.from_numpy(np.ascontiguousarray(images_u8)).to(self.device)
        if not isinstance(images_u8, Tensor):
            got = type(images_u8).__name__
            raise UserError(
                f"the encoder takes a tensor of images, not a {got}: for image files, use encoder.files(paths)"
            )
        if images_u8.dtype != torch.uint8 or images_u8.dim() != 4 or images_u8.shape[1] != 3:
            got = f"{str(images_u8.dtype).removeprefix('torch.')} {tuple(images_u8.shape)}"
            raise UserError(f"the encoder takes a uint8 tensor (images, 3, height, width), not {got}")
        if not (torch.onnx.is_in_onnx_export() or torch.compiler.is_compiling()):
            images_u8 = enlarged(images_u8, self.size)
        features = image_features(backbone, images_u8, self.mean, self.std)
        return features if self.layout is None else self.layout(features, images_u8)

    def files(self, paths: str | Path | Sequence[str | Path]) -> np.ndarray:
        """Vectors of image files, (M, F), in their order; UserError names the files that cannot be read."""
        images = open_images([paths] if isinstance(paths, str | Path) else paths)
        batches = list(self.encode(images))
        unreadable = [f"{name}: {why}" for _, _, skipped in batches for name, why in skipped]
        if unreadable:
            raise UserError("\n".join(["cannot read:", *unreadable]))
        return np.concatenate([self._no_vectors(), *(vectors for _, vectors, _ in batches)])

    @torch.no_grad()
    def encode(
        self, images: Images, first: int = 0, every: int = 1
    ) -> Iterator[tuple[list[str], np.ndarray, list[tuple[str, str]]]]:
        """Yield for each batch: names, their vectors, and (name, reason) of the images that cannot be read.

        `first` and `every` select batches: first, first + every, first + 2 * every, ...
        """
        backbone = folded(self.backbone) if len(images) > BATCH else self.backbone  # for fewer the copy does not pay
        if every > 1:
            starts = range(first * BATCH, len(images), every * BATCH)
            images = images.rows([i for start in starts for i in range(start, min(start + BATCH, len(images)))])
        for batch in images.batches(BATCH, self.size):
            vectors = self._vectors(batch.u8, backbone).cpu().numpy() if batch.names else self._no_vectors()
            yield batch.names, vectors, batch.skipped

    def _no_vectors(self) -> np.ndarray:
        return np.empty((0, self.num_features), np.float32)

    @property
    def device(self) -> torch.device:
        return self.mean.device


def load(run: str | Path | Run, device: str = "auto", *, backbone: Network | None = None) -> Encoder:
    """The encoder of a run folder or of an exported .safetensors file; or "imagenet", the one that folders start from.

    `backbone`: for a network of your own without a registered name, that module or the function that makes it. Its
    weights are replaced, in a copy, by those of the run.

    >>> encoder = mixnn.load("runs/photos")
    >>> encoder.files(["photos/cat0.png"]).shape
    (1, 128)
    """
    if backbone is not None and not callable(backbone):  # modules are callable too
        raise UserError(
            "backbone= takes the network that was trained: a torch.nn.Module, or the function that makes it"
        )
    if not isinstance(run, Run):
        path = expand(run)
        if str(run) in STARTS and not (path / "config.yaml").is_file():  # any other folder may have that name
            return place(read_start(str(run)), pick_device(device))
        if path.suffix == ".safetensors" and not path.is_dir():
            return place(read_export(path, backbone), pick_device(device))
        run = Run.open(path)
    run = run if backbone is None else replace(run, network=backbone)
    return load_encoder(run, device, reporter_for(False))


def load_encoder(run: Run, device: str, reporter: Reporter) -> Encoder:
    """The encoder of a run. The reporter hears of damaged checkpoints that were passed over."""
    return place(encoder_from_checkpoint(run, *run.load_checkpoint(reporter.warn)), pick_device(device))


def place(encoder: Encoder, device: torch.device) -> Encoder:
    """The encoder on a device, in the memory format that is fastest there."""
    return encoder.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]


def encoder_from_checkpoint(run: Run, tensors: dict[str, Tensor], state: dict[str, Any]) -> Encoder:
    """The encoder in a checkpoint that is already loaded, on the CPU."""
    mean, std = (torch.tensor(state["data"][k]) for k in ("mean", "std"))
    backbone, size = trained_backbone(run, tensors), run.config.encoding_size
    return Encoder(backbone, size, mean, std, name_of(state["step"]), read_layout(tensors))


def read_start(name: str) -> Encoder:
    """The encoder of a name in STARTS as it comes, without any training, on the CPU."""
    start = STARTS[name]
    config = Config(backbone=start.backbone, image_size=start.image_size, bn_groups=1)
    mean, std = map(torch.tensor, NORMALIZATIONS[start.normalization])
    return Encoder(read_backbone(name, config), start.image_size, mean, std, name)


def read_export(path: Path, network: Network | None = None) -> Encoder:
    """The encoder in a .safetensors file that `export` wrote, on the CPU. The header describes it.

    `network`: the one it was trained with, if that is the user's own. No code is imported because the header names it.
    """
    try:
        weights, _ = read_tensors(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    card = read_card(path)
    if card is None:
        raise UserError(
            f"{path} was not written by `{calling('export')}`: give a run folder or an exported file\n"
            f"to start training from other weights, use {calling('pretrain', ..., init_from=path)}"
        )
    name = card.backbone
    try:
        backbone, layout = build_backbone(name, card.trained_size, 1, network=network), read_layout(weights)
    except UnknownName:
        module, _, function = name.rpartition(":")
        advice = f"import the code that registers {name}, or give the network: mixnn.load(file, backbone=network)"
        if module:
            advice = f"give the network, which is {function} of {module}: mixnn.load(file, backbone={function})"
        raise UserError(
            f"{path} holds a {name}, which is neither part of this version of mixnn nor imported\n{advice}"
        ) from None
    load_weights(backbone, {k: t for k, t in weights.items() if not k.startswith(PREFIX)}, str(path))
    return Encoder(backbone, card.size, torch.tensor(card.mean), torch.tensor(card.std), path.name, layout)
