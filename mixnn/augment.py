"""Random views of images, batched and on the images' device: crop, resize, flip, color jitter, grayscale, blur.

    x = augment(images, strong(32))                                 a view of each image, in your own loop
    two_views = TwoViews(strong(32), weak(32), mean, std)           the same as a module, for two views and normalized
    x1, x2 = two_views(images)

Every image has its own random numbers: `view.num_draws` uniforms in [0, 1). The caller may draw them. Then nothing
here is random, and a view can be compiled whole, captured in a CUDA graph, sliced by rank and repeated exactly after a
resume: the trainer does that. Without them, they come from torch's generator on the images' device.

Resampling is two matrix products per image, y = A_rows x A_cols^T, where A holds the weights of Pillow's bilinear
resize or of its Gaussian blur. Random crops, color jitter and grayscale follow torchvision's definitions. The result
differs from a Pillow pipeline in one thing: Pillow rounds to 8 bits after each pass, and nothing is rounded here.

Shapes: B images, C channels, H W height and width, O an output side, I an input side, R uniforms per image or rounds of
color jitter. Color operations need C = 3; the rest works for any C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mixnn.config import UserError
from mixnn.device import full_precision
from mixnn.registry import Registry

NUM_ATTEMPTS = 10  # torchvision's RandomResizedCrop tries this often, then takes the center
Planes = tuple[Tensor, ...]  # red, green, blue, each (B, H, W)
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)  # torchvision's numbering of the color jitter's operations


@dataclass(frozen=True)
class View:
    """How to make a view of size x size pixels.

    `flip`, `jitter`, `gray` and `blur` are probabilities; a stage with probability 0 costs nothing, not even draws.
    The strengths of color jitter are `brightness`, `contrast`, `saturation` and `hue`, that of blur is `sigma`, in
    pixels. `area` is the share of the image that a crop covers, `ratio` its width by its height.

    >>> view = mixnn.View(size=32, area=(0.2, 1), jitter=0.8, hue=0.2)
    """

    size: int
    area: tuple[float, float] = (0.2, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    jitter: float = 0.0
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    gray: float = 0.0
    blur: float = 0.0
    sigma: tuple[float, float] = (0.1, 2.0)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"size={self.size} must be at least 1")
        for name in ("flip", "jitter", "gray", "blur"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name}={getattr(self, name)} is a probability: give a number from 0 to 1")
        for name, high in (("area", 1.0), ("ratio", 100.0), ("sigma", 100.0)):
            a, b = getattr(self, name)
            if not 0 < a <= b <= high:
                raise UserError(f"{name}={(a, b)} must be (low, high) with 0 < low <= high <= {high:g}")
        if min(self.brightness, self.contrast, self.saturation) < 0 or not 0 <= self.hue <= 0.5:
            raise UserError("brightness, contrast and saturation must not be negative, hue must lie between 0 and 0.5")

    @property
    def draws(self) -> tuple[int, int, int, int, int]:
        """Columns of uniforms each stage takes, in the order of the stages: crop, flip, jitter, gray, blur."""
        on = [p > 0 for p in (self.flip, self.jitter, self.gray, self.blur)]
        return 2 * NUM_ATTEMPTS + 2, 1 * on[0], 9 * on[1], 1 * on[2], 2 * on[3]

    @property
    def num_draws(self) -> int:
        return sum(self.draws)


def strong(size: int, *, flip: float = 0.5, area: tuple[float, float] = (0.2, 1.0)) -> View:
    """The paper's strong view. Pass flip=0 where a mirror image means something else, as with digits.

    >>> mixnn.augment.strong(32).blur
    0.5
    """
    return View(size, area=area, flip=flip, jitter=0.8, gray=0.2, blur=0.5)


def weak(size: int, *, flip: float = 0.9, area: tuple[float, float] = (0.2, 1.0)) -> View:
    """The paper's weak view: crop and flip. The default of 0.9 is from the authors' code; the paper gives no number.

    >>> mixnn.augment.weak(32).jitter
    0.0
    """
    return View(size, area=area, flip=flip)


VIEWS: Registry[View | Callable[..., View]] = Registry(
    "view", "views", {"strong": strong, "weak": weak, "plain": partial(weak, flip=0.5)}
)
"""Registry: name -> View, or function of its size. A method names its views, and a run can change or replace each.

