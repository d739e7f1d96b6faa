"""What the site needs besides the pages in docs/: files of the repository as pages, the commands' help, and formulas.

The pages are also read on GitHub, so they link to files outside docs/, such as ../examples/ddp.py, and write formulas
as $x$. mkdocs calls the functions below; mkdocs.yml names this file.
"""

from __future__ import annotations

import html
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "notes/log.md",
]  # become pages of the site, or its pictures
OUTSIDE += ["results/tables.md", "results/tables-cifar100.md"]
OUTSIDE += sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("results/*.png"))
INSTEAD = {"README.md": "index.md", "examples": "examples.md"}  # a link -> the page for it
LAST = ["api.md", "commands.md", "modules.md", "notes/log.md"]  # in the results of a search, after the guides
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    for path in OUTSIDE:
        files.append(File.generated(config, path, content=(ROOT / path).read_bytes()))
    files.append(File.generated(config, "examples.md", content=examples_page()))
    files.append(File.generated(config, "commands.md", content=commands_page()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links to files of the repository become links to their pages; guides are found before the reference."""
    source = page.file.src_uri
    page.meta["search"] = {"boost": 0.3 if source in LAST else 1}
    folder = posixpath.dirname(source if source in OUTSIDE else f"docs/{source}")
    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(lambda found: site_link(found, folder, source), part) for part in parts[::2]]
    return "".join(parts)


def site_link(found: re.Match[str], folder: str, source: str) -> str:
    """A link on the page `source`, which lies in `folder` of the repository. Without a page for it, only its text."""
    text, link, anchor = found[1], found[2], found[3] or ""
    if ":" in link:
        return found[0]
    target = posixpath.normpath(posixpath.join(folder, link))
    if target in INSTEAD:
        target, anchor = INSTEAD[target], ""
    elif target.startswith("examples/"):
        target, anchor = "examples.md", f"#{posixpath.basename(target).replace('.', '')}"
    elif target not in OUTSIDE and not target.startswith("docs/") and (ROOT / target).exists():
        return text
    return f"[{text}]({posixpath.relpath(target.removeprefix('docs/'), posixpath.dirname(source) or '.')}{anchor})"


def on_page_content(page_html: str, **_: Any) -> str:
    """Formulas become MathML, which browsers show without a script."""
    form = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
    return form.sub(lambda found: mathml(html.unescape(found[2]).strip(), is_block=found[1] == "div"), page_html)


def mathml(formula: str, is_block: bool) -> str:
    """A block has one line per part, so that it fits on a phone."""
    if not is_block:
        return convert(formula)
    return "".join(convert(part.strip(), display="block") for part in formula.split(r"\qquad"))


def examples_page() -> str:
    """The files in examples/, each under its name."""
    text = ["# Examples", "Complete programs. The tests run those in Python."]
    for path in sorted((ROOT / "examples").glob("*.*")):
        language = {".py": "python", ".sh": "sh"}[path.suffix]
        text += [f"## {path.name}", f"```{language}\n{path.read_text()}```"]
    return "\n\n".join(text)


def commands_page() -> str:
    """What `mixnn --help` and each command's help print, in a terminal of 82 columns."""
    from mixnn.cli import VERBS, command, help_text

    os.environ["COLUMNS"] = "82"
    text = [f"# Commands\n\n```text\n{help_text()}\n```"]
    text += [f"## {name}\n\n```text\n{command(name).parser.format_help()}```" for name in VERBS]
    return "\n\n".join(text)
