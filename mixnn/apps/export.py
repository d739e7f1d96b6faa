"""export: a run's encoder as one file for others, with a model card that says what it is and how to prepare images.

safetensors  the weights alone; read by `mixnn.load`. A ResNet has torchvision's names, for torchvision and timm
onnx, pt2    programs (ONNX, torch.export) from uint8 images to features; each is run and compared before it is written

To add a format: a function of an encoder, a card and an opset that returns the bytes of a file, and its row in WRITERS.
"""

from __future__ import annotations

import importlib
import io
import json
import warnings
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from mixnn import methods
from mixnn.apps.report.run_data import RunData, read_files
from mixnn.config import RUN_OR_FOLDER, Config, Overwrite, Param, UserError, calling, setting, verb
from mixnn.data import configured_dataset
from mixnn.data.image_set import NORMALIZATIONS
from mixnn.files import check_writable, expand, write_atomically
from mixnn.nn.backbone import BUILT_IN, TIMM, Network
from mixnn.nn.efficientnet import EPS, STAGES, EfficientNetLite0
from mixnn.nn.resnet import ARCHITECTURES, Bottleneck, ResNet
from mixnn.progress import Reporter, reporter_for
from mixnn.runs import Run
from mixnn.runs.encoder import Encoder, encoder_from_checkpoint
from mixnn.runs.folder import environment
from mixnn.runs.start import open_run
from mixnn.runs.weights import (
    CARD,
    CARD_VERSION,
    CHECKSUM,
    NO_CHECKSUM,
    NO_START,
    STARTS,
    TORCHVISION,
    make_backbone,
    tensor_file,
    with_checksum,
)

__all__ = ["export"]

OPSET = 17  # every recent runtime reads it; later ones add nothing that these networks use
OPSETS = range(13, 21)  # those that torch's exporter writes and the tests cover
TOLERANCE = 1e-4  # relative to the largest feature, if that is above 1; other kernels round differently
BATCHES = (1, 3)  # batch sizes that a program is tested with; it is traced with 2
# Settings on the card. A card is published, so each is listed here: none may reveal a folder of the user's machine.
SETTINGS = (
    *("batch_size", "lr", "warmup_epochs", "sgd_momentum", "weight_decay", "bn_groups", "crop_area", "weak_flip"),
    *("augmentation", "mirror", "precision", "seed"),
)
MAX_STARTS = 9  # runs on the card that started from each other
CHECKSUM_PLACES = {"safetensors": "the header", "onnx": "metadata_props", "pt2": "the comment of the zip file"}
PROGRAM = {
    "takes": "images: uint8 RGB, (batch, 3, height, width), any batch; best at the size below",
    "gives": "features: float32 (batch, features)",
    "normalization": "inside: scale, mean and std below are applied already",
}
WEIGHTS = {
    "takes": "float32 RGB, (batch, 3, height, width), scaled and normalized as below",
    "gives": "after the mean over pixels: float32 (batch, features)",
}


@verb
def export(
    run: Annotated[str | Path | Run, RUN_OR_FOLDER],
    out: Annotated[str | Path, Param("the file [RUN/encoder.FORMAT]", flag="--out", metavar="FILE")] = "",
    *,
    output: Annotated[
        str, Param("format of the file [as its name ends, else safetensors]", choices=tuple(WRITERS), flag="--format")
    ] = "",
    weights_license: Annotated[
        str, Param("license of the weights, for the model card", flag="--license", metavar="TEXT")
    ] = "",
    opset: Annotated[int, Param("ONNX operator set", low=OPSETS[0], high=OPSETS[-1])] = OPSET,
    overwrite: Overwrite = False,
    verbose: bool | Reporter = False,
) -> Path:
    """Write the encoder of a run's last checkpoint to one file (default: encoder.FORMAT in the run folder).

    The name of the file says the format, unless you give it as `output`: safetensors, onnx or pt2. The card is stored
    inside the file, and next to it as FILE.json.

    >>> mixnn.export("runs/photos", "encoder.safetensors")
    PosixPath('encoder.safetensors')
    >>> encoder = mixnn.load("encoder.safetensors")

    Examples:
        mixnn export runs/photos
        mixnn export runs/photos --format onnx --out encoder.onnx
    """
    reporter = reporter_for(verbose)
    run = open_run(run, reporter)
    ending = expand(out).suffix[1:] if str(out) else ""
    output = output or (ending if ending in WRITERS else "safetensors")
    out = expand(out) if str(out) else run.path / f"encoder.{output}"
    card_file = out.with_name(f"{out.name}.json")
    _check_name(out, output)
    for path in (out, card_file):
        check_writable(path, overwrite)
    if output == "onnx":
        _check_onnx()
    tensors, state = run.load_checkpoint(reporter.warn)
    encoder = encoder_from_checkpoint(run, tensors, state)
    card = json.dumps(make_card(run, state, output, weights_license, reporter), indent=1)
    try:
        content = WRITERS[output](encoder, card, opset, reporter)
    except UserError:
        raise
    except Exception as error:  # torch's exporters raise many kinds, for networks that they cannot trace
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{run.config.backbone} cannot be written as {output}: {reason}\n"
            f"use {setting('output', 'safetensors')}, which holds the weights of any network"
        ) from error
    write_atomically(out, content)
    write_atomically(card_file, (card + "\n").encode())
    reporter.info(
        f"{run.config.backbone} of step {state['step']:,} in {out} ({len(content) / 1e6:.1f} MB), card in {card_file}"
    )
    return out