A function also gets area= and flip= from the settings of the run, if it has such parameters.
"""


def augment(
    images_BCHW: Tensor, view: View, u_BR: Tensor | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """A view of each image: float32 in [0, 1], not normalized, (B, C, size, size) in channels_last memory.

    The images are a uint8 tensor, or floats from 0 to 1, so normalize afterwards. Other floats are refused on the CPU,
    and clipped on a GPU, where a check would wait for the device. `u_BR` is a row of `view.num_draws` uniforms per
    image; default: new ones from the generator. It runs in float32 under autocast too.

    >>> mixnn.augment.augment(images, mixnn.augment.strong(24)).shape
    torch.Size([8, 3, 24, 24])
    """
    _check_images(images_BCHW, view)
    B, _, H, W = images_BCHW.shape
    device = images_BCHW.device
    if u_BR is None:
        u_BR = torch.rand(B, view.num_draws, device=device, generator=generator)
    if u_BR.shape != (B, view.num_draws) or u_BR.dtype != torch.float32:
        got = f"{u_BR.dtype} {tuple(u_BR.shape)}"
        raise ValueError(
            f"this view takes {view.num_draws} uniforms per image, float32 {(B, view.num_draws)}, not {got}"
        )
    if (kernels := _kernels(images_BCHW, view)) is not None:
        return kernels.make_view(images_BCHW, None, u_BR, view.size, _kernel_numbers(view, H, W))
    return plain_augment(images_BCHW, view, u_BR)


def plain_augment(images_BCHW: Tensor, view: View, u_BR: Tensor) -> Tensor:
    """`augment` in plain PyTorch."""
    H, W = images_BCHW.shape[2:]
    crop, flip, jitter, gray, blur = u_BR.split(view.draws, dim=1)
    with full_precision(images_BCHW.device):
        top_B, left_B, height_B, width_B = crop_boxes(crop, H, W, view)
        rows_BOH = resize_matrix(top_B, height_B, None, view.size, H)
        cols_BOW = resize_matrix(left_B, width_B, flip[:, 0] < view.flip if view.flip else None, view.size, W)
        # Converting and laying out as BHCW is one pass, and then both products of `resample` are plain bmm.
        x_BHCW = images_BCHW.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        x_BHCW = x_BHCW if images_BCHW.is_floating_point() else x_BHCW / 255
        x = resample(x_BHCW.transpose(1, 2), rows_BOH, cols_BOW)

        if view.jitter:
            factors_B4, order_B4 = jitter_parameters(jitter[:, 1:], view)
            x = torch.where(_per_image(jitter[:, 0] < view.jitter), color_jitter(x, factors_B4, order_B4), x)
        if view.gray:
            x = torch.where(_per_image(gray[:, 0] < view.gray), grayscale(x), x)
        if view.blur:
            sigma_B = _between(view.sigma, blur[:, 1])
            a_BOO = blur_matrix(sigma_B.masked_fill(blur[:, 0] >= view.blur, 0.0), view.size)  # sigma 0: unchanged
            x = resample(x, a_BOO, a_BOO)
        # Weights that sum to one up to rounding may leave [0, 1] by the last bit.
        return x.clamp(0, 1).contiguous(memory_format=torch.channels_last)


def _kernels(images: Tensor, view: View) -> ModuleType | None:
    """The kernels' module if it can make such a view; else None. A compiler fuses the plain version itself."""
    if not images.is_cuda or torch.compiler.is_compiling():
        return None
    try:
        from mixnn import augment_kernels
    except ImportError:  # no triton: torch installs it with CUDA, but not on Windows
        return None
    return augment_kernels if augment_kernels.supports(images, view.size) else None


