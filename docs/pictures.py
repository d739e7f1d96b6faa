"""The pictures of the documentation, made by the commands they show: python -m docs.pictures (make pictures).

The demo trains for a minute or two; Chromium takes the screenshots. The speeds are those of the committed measurements.
"""

from __future__ import annotations

import io
import json
import re
import tempfile
from contextlib import chdir
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from PIL import Image

from mixnn.cli import main as mixnn
from tests.browser import Browser, Page, find_browser

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
WIDTH = 1100
COLORS = {"mixnn": "#4051b5", "others": "#b0b4c3"}


def main() -> None:
    speed(IMAGES / "speed.png")
    if not find_browser():
        raise SystemExit("the screenshots need Chromium or Chrome on the path")
    with tempfile.TemporaryDirectory() as folder, chdir(folder), Browser() as browser:
        for command in ("demo", "explore runs/demo", "report runs/demo"):
            assert mixnn(command.split()) == 0
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


def speed(out: Path) -> None:
    """A training step and a batch of views, next to the same in other libraries, on one H200."""
    steps = json.loads((ROOT / "results" / "bench-peers-h200.json").read_text())["libraries"]
    names = {"mixnn-byol": "mixnn", "lightly": "lightly", "plain": "plain PyTorch loop", "solo-learn": "solo-learn"}
    matplotlib.use("agg")
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.8, 2.4), width_ratios=(1, 1.1))
    bars(
        left,
        "one training step of BYOL, ms",
        {name: steps[library]["loading"]["ms_per_step"] for library, name in names.items()},
    )
    bars(right, "strong views of a batch, ms (log)", view_times())
    right.set_xscale("log")
    right.set_xlim(0.1, 2000)
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    save(Image.open(out), out)


def view_times() -> dict[str, float]:
    """From the table of augmentation on the H200 in docs/performance.md."""
    table = (ROOT / "docs" / "performance.md").read_text().split("## Augmentation")[1].split("On one H200")[1]
    row = re.search(r"256 images of 32 pixels.*\n\| \| strong \|(.+)\|", table)
    assert row is not None
    times = [float(cell.split("(")[0].replace(",", "")) for cell in row[1].split("|")]
    return dict(zip(("mixnn, in a CUDA graph", "mixnn", "kornia", "torchvision v2"), times, strict=True))


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