def _check_name(out: Path, form: str) -> None:
    if out.suffix == f".{form}":
        return
    other = f" or {setting('output', out.suffix[1:])}" if out.suffix[1:] in WRITERS else ""
    raise UserError(f"{out} does not end in .{form}: use {setting('out', out.with_suffix(f'.{form}'))}{other}")


def _check_onnx() -> None:
    try:
        importlib.import_module("onnx")
    except ImportError:
        raise UserError(f'{setting("output", "onnx")} needs the onnx package: run pip install "mixnn[onnx]"') from None


def to_safetensors(encoder: Encoder, card: str, _opset: int, _reporter: Reporter) -> bytes:
    weights = {name: t.contiguous() for name, t in encoder.backbone.state_dict().items()}
    weights |= encoder.layout.tensors() if encoder.layout else {}
    return tensor_file(weights, {"format": "pt", CARD: card})  # other readers look for "format"


def to_onnx(encoder: Encoder, card: str, opset: int, reporter: Reporter) -> bytes:
    """A model with input `images` and output `features`.

    From the TorchScript exporter: the newer one also needs onnxscript, and its graph would be the same.
    """
    import onnx

    sides = {0: "batch"} if encoder.layout is not None else {0: "batch", 2: "height", 3: "width"}
    try:
        traced = _trace_onnx(encoder, opset, sides)
    except torch.onnx.errors.OnnxExporterError:  # such as adaptive pooling to more than one pixel
        traced = _trace_onnx(encoder, opset, {0: "batch"})
        reporter.warn(f"the ONNX file takes images of {encoder.size} x {encoder.size} pixels only")
    model = onnx.load_from_string(traced)
    onnx.helper.set_model_props(model, {CARD: card, CHECKSUM: NO_CHECKSUM})
    onnx.checker.check_model(model)
    content = with_checksum(model.SerializeToString())
    try:
        import onnxruntime
    except ImportError:
        reporter.warn("the ONNX file was not compared with the encoder: use pip install onnxruntime for that")
        return content
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    _compare(encoder, lambda u8: torch.from_numpy(session.run(None, {"images": u8.numpy()})[0]), "ONNX file", reporter)
    return content


def _trace_onnx(encoder: Encoder, opset: int, sides: dict[int, str]) -> bytes:
    buffer: Any = io.BytesIO()  # accepted, though the annotations do not say so
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):  # if it fails, it prints the graph
        warnings.simplefilter("ignore")  # that this exporter is the older one
        torch.onnx.export(
            encoder, (_noise(encoder, 2),), buffer, dynamo=False, opset_version=opset,
            input_names=["images"], output_names=["features"], dynamic_axes={"images": sides, "features": {0: "batch"}},
        )  # fmt: skip
    return buffer.getvalue()


