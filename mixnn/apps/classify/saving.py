"""A classifier in one file, classifier.npz: arrays that numpy.load reads, and about.json beside them in the zip.

Nothing in it is ever unpickled. It carries a fingerprint of the encoder it was fitted on, and is refused with another.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mixnn.apps.classify.models import Classifier, Frame, Setting
from mixnn.apps.embed import load as load_encoder
from mixnn.config import UserError
from mixnn.files import write_atomically
from mixnn.progress import Reporter
from mixnn.runs import Run

FILE = "classifier.npz"
FORMAT = 1


def identity(run: Run, reporter: Reporter) -> dict[str, str]:
    """A hash of weights and normalisation, which tells encoders apart; and the checkpoint's name, for people."""
    encoder, digest = load_encoder(run, "cpu", reporter=reporter), hashlib.sha256()
    for name, tensor in sorted(encoder.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    digest.update(str(encoder.size).encode())
    return {"sha256": digest.hexdigest(), "checkpoint": Path(encoder.origin).stem}


def save(path: Path, classifier: Classifier, encoder: dict[str, str], about: dict[str, Any]) -> None:
    about = about | {
        "format": FORMAT,
        "encoder": encoder,
        "classes": list(classifier.classes),
        "setting": asdict(classifier.setting),
        "temperature": classifier.temperature,
    }
    arrays = {"mean": classifier.frame.mean, "scale": classifier.frame.scale, **classifier.arrays}
    data = io.BytesIO()
    np.savez(data, allow_pickle=False, **arrays)
    with zipfile.ZipFile(data, "a") as archive:
        archive.writestr("about.json", json.dumps(about, indent=1))
    write_atomically(path, data.getvalue())


def load(path: Path) -> tuple[Classifier, dict[str, Any]]:
    """The classifier of a file, and what was saved with it."""
    try:
        with zipfile.ZipFile(path) as archive:
            about = json.loads(archive.read("about.json"))
        if about["format"] != FORMAT:
            raise UserError(
                f"{path} is of format {about['format']}, this version reads {FORMAT}: classify with the labels anew"
            )
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files if name != "about.json"}
        frame = Frame(arrays.pop("mean"), arrays.pop("scale"))
        setting = Setting(**about["setting"])
        return Classifier(tuple(about["classes"]), setting, frame, arrays, float(about["temperature"])), about
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is damaged ({error}): classify with the labels anew") from None


def check_encoder(path: Path, about: dict[str, Any], now: dict[str, str]) -> None:
    """UserError where the run's encoder is no longer the one that the classifier was fitted on."""
    then = about["encoder"]
    if then["sha256"] != now["sha256"]:
        raise UserError(
            f"the encoder has changed since {path} was made ({then['checkpoint']} then, {now['checkpoint']} now), "
            "so its classes lie elsewhere\nclassify with the labels anew"
        )
