"""export: a run's encoder as one file for others, with a card that says what it is and how images must look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from mixnn.apps.export.card import make_card
from mixnn.apps.export.forms import FORMS, OPSETS, check_form
from mixnn.config import RUN, Overwrite, Param, UserError, setting, verb
from mixnn.files import check_writable, write_atomically
from mixnn.progress import Reporter
from mixnn.runs import Run
from mixnn.runs.encoder import encoder_of

__all__ = ["FORMS", "export"]

OPSET = 17  # read by every runtime of the last years; later ones add nothing that this network uses


@verb
def export(
    run: Annotated[str | Path | Run, RUN],
    out: Annotated[str | Path, Param("the file [RUN/encoder.FORMAT]", flag="--out", metavar="FILE")] = "",
    *,
    output: Annotated[str, Param("format of the file", choices=tuple(FORMS), flag="--format")] = "safetensors",
    licence: Annotated[str, Param("licence of the weights, for the card next to them", metavar="TEXT")] = "",
    opset: Annotated[int, Param("ONNX operator set", low=OPSETS[0], high=OPSETS[-1])] = OPSET,
    overwrite: Overwrite = False,
    reporter: Reporter | None = None,
) -> Path:
    """The encoder of a run's last checkpoint into one file (default: encoder.OUTPUT in the run folder).

    safetensors: weights alone, in torchvision's names, read by `mixnn.load`, torchvision and timm. onnx and pt2 (a
    torch.export program): uint8 images in, features out, normalisation inside; both are run and compared first. A JSON
    card lies beside the file, and in it.

    Examples:
        mixnn export runs/photos
        mixnn export runs/photos --format onnx --out encoder.onnx
    """
    reporter, run = reporter or Reporter(), run if isinstance(run, Run) else Run.open(run)
    out = Path(out).expanduser() if str(out) else run.path / f"encoder.{output}"
    beside = out.with_name(f"{out.name}.json")
    _check_out(out, beside, output, overwrite)
    check_form(output)
    tensors, state = run.load_checkpoint(reporter.warn)
    encoder = encoder_of(run, tensors, state)
    card = json.dumps(make_card(run, state, output, licence, reporter), indent=1)
    made = FORMS[output](encoder, card, opset, reporter)
    write_atomically(out, made)
    write_atomically(beside, (card + "\n").encode())
    reporter.info(
        f"{run.config.backbone} of step {state['step']:,} in {out} ({len(made) / 1e6:.1f} MB), card in {beside}"
    )
    return out


def _check_out(out: Path, beside: Path, output: str, overwrite: bool) -> None:
    if out.suffix != f".{output}":
        other = f" or {setting('output', out.suffix[1:])}" if out.suffix[1:] in FORMS else ""
        raise UserError(f"{out} does not end in .{output}: use {setting('out', out.with_suffix(f'.{output}'))}{other}")
    for path in (out, beside):
        check_writable(path, overwrite)