def to_pt2(encoder: Encoder, card: str, _opset: int, reporter: Reporter) -> bytes:
    dim: Any = torch.export.Dim
    sides = {0: dim("batch", min=1)} | ({} if encoder.layout is not None else {2: dim.AUTO, 3: dim.AUTO})
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, which a user can do nothing about
        program = torch.export.export(encoder, (_noise(encoder, 2),), dynamic_shapes=(sides,))
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # it names folders of this machine
        torch.export.save(program, buffer, extra_files={f"{CARD}.json": card})
        content = with_checksum(_with_comment(buffer.getvalue(), f"{CHECKSUM}={NO_CHECKSUM}".encode()))
        reloaded = torch.export.load(io.BytesIO(content)).module()
    _compare(encoder, reloaded, "torch.export program", reporter)
    return content


def _with_comment(archive: bytes, comment: bytes) -> bytes:
    """A zip file with a comment: its length and text are the last bytes of the file."""
    assert archive[-22:-18] == b"PK\5\6", "the end of a zip file without a comment"
    return archive[:-2] + len(comment).to_bytes(2, "little") + comment


WRITERS: dict[str, Callable[[Encoder, str, int, Reporter], bytes]] = {
    "safetensors": to_safetensors,
    "onnx": to_onnx,
    "pt2": to_pt2,
}


