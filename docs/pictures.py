"""Draw the pictures of the documentation.

    python -m docs.pictures                   all that need no data (make pictures)
    python -m docs.pictures --photos FOLDER   nearest neighbors among photographs; FOLDER has a subfolder per class

The demo trains for a minute or two; Chromium takes the screenshots. The speeds are those of the committed measurements.
The photographs are those of the folder "y_groceries" that benchmarks/folders/prepare.py makes.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from contextlib import chdir
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

import mixnn
from mixnn.cli import main as command
from tests.browser import Browser, Page, find_browser

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
WIDTH = 1100
COLORS = {"mixnn": "#4051b5", "others": "#b0b4c3"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of the documentation.")
    parser.add_argument("--photos", type=Path, metavar="FOLDER")
    if folder := parser.parse_args().photos:
        photos(folder, IMAGES / "photos.jpg")
        return
    speed(IMAGES / "speed.png")
    if not find_browser():
        raise SystemExit("the screenshots need Chromium or Chrome on the path")
    with tempfile.TemporaryDirectory() as folder, chdir(folder), Browser() as browser:
        for words in ("demo", "explore runs/demo", "report runs/demo"):
            assert command(words.split()) == 0
        run = Path("runs/demo")
        save(Image.open(run / "neighbors.png"), IMAGES / "neighbors.png")
        explorer(browser, run / "explore.html", IMAGES / "explore.png")
        report(browser, run / "report.html", IMAGES / "report.png")
    for path in sorted(IMAGES.glob("*.png")):
        print(path.relative_to(ROOT), f"{path.stat().st_size / 1000:.0f} kB")


def explorer(browser: Browser, page: Path, out: Path) -> None:
    """The map, with the neighbors of one image."""
    tab = opened(browser, page, 760)
    tab.wait("window.explore")
    box = "document.getElementById('overlay').getBoundingClientRect()"
    tab.click(*tab.run(f"(() => {{ const b = {box}, p = explore.where(5); return [p[0] + b.x, p[1] + b.y]; }})()"))
    tab.mouse("mouseMoved", 5, 5)
    tab.settle()
    save(shot(tab), out)


def report(browser: Browser, page: Path, out: Path) -> None:
    """The verdict, and the first curves below it."""
    tab = opened(browser, page, 490)
    verdict = shot(tab)
    tab.run("document.getElementById('curves').scrollIntoView()")
    tab.settle()
    curves = shot(tab).crop((0, 0, WIDTH, 410))
    both = Image.new("RGB", (WIDTH, verdict.height + curves.height))
    both.paste(verdict)
    both.paste(curves, (0, verdict.height))
    save(both, out)


def opened(browser: Browser, page: Path, height: int) -> Page:
    tab = browser.open()
    tab.size(WIDTH, height)
    tab.prefer(color_scheme="light", reduced_motion="reduce")
    tab.goto(page.resolve().as_uri())
    tab.run("document.documentElement.style.scrollbarWidth = 'none'")
    tab.settle()
    return tab


def shot(tab: Page) -> Image.Image:
    with tempfile.TemporaryDirectory() as folder:
        return Image.open(io.BytesIO(tab.screenshot(Path(folder) / "shot.png").read_bytes())).convert("RGB")


def save(image: Image.Image, out: Path) -> None:
    """With 256 colors, which takes a third of the bytes."""
    image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(out, optimize=True)


def photos(folder: Path, out: Path, rows: int = 5, columns: int = 5) -> None:
    """The first image of some classes, and its nearest neighbors by raw pixels and by the ImageNet encoder."""
    found = mixnn.embed(folder)
    classes = np.array([name.split("/")[0] for name in found.names])
    pixels = np.stack([np.asarray(picture(folder / name, 16), np.float32).ravel() for name in found.names])
    nearest = {"raw pixels": neighbors(pixels, columns), "mixnn": neighbors(found.vectors, columns)}
    firsts = [int(np.flatnonzero(classes == c)[0]) for c in np.unique(classes)]
    side, gap, top = 96, 24, 34
    half = columns * side
    canvas = Image.new("RGB", (side + 2 * (gap + half), top + rows * side), "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(18)
    draw.text((2, 6), "query", "black", font)
    for column, (name, rows_of) in enumerate(nearest.items()):
        left = side + gap + column * (half + gap)
        wrong = (classes[rows_of] != classes[:, None]).mean()
        draw.text((left + 2, 6), f"{name}: {wrong:.0%} of neighbors are of another class", "black", font)
        for i, query in enumerate(firsts[:rows]):
            canvas.paste(picture(folder / found.names[query], side), (0, top + i * side))
            for k, row in enumerate(rows_of[query]):
                x, y = left + k * side, top + i * side
                canvas.paste(picture(folder / found.names[row], side), (x, y))
                if classes[row] != classes[query]:
                    draw.line((x, y, x + side, y + side), "#d62728", 3)
                    draw.line((x, y + side, x + side, y), "#d62728", 3)
    canvas.save(out, quality=85)


def picture(path: Path, side: int) -> Image.Image:
    """The middle of an image, as a square."""
    image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    return ImageOps.fit(image, (side, side), Image.Resampling.LANCZOS)


def neighbors(vectors: np.ndarray, count: int) -> np.ndarray:
    """The nearest rows of each row by the cosine of centered vectors, (N, count)."""
    x = vectors - vectors.mean(0)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    cosines = x @ x.T
    np.fill_diagonal(cosines, -1)
    return np.argsort(-cosines, axis=1)[:, :count]


def speed(out: Path) -> None:
    """A training step of mixnn and of other libraries, on one H200."""
    steps = json.loads((ROOT / "results" / "bench-peers-h200.json").read_text())["libraries"]
    names = {"mixnn-byol": "mixnn", "lightly": "lightly", "plain": "plain PyTorch loop", "solo-learn": "solo-learn"}
    matplotlib.use("agg")
    figure, axes = plt.subplots(figsize=(6, 1.8))
    times = {name: steps[library]["loading"]["ms_per_step"] for library, name in names.items()}
    bars(axes, "one training step of BYOL on CIFAR-10, ms", times)
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    save(Image.open(out), out)


def bars(axes: plt.Axes, title: str, times: dict[str, float]) -> None:
    names = list(times)[::-1]
    shown = axes.barh(names, [times[name] for name in names])
    for bar, name in zip(shown, names, strict=True):
        bar.set_color(COLORS["mixnn" if name.startswith("mixnn") else "others"])
    axes.bar_label(shown, [f"{times[name]:.3g}" for name in names], padding=4)
    axes.set_title(title, fontsize=10, loc="left")
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