def _kernel_numbers(view: View, height: int, width: int) -> dict[str, float]:
    """Arguments of the kernel for a view of images of this height and width; strengths are floats, not integers."""
    center_height, center_width = _center_crop(height, width, view.ratio)
    stages = ("flip", "jitter", "gray", "blur")
    names = ("area", "ratio", "brightness", "contrast", "saturation", "hue", "sigma")
    bounds = (view.area, _log_ratio(view), *_jitter_bounds(view), view.sigma)
    return {
        "center_height": center_height,
        "center_width": center_width,
        **{f"{name}_column": column for name, column in zip(stages, accumulate(view.draws[:-1]), strict=True)},
        **{name: 1.0 * getattr(view, name) for name in stages},
        **{f"{name}_low": 1.0 * low for name, (low, _) in zip(names, bounds, strict=True)},
        **{f"{name}_span": 1.0 * (high - low) for name, (low, high) in zip(names, bounds, strict=True)},
    }


def _check_images(images: Tensor, view: View) -> None:
    if not isinstance(images, Tensor):
        raise TypeError(f"images must be a tensor (B, C, H, W), not {_what(images)}")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise ValueError(f"images must be uint8, or floats from 0 to 1, not {images.dtype}")
    if images.dim() != 4:
        one = ": for one image, use image[None]" * (images.dim() == 3)
        raise ValueError(f"images must have the shape (B, C, H, W), not {tuple(images.shape)}{one}")
    if images.shape[1] != 3 and (view.jitter or view.gray):
        raise ValueError(f"color jitter and grayscale need 3 channels, and the images have {images.shape[1]}")
    if images.is_floating_point() and images.is_cpu and not torch.compiler.is_compiling() and images.numel():
        _check_range(images)


def _check_range(images: Tensor) -> None:
    """ValueError unless the values lie in 0..1; for the CPU, since it reads them."""
    low, high = (float(value) for value in images.detach().aminmax())
    if not 0 <= low <= high <= 1:
        raise ValueError(f"images have values from {low:.3g} to {high:.3g}: give uint8, or floats from 0 to 1")


def _what(value: object) -> str:
    """Describe what was given instead of a tensor, and how to convert it."""
    kind = type(value)
    if kind.__module__ == "numpy":
        return "a numpy array: use torch.from_numpy(images), with channels before height and width"
    if kind.__module__.startswith("PIL."):
        return "a PIL image: use torch.from_numpy(numpy.array(image)).permute(2, 0, 1)"
    if isinstance(value, tuple | list | dict):
        return f"a {kind.__name__}: if an item has a label, take the image out of it first"
    return f"a {kind.__name__}"


class Augment(nn.Module):
    """`augment` as a module, with normalization if mean and std are given: Augment(strong(32), mean, std)(images).

    It takes a batch, or a list of images (C, H, W) of any sizes. Use it on the GPU in a training loop, or on the CPU in
    the `collate_fn` of a DataLoader. Mean and std are per channel, on the 0..1 scale; they move with `.to(device)`. The
    module has no weights and works in eval mode as it does in training.

    >>> views = mixnn.augment.Augment(mixnn.augment.weak(24), mean=[0.5] * 3, std=[0.25] * 3)
    >>> views(images).shape
    torch.Size([8, 3, 24, 24])
    """

    mean: Tensor | None
    std: Tensor | None

    def __init__(self, view: View, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> None:
        super().__init__()
        if (mean is None) != (std is None):
            raise ValueError("give both mean and std, or neither")
        self.view = view
        for name, values in (("mean", mean), ("std", std)):
            tensor = None if values is None else torch.as_tensor(values, dtype=torch.float32)
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, images: Tensor | Sequence[Tensor], generator: torch.Generator | None = None) -> Tensor:
        if not isinstance(images, Tensor):
            if not isinstance(images, list | tuple) or not images:
                raise TypeError(f"images must be a tensor (B, C, H, W) or a list of tensors, not {_what(images)}")
            for image in images:
                if not isinstance(image, Tensor):
                    raise TypeError(f"each image of a list must be a tensor (C, H, W), not {_what(image)}")
            return torch.cat([self(image[None], generator) for image in images])
        x = augment(images, self.view, generator=generator)
        return x if self.mean is None or self.std is None else normalize(x, self.mean, self.std)

    def extra_repr(self) -> str:
        return str(self.view)


