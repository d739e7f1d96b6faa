"""The encoder as bytes of a file: safetensors, ONNX, or a torch.export program; the last two run before they count."""

from __future__ import annotations

import importlib
import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save as serialize
from torch import Tensor

from mixnn.config import UserError
from mixnn.progress import Reporter
from mixnn.runs.encoder import CARD, Encoder

OPSETS = range(13, 21)  # what torch's exporter writes and the tests cover
TOLERANCE = 1e-4  # of a feature, or of the largest where that is above 1; other kernels round differently
BATCHES = (1, 3)  # that a program is tried with; it was traced with 2
NEEDS_ONNX = 'the onnx format needs the onnx package: type pip install "mixnn[onnx]", or pip install onnx onnxruntime'


def check_form(form: str) -> None:
    """UserError where a format needs a package that is not there."""
    if form == "onnx":
        try:
            importlib.import_module("onnx")
        except ImportError:
            raise UserError(NEEDS_ONNX) from None


def to_safetensors(encoder: Encoder, card: str, _opset: int, _say: Reporter) -> bytes:
    """Weights alone, in torchvision's names; "format" is what other readers of such files look for."""
    weights = {name: t.contiguous() for name, t in encoder.backbone.state_dict().items()}
    return serialize(weights, {"format": "pt", CARD: card})


def to_onnx(encoder: Encoder, card: str, opset: int, reporter: Reporter) -> bytes:
    """A model `images` -> `features` in one file.

    By the TorchScript exporter: the newer one needs onnxscript besides, and its graph would be the same.
    """
    import onnx

    sides = {0: "batch", 2: "height", 3: "width"}
    buffer: Any = io.BytesIO()  # it takes one, and says it does not
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this exporter is the older one
        torch.onnx.export(
            encoder, (sample(encoder, 2),), buffer, dynamo=False, opset_version=opset,
            input_names=["images"], output_names=["features"], dynamic_axes={"images": sides, "features": {0: "batch"}},
        )  # fmt: skip
    model = onnx.load_from_string(buffer.getvalue())
    onnx.helper.set_model_props(model, {CARD: card})
    onnx.checker.check_model(model)
    made: bytes = model.SerializeToString()
    try:
        import onnxruntime
    except ImportError:
        reporter.warn(
            "the ONNX file was not run to compare it with the encoder: for that, type pip install onnxruntime"
        )
        return made
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(made, options, providers=["CPUExecutionProvider"])
    compare(encoder, lambda u8: torch.from_numpy(session.run(None, {"images": u8.numpy()})[0]), "ONNX file", reporter)
    return made


def to_pt2(encoder: Encoder, card: str, _opset: int, reporter: Reporter) -> bytes:
    """A torch.export program, read back from what will be the file."""
    dim: Any = torch.export.Dim
    sides = {0: dim("batch", min=1), 2: dim.AUTO, 3: dim.AUTO}
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own making, with nothing that a user could do
        program = torch.export.export(encoder, (sample(encoder, 2),), dynamic_shapes=(sides,))
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # names folders of this machine
        torch.export.save(program, buffer, extra_files={f"{CARD}.json": card})
        buffer.seek(0)
        again = torch.export.load(buffer).module()
    compare(encoder, again, "torch.export program", reporter)
    return buffer.getvalue()


FORMS: dict[str, Callable[[Encoder, str, int, Reporter], bytes]] = {
    "safetensors": to_safetensors,
    "onnx": to_onnx,
    "pt2": to_pt2,
}


def sample(encoder: Encoder, count: int) -> Tensor:
    """Images of noise, the same in every export."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, 3, encoder.size, encoder.size), dtype=torch.uint8, generator=generator)


@torch.no_grad()
def compare(encoder: Encoder, program: Callable[[Tensor], Tensor], what: str, reporter: Reporter) -> None:
    """UserError if a program's features are not the encoder's."""
    found, wanted = (torch.cat([f(sample(encoder, count)) for count in BATCHES]) for f in (program, encoder))
    worst = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1))
    if not worst <= TOLERANCE:  # nor if it is NaN
        raise UserError(
            f"the {what} differs from the encoder by {worst:.1g}, so it was not written: try another format"
        )
    reporter.info(f"the {what} was run and differs from the encoder by at most {worst:.1g}")
