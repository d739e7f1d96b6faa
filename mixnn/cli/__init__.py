"""The command line: a table of commands, each a function of the package, and what happens around a call of one.

To add a command: its function, with `@verb` and a `Param` for each parameter, and its row in VERBS. Its flags and help
are made from the signature (see cli/parser.py). A parameter `verbose` gets the command's reporter. If its module has a
function `show_NAME`, that prints the result, or --json does; paths are printed as they are. If the result has
`problems`, the exit code is 2.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mixnn.cli.parser import Command
from mixnn.config import Interrupted, NotSaved, UserError, spelling, unknown
from mixnn.processes import is_main_process, world_size, write_reason
from mixnn.registry import import_code

atexit.register(gc.freeze)  # without it, Python looks through all objects of torch before it exits: half a second

VERBS: dict[str, tuple[str, str]] = {  # name -> (where its function is, what it does)
    "search": ("mixnn.apps.search.search:search", "find similar images, near-duplicates or outliers"),
    "classify": (
        "mixnn.apps.classify.classify:classify",
        "label all images from a few labels; say which to label next",
    ),
    "explore": (
        "mixnn.apps.explore.explore:explore",
        "make a web page: a map of all images, with neighbors and groups",
    ),
    "pretrain": ("mixnn.training.pretrain:pretrain", "train an encoder without labels"),
    "embed": ("mixnn.apps.embed:embed", "turn images into vectors, with their file names"),
    "report": ("mixnn.apps.report.report:report", "make a web page about one run, or compare several"),
    "export": ("mixnn.apps.export:export", "save the encoder for other programs: safetensors, ONNX, .pt2"),
    "demo": ("mixnn.apps.demo:demo", "train and show MNN on handwritten digits: minutes on a CPU"),
    "evaluate": ("mixnn.evaluation.evaluate:evaluate", "measure a run, or any encoder, by kNN and linear probe"),
    "diagnose": ("mixnn.training.diagnose:diagnose", "check a run's neighbors, and whether its embeddings collapsed"),
    "reproduce": ("mixnn.paper.reproduce:reproduce", "print a table of the paper and our numbers; run what is missing"),
    "figures": ("mixnn.paper.figures:figures", "draw the paper's figures and ours from finished runs"),
    "bench": ("mixnn.paper.bench:bench", "time the training step against a plain PyTorch loop"),
    "methods": ("mixnn.cli.listings:methods", "list the methods, or the options of one"),
    "data": ("mixnn.cli.listings:data", "list the data sets, or download one"),
    "verify": ("mixnn.apps.verify:verify", "check the files of a run, and that it resumes exactly"),
    "completion": ("mixnn.cli.completion:completion", "print a script that completes commands in your shell"),
}
MULTI_PROCESS_COMMANDS = ("pretrain", "evaluate", "embed")  # commands that can run on several processes
HEADINGS = {"search": "for your images:", "evaluate": "for research:", "methods": "lists and checks:"}  # above these
OPTIONS = ("--help", "--version")
WAIT_FOR_FIRST = 3.0  # seconds that the message of the first process is ahead of those of the others
EXAMPLES = """examples:
  mixnn demo                            a first impression; needs no images
  mixnn search ./photos cat.jpg         the ten images most like this one
  mixnn classify ./photos labels.csv    all images labeled from a few
  mixnn pretrain ./photos --time-budget 10m --out runs/photos
  mixnn search runs/photos cat.jpg      with the encoder that this run adapted
  mixnn pretrain cifar10 --method msf --set topk=1 --seed 3
`mixnn help COMMAND` lists a command's options."""


def help_text() -> str:
    lines = ["usage: mixnn COMMAND [options]", "", "Self-supervised learning of images from nearest neighbors."]
    for name, (_, summary) in VERBS.items():
        lines += ["", HEADINGS[name]] if name in HEADINGS else []
        lines.append(f"    {name:<10} {summary}")
    return "\n".join([*lines, "", "options:", f"  {', '.join(OPTIONS)}", "", EXAMPLES])


def command(name: str) -> Command:
    """The command of this name, its module imported."""
    if name not in VERBS:
        raise unknown("command", name, VERBS)
    return Command(name, *VERBS[name])


