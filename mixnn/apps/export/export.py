"""export: a run's encoder as one file for others, with a card that says what it is and how images must look."""

from __future__ import annotations

import json
from pathlib import Path

from mixnn.apps.export.card import make_card
from mixnn.apps.export.forms import FORMS, OPSETS, check_form
from mixnn.config import UserError, unknown
from mixnn.files import check_writable, write_atomically
from mixnn.progress import Reporter
from mixnn.runs import Run
from mixnn.runs.encoder import encoder_of

__all__ = ["FORMS", "export"]

OPSET = 17  # read by every runtime of the last years; later ones add nothing that this network uses


def export(
    run: str | Path | Run,
    out: str | Path = "",
    *,
    format: str = "safetensors",
    licence: str = "",
    opset: int = OPSET,
    overwrite: bool = False,
    reporter: Reporter | None = None,
) -> Path:
    """The encoder of a run's last checkpoint into one file (default: encoder.FORM in the run folder).

    safetensors: weights alone, in torchvision's names, read by `mixnn.load`, torchvision and timm. onnx and pt2 (a
    torch.export program): uint8 images in, features out, normalisation inside; both are run and compared first. A JSON
    card lies beside the file, and in it.
    """
    reporter, run = reporter or Reporter(), run if isinstance(run, Run) else Run.open(run)
    if format not in FORMS:
        raise unknown("format", format, FORMS)
    if opset not in OPSETS:
        raise UserError(f"opset={opset}: opset must be from {OPSETS[0]} to {OPSETS[-1]}")
    out = Path(out).expanduser() if str(out) else run.path / f"encoder.{format}"
    beside = out.with_name(f"{out.name}.json")
    _check_out(out, beside, format, overwrite)
    check_form(format)
    tensors, state = run.load_checkpoint(reporter.warn)
    encoder = encoder_of(run, tensors, state)
    card = json.dumps(make_card(run, state, format, licence, reporter), indent=1)
    made = FORMS[format](encoder, card, opset, reporter)
    write_atomically(out, made)
    write_atomically(beside, (card + "\n").encode())
    reporter.info(
        f"{run.config.backbone} of step {state['step']:,} in {out} ({len(made) / 1e6:.1f} MB), card in {beside}"
    )
    return out


def _check_out(out: Path, beside: Path, format: str, overwrite: bool) -> None:
    if out.suffix != f".{format}":
        fitting = out.suffix[1:]
        other = f" or --format {fitting}" if fitting in FORMS else ""
        raise UserError(f"{out} does not end in .{format}: type --out {out.with_suffix(f'.{format}')}{other}")
    for path in (out, beside):
        check_writable(path, overwrite)