def _noise(encoder: Encoder, count: int) -> Tensor:
    """Images of noise, the same in every export."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, 3, encoder.size, encoder.size), dtype=torch.uint8, generator=generator)


@torch.no_grad()
def _compare(encoder: Encoder, program: Callable[[Tensor], Tensor], what: str, reporter: Reporter) -> None:
    """UserError if the features of a program differ from those of the encoder."""
    found, expected = (torch.cat([f(_noise(encoder, count)) for count in BATCHES]) for f in (program, encoder))
    error = float((found - expected).abs().max() / expected.abs().max().clamp(min=1))
    if not error <= TOLERANCE:  # true for NaN too
        raise UserError(f"the {what} differs from the encoder by {error:.1g} and was not written: try another format")
    reporter.info(f"the {what} was run and differs from the encoder by at most {error:.1g}")


def make_card(run: Run, state: dict[str, Any], form: str, weights_license: str, reporter: Reporter) -> dict[str, Any]:
    """The card of an exported file: all that is needed to use it without the run or mixnn."""
    c, step = run.config, state["step"]
    trained_with = run.environment(reporter.warn)
    here = environment(torch.device("cpu"))
    steps_per_epoch = max(1, state["data"]["images"] // c.batch_size)
    known = methods.METHODS.get(c.method)  # one of the user's own may not be imported, and is not needed here
    method = {"name": c.method, "options": c.options, "paper": methods.about_of(known).paper if known else None}
    return {
        "card_version": CARD_VERSION,
        "file": {
            "form": form,
            **({"names": _names(c), **WEIGHTS} if form == "safetensors" else PROGRAM),
            "checksum": f"{CHECKSUM} in {CHECKSUM_PLACES[form]}: CRC-32 of the whole file, with zeros in place of its "
            "eight digits",
        },
        "architecture": _architecture(c, run.network),
        "preprocessing": _preprocessing(c, state["data"]),
        "start": _start(read_files(run), step),
        "method": method if step else None,
        "training": {
            "data": configured_dataset(c).title,
            "images": state["data"]["images"],
            "epochs": round(step / steps_per_epoch, 2),
            "epochs_planned": c.epochs,
            "steps": step,
            **{name: getattr(c, name) for name in SETTINGS},
        },
        "metrics": _metrics(run, step, reporter),
        "versions": {
            "trained_with": {k: v for k, v in trained_with.items() if k != "startup_s"},
            "exported_with": {k: here[k] for k in ("mixnn", "git", "python", "torch")},
        },
        "license": weights_license or None,
    }


def _start(data: RunData, step: int, depth: int = MAX_STARTS) -> dict[str, Any] | None:
    """The weights that the run started from, and what became of them; None for random weights.

    A card is published, so it names no folder or file of the user's machine. `depth` limits how many runs that started
    from each other are followed: a run that replaced the one it started from would lead back to itself.
    """
    source = data.init_from
    if source in NO_START:
        return None
    became = _what_became_of_the_start(data, step)
    if source in STARTS:
        start = STARTS[source]
        mean, std = NORMALIZATIONS[start.normalization]
        inputs = {"size": start.image_size, "scale": 1 / 255, "mean": list(mean), "std": list(std)}
        return {"name": source, **start.card, "input_in_training": inputs, **became}
    if source.startswith((TIMM, TORCHVISION)):
        return {"name": source, "license": "see the publisher of these weights", **became}
    run = Run.find(Path(source)) if depth else None
    if run is None:
        return {"name": "a file of weights, or a run that is gone", **became}
    other = read_files(run)
    steps = other.metrics[-1].get("step", 0) if other.metrics else 0
    return {"name": "another run", "start": _start(other, steps, depth - 1), **became}


def _what_became_of_the_start(data: RunData, step: int) -> dict[str, Any]:
    """How training used the starting weights, and the share of trained weights in the encoder."""
    if not step:
        return {"done_here": "nothing: the weights are as they come", "trained_share": 0.0}
    judged = data.judged
    if judged and judged.reverted() == "kept_start":
        return {
            "done_here": "trained, and set back to these weights, because the trained ones were worse",
            "trained_share": 0.0,
        }
    share = judged.content["share"] if judged else 1.0
    average = f"; the encoder is an average, with a share of {share:g} of the trained weights and the rest of these"
    return {"done_here": "trained on the images below" + average * (share < 1), "trained_share": share}


def _names(c: Config) -> str:
    return "torchvision's ResNet, without fc" if c.backbone in ARCHITECTURES else f"mixnn's {c.backbone}"


def _architecture(c: Config, network: Network | None) -> dict[str, Any]:
    with torch.device("meta") if c.backbone in BUILT_IN else nullcontext():  # no memory for weights that are not used
        backbone = make_backbone(c, network)
    features = {"features": backbone.num_features, "parameters": sum(p.numel() for p in backbone.parameters())}
    features["image_size"] = c.image_size  # of the training crops: a ResNet's first layers depend on it
    if isinstance(backbone, EfficientNetLite0):
        fields = ("channels", "blocks", "kernel", "stride", "expansion")
        stages = [dict(zip(fields, stage, strict=True)) for stage in STAGES]
        return {"name": c.backbone, "stages": stages, "activation": "ReLU6", "batch_norm_eps": EPS, **features}
    if not isinstance(backbone, ResNet):
        return {"name": c.backbone, **features}
    block, widths, depths = ARCHITECTURES[c.backbone]
    stem, pooled = backbone.conv1, isinstance(backbone.maxpool, torch.nn.MaxPool2d)
    return {
        "name": c.backbone,
        "block": "bottleneck: 1x1, 3x3, 1x1" if block is Bottleneck else "basic: 3x3, 3x3",
        "blocks": list(depths),
        "widths": list(widths),
        "stem": {
            "kernel": stem.kernel_size[0],
            "stride": stem.stride[0],
            "padding": stem.padding[0],
            "max_pool": {"kernel": 3, "stride": 2, "padding": 1} if pooled else None,
        },
        **features,
    }


def _preprocessing(c: Config, data: dict[str, Any]) -> dict[str, Any]:
    steps = {
        "size": c.encoding_size,
        "crop": "upright by EXIF, transparent parts white, then the largest square at the center",
        "resize": "to size x size, bilinear with antialiasing (Pillow's ImageOps.fit with BILINEAR)",
        "channels": "RGB",
        "scale": 1 / 255,
        "mean": list(data["mean"]),
        "std": list(data["std"]),
        "formula": "(x * scale - mean) / std, by channel",
    }
    # Named data sets are evaluated at their stored size, and STL-10's is larger than its training crops.
    size = configured_dataset(c).stored_size
    return steps | ({"size_when_measured": size} if size else {})


def _metrics(run: Run, step: int, reporter: Reporter) -> dict[str, Any]:
    """The results that belong to these weights, each with its protocol."""
    kept = {}
    for name, found in run.results(reporter.warn).items():
        measured = found.get("protocol", {}).get("checkpoint_step") if isinstance(found, dict) else None
        if measured == step:
            kept[name] = found
        elif measured is not None:
            reporter.warn(f"{name} was measured at step {measured}, not {step}: the card leaves it out")
    if not kept:
        reason = "there are no labeled test images"
        if run.dataset().has_labeled_test:
            reason = f"use {calling('evaluate', run.path)}, then export again with {setting('overwrite', True)}"
        reporter.info(f"the card states no accuracy: {reason}")
    return kept