def parse(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The command's name, and its arguments under their Python names, as typed."""
    return words[0], {} if words[0] in OPTIONS else command(words[0]).parse(words[1:])


def split_imports(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split off the values of --import, whose code must run before any name is looked up."""
    rest: list[str] = []
    imports: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*rest, word, *words], imports
        flag, equals, value = word.partition("=")
        if flag != "--import":
            rest.append(word)
        elif equals or words:
            imports.append(value if equals else words.pop(0))
        else:
            raise UserError("--import needs a file or a module, as in --import my_code.py")
    return rest, imports


def version() -> str:
    from mixnn import __version__
    from mixnn.files import code_digest

    return f"{__version__}, code {code_digest()}"


def run(words: Sequence[str]) -> None:
    """Carry out one command."""
    started = time.perf_counter()  # before torch is imported
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silences torch's profiler; read when torch is imported
    typed = shlex.join(["mixnn", *words])
    words, imports = split_imports(words)
    if not words or words[0] in ("-h", *OPTIONS):
        print(version() if "--version" in words else help_text())
        return
    if words[0] == "help":
        if len(words) > 1:
            command(words[1]).parser.print_help()
        else:
            print(help_text())
        return
    if words[0].startswith("-"):
        raise unknown("option of mixnn", words[0], OPTIONS)
    if words[0] in VERBS and words[0] not in MULTI_PROCESS_COMMANDS and world_size() > 1:
        raise UserError(
            f"only {', '.join(MULTI_PROCESS_COMMANDS)} run on several processes: run mixnn {words[0]} without "
            "torchrun, or unset WORLD_SIZE"
        )
    for code in imports:
        import_code(code)
    verb = command(words[0])
    with spelling(verb.spell):
        given = verb.parse(words[1:])
        as_json, quiet = given.pop("json", False), given.pop("quiet", False)
        try:
            result, not_saved = verb(given, quiet, typed, started), None
        except NotSaved as error:
            result, not_saved = error.result, error
    if not is_main_process():
        pass
    elif as_json:
        print(json.dumps(result, indent=1, default=lambda one: str(getattr(one, "path", one))))
    elif verb.show:
        verb.show(result)
    else:
        print_paths(result)
    if not_saved:  # printed first, so that a full disk does not cost the numbers
        sys.stdout.flush()
        raise not_saved
    if problems := getattr(result, "problems", None):
        sys.stdout.flush()
        raise UserError(f"{len(problems)} problem{'s' * (len(problems) > 1)} found")
    if world_size() > 1:
        from mixnn import dist

        dist.shutdown()


def print_paths(result: Any) -> None:
    """Print the files or the run folder that a command made, one per line; it printed other results itself."""
    for one in result if isinstance(result, list) else [result]:
        path = getattr(one, "path", one)
        if isinstance(path, Path):
            print(path)


def leave_run(error: BaseException) -> None:
    """Tell torchrun and the other processes of a run why this one ends, unless it is because another has ended."""
    dist: Any = sys.modules.get("mixnn.dist")
    if dist is None or isinstance(error, dist.PeerEnded):
        reason = ""
    else:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        write_reason(reason)
    if dist is not None:
        dist.leave(reason)


def main(words: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 a mistake of the user's, 128 + signal when interrupted (and saved)."""
    words = sys.argv[1:] if words is None else words
    # Torch, which is not imported yet, lets threads spin while they wait for each other. On a machine that also does
    # other work, a training step then takes several times as long as with threads that sleep (notes/log.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # With huge pages, the system has hundreds of times fewer pages to map for a tensor. On a CPU, a step of a folder's
    # encoder then takes 4/5 of the time (notes/log.md).
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        run(words)
    except UserError as error:
        from mixnn.progress import escape_controls

        leave_run(error)
        if not is_main_process():
            time.sleep(WAIT_FOR_FIRST)  # its message is enough, if it has one: then this process is stopped by now
        print("\n".join(map(escape_controls, f"mixnn: {error}".split("\n"))), file=sys.stderr)
        return 2
    except (RuntimeError, MemoryError) as error:
        leave_run(error)
        if not isinstance(error, MemoryError) and not re.search(r"can't allocate memory|out of memory", str(error)):
            raise
        less = ": a smaller --batch-size, --image-size or support_size takes less" * ("pretrain" in words[:1])
        print(f"mixnn: there is not enough memory for this{less}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `mixnn methods mnn | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt as error:
        print(f"mixnn: {error}" if error.args else "mixnn: interrupted", file=sys.stderr)
        return 130
    except Interrupted as error:
        if is_main_process():
            print(f"mixnn: {error}", file=sys.stderr)
        return 128 + error.signal
    return 0