class TwoViews(nn.Module):
    """Two views of each image, made independently: x1, x2 = TwoViews(strong(32), weak(32), mean, std)(images).

    Without a second view, both are made like the first. See `Augment` for images, mean and std.

    >>> two_views = mixnn.augment.TwoViews(mixnn.augment.strong(24), mixnn.augment.weak(24))
    >>> x1, x2 = two_views(images)
    """

    def __init__(
        self,
        first: View,
        second: View | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.first, self.second = Augment(first, mean, std), Augment(second or first, mean, std)

    def forward(
        self, images: Tensor | Sequence[Tensor], generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.first(images, generator), self.second(images, generator)


def normalize(x_BCHW: Tensor, mean_C: Tensor, std_C: Tensor) -> Tensor:
    """(x - mean) / std by channel, in x's memory format. Mean and std must already lie on x's device.

    >>> mixnn.augment.normalize(torch.ones(1, 3, 1, 1), torch.tensor([0.5] * 3), torch.tensor([0.25] * 3)).flatten()
    tensor([2., 2., 2.])
    """
    return (x_BCHW - mean_C.view(-1, 1, 1)).div_(std_C.view(-1, 1, 1))


def make_views(
    images_BCHW: Tensor,
    index_B: Tensor | None,
    draws: Sequence[Tensor],
    views: Sequence[View],
    mean_C: Tensor,
    std_C: Tensor,
) -> tuple[Tensor, ...]:
    """Normalized views of the images at these positions, or of all. On CUDA a small view is one or two kernels."""
    chosen = [_kernels(images_BCHW, view) for view in views]
    if None in chosen or mean_C.dtype != torch.float32:
        images_BCHW = images_BCHW if index_B is None else images_BCHW[index_B]
        views_of_all = zip(draws, views, strict=True)
        return tuple(normalize(augment(images_BCHW, view, u_BR), mean_C, std_C) for u_BR, view in views_of_all)
    H, W = images_BCHW.shape[2:]
    return tuple(
        kernels.make_view(images_BCHW, index_B, u_BR, view.size, _kernel_numbers(view, H, W), mean_C, std_C)
        for kernels, u_BR, view in zip(chosen, draws, views, strict=True)
        if kernels
    )


def resample(x_BCHW: Tensor, rows_BOH: Tensor, cols_BOW: Tensor) -> Tensor:
    """A_rows x A_cols^T for every channel.

    An image's channels share its A. With memory in the order BHCW they merge with W for the first product and with the
    rows for the second, without a copy, and each product is one bmm; a broadcast over BCHW copies A for every channel
    first and was ten times slower on a CPU. The result is BCHW over such memory; other input is copied into it once.
    """
    B, C, H, W = x_BCHW.shape
    height, width = rows_BOH.shape[1], cols_BOW.shape[1]
    y = torch.bmm(rows_BOH, x_BCHW.transpose(1, 2).reshape(B, H, C * W))
    y = torch.bmm(y.view(B, height * C, W), cols_BOW.mT)
    return y.view(B, height, C, width).transpose(1, 2)


def crop_boxes(u_BR: Tensor, height: int, width: int, view: View) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Top, left, height and width of torchvision's RandomResizedCrop, as integers in float32.

    Columns of u: ten areas, ten log-uniform ratios, two offsets. The first attempt that fits into the image wins.
    """
    area_u, ratio_u, offset_u = u_BR.split((NUM_ATTEMPTS, NUM_ATTEMPTS, 2), dim=1)
    target = _between(view.area, area_u) * (height * width)
    ratio = _between(_log_ratio(view), ratio_u).exp()
    w, h = (target * ratio).sqrt().round(), (target / ratio).sqrt().round()
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    first = fits.int().argmax(1, keepdim=True)  # argmax returns the first of equals
    found = fits.any(1)

    fallback_h, fallback_w = _center_crop(height, width, view.ratio)
    h_B = h.gather(1, first)[:, 0].masked_fill(~found, fallback_h)
    w_B = w.gather(1, first)[:, 0].masked_fill(~found, fallback_w)
    # floor(u * n) < n also in float32, for the largest u is 1 - 2^-24.
    top_B = (offset_u[:, 0] * (height - h_B + 1)).floor().masked_fill(~found, (height - fallback_h) // 2)
    left_B = (offset_u[:, 1] * (width - w_B + 1)).floor().masked_fill(~found, (width - fallback_w) // 2)
    return top_B, left_B, h_B, w_B


def _log_ratio(view: View) -> tuple[float, float]:
    return math.log(view.ratio[0]), math.log(view.ratio[1])


def _center_crop(height: int, width: int, ratio: tuple[float, float]) -> tuple[int, int]:
    """Height and width of the largest box whose width/height ratio is allowed."""
    if width / height < ratio[0]:
        return round(width / ratio[0]), width
    if width / height > ratio[1]:
        return height, round(height * ratio[1])
    return height, width


def resize_matrix(start_B: Tensor, length_B: Tensor, flip_B: Tensor | None, num_out: int, num_in: int) -> Tensor:
    """Weights (B, O, I) of Pillow's BILINEAR resize of the pixels [start, start + length), mirrored where flip is true.

    A triangle that reaches one pixel to each side, further in proportion when shrinking; pixels outside the box get 0.
    """
    scale_B1 = (length_B / num_out)[:, None]
    out = torch.arange(num_out, device=start_B.device, dtype=torch.float32)[None]
    if flip_B is not None:
        out = torch.where(flip_B[:, None], num_out - 1 - out, out)
    center_BO = (out + 0.5) * scale_B1  # both measured from the edge of the box
    pixel_BI = torch.arange(num_in, device=start_B.device, dtype=torch.float32) + 0.5 - start_B[:, None]
    pixel_BI = pixel_BI.masked_fill((pixel_BI < 0) | (pixel_BI > length_B[:, None]), math.inf)
    distance = (pixel_BI[:, None] - center_BO[:, :, None]).abs()
    weight = (scale_B1.clamp(min=1)[:, :, None] - distance).clamp(min=0)
    return weight / weight.sum(2, keepdim=True)


def blur_matrix(sigma_B: Tensor, n: int) -> Tensor:
    """Weights (B, n, n) of Pillow's GaussianBlur(sigma) along one side: three box blurs of fractional radius.

    The radius follows Gwosdek et al. 2011, eqs. 7, 11 and 14. A box of radius r gives the pixel d away the weight
    clamp(r + 1 - |d|, 0, 1) / (2r + 1). Its running sum is clamp((r + 1 + d) / (2r + 1), 0, 1), and differences of that
    replicate the edges as Pillow does: the first pixel takes all that lies before it, the last all that lies behind.
    """
    variance = sigma_B * sigma_B / 3
    full = (((12 * variance + 1).sqrt() - 1) / 2).floor()
    part = (2 * full + 1) * (full * (full + 1) - 3 * variance) / (6 * (variance - (full + 1) ** 2))
    radius = (full + part)[:, None, None]
    i = torch.arange(n, device=sigma_B.device, dtype=torch.float32)
    sum_through = ((radius + 1 + (i[:-1] - i[:, None])) / (2 * radius + 1)).clamp(0, 1)  # (B, n, n - 1)
    box_Bnn = pad(pad(sum_through, (1, 0), value=0.0), (0, 1), value=1.0).diff(dim=2)
    return torch.bmm(torch.bmm(box_Bnn, box_Bnn), box_Bnn)


def jitter_parameters(u_B8: Tensor, view: View) -> tuple[Tensor, Tensor]:
    """Factors and order for `color_jitter`: four uniforms give the factors, the ranks of four more the order."""
    factors = [_between(bounds, u_B8[:, i]) for i, bounds in enumerate(_jitter_bounds(view))]
    return torch.stack(factors, dim=1), u_B8[:, 4:].argsort(dim=1)


def _jitter_bounds(view: View) -> list[tuple[float, float]]:
    blends = [(max(0.0, 1 - s), 1 + s) for s in (view.brightness, view.contrast, view.saturation)]
    return [*blends, (-view.hue, view.hue)]


def color_jitter(x_BCHW: Tensor, factors_B4: Tensor, order_B4: Tensor) -> Tensor:
    """torchvision's ColorJitter, each image in its own order.

    order[:, k] is the operation of round k, factors[:, i] belongs to operation i. Hue is by far the most expensive and
    occurs once, so it is computed once: blends before it, hue, blends after it. A blend that belongs to the other side
    gets factor 1, which changes nothing. Four rounds of everything would compute four hues. Planes (B, H, W) instead of
    one tensor give every operation the shape of the reduction in `_blend`, so that the compiler can fuse the rounds.
    """
    in_order = factors_B4.gather(1, order_B4)
    round_4 = torch.arange(4, device=x_BCHW.device)
    hue_round = (order_B4 == HUE).int().argmax(1, keepdim=True)
    rgb = _blend(x_BCHW.unbind(1), in_order.masked_fill(round_4 >= hue_round, 1.0)[:, :3], order_B4[:, :3])
    rgb = shift_hue(rgb, factors_B4[:, HUE])
    rgb = _blend(rgb, in_order.masked_fill(round_4 <= hue_round, 1.0)[:, 1:], order_B4[:, 1:])
    return torch.stack(rgb, dim=1)


def _blend(rgb: Planes, factor_BR: Tensor, operation_BR: Tensor) -> Planes:
    """Round of x <- clamp(f x + (1 - f) other): other is black, the mean of the gray image or the gray image."""
    to_mean_BR = (1 - factor_BR) * (operation_BR == CONTRAST)
    to_gray_BR = (1 - factor_BR) * (operation_BR == SATURATION)
    rounds = torch.stack((factor_BR, to_mean_BR, to_gray_BR))[..., None, None]  # (3, B, R, 1, 1)
    for factor, to_mean, to_gray in rounds.unbind(2):
        gray = _luma(rgb)
        other = torch.addcmul(gray.mean((1, 2), keepdim=True) * to_mean, gray, to_gray)
        rgb = tuple(torch.addcmul(other, plane, factor).clamp(0, 1) for plane in rgb)
    return rgb


def shift_hue(rgb: Planes, shift_B: Tensor) -> Planes:
    """RGB to HSV, hue + shift (in turns), back to RGB, on planes (B, H, W); hue is in sixths of a turn on the way."""
    r, g, b = rgb
    value = torch.maximum(torch.maximum(r, g), b)
    chroma = value - torch.minimum(torch.minimum(r, g), b)
    sector = torch.where(value == r, g - b, torch.where(value == g, b - r + 2 * chroma, r - g + 4 * chroma))
    # Gray has chroma 0 and sector 0, and stays as it is.
    hue = sector / chroma.clamp(min=1e-12) + 6 * shift_B[:, None, None]
    # Each channel is the same trapezoid of the hue, a third of a turn apart.
    return tuple(value - chroma * (2 - ((hue + n).remainder(6) - 2).abs()).clamp(0, 1) for n in (5, 3, 1))


def grayscale(x_BCHW: Tensor) -> Tensor:
    """Luma, (B, 1, H, W)."""
    return _luma(x_BCHW.unbind(1)).unsqueeze(1)


def _luma(rgb: Planes) -> Tensor:
    r, g, b = rgb
    return (0.2989 * r).add(g, alpha=0.587).add(b, alpha=0.114)  # torchvision's weights, those of ITU-R BT.601


def _between(bounds: tuple[float, float], u: Tensor) -> Tensor:
    return bounds[0] + (bounds[1] - bounds[0]) * u


def _per_image(value_B: Tensor) -> Tensor:
    return value_B.view(-1, 1, 1, 1)
