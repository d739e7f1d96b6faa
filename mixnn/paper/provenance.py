"""Where a result comes from: the commit of its code, and whether that code has changed since.

A result stores three digests: one of all files of the package (`code`), one of the code that trained the run, and one
of the code that evaluated it (runs/code.py). The first finds the commit. The other two say whether a number is stale.

A machine that trains may have no git history. So `results/commits.json` keeps the commit of each `code`, and
`find_commits` fills it where there is a history.
"""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mixnn.files import PACKAGE, SOURCES, digest_of_files, write_atomically
from mixnn.paper.plan import PlannedRun, Summaries, Summary, find, precision_of
from mixnn.runs.code import evaluation_digest, training_digest

COMMITS = "commits.json"
# Marks in tables, and what they mean.
UNCOMMITTED, NO_DIGEST, MIXED = "†", "‡", "§"
MEANINGS = {
    UNCOMMITTED: "no commit is known for the code that made the number, which is normal for an installed package",
    NO_DIGEST: "the run is older than the records of its training code, so that code may have changed since",
    MIXED: "the mean is over runs that different versions of the code made",
}


def marks_of(runs: Sequence[Summary], commits: Mapping[str, str]) -> str:
    """The marks of a number that these runs made: the keys of MEANINGS that apply to any of them."""
    made_with = [environment for run in runs for environment in _environments(run)]
    digests = [[run.get("environment", {}).get("training_code") for run in runs]]
    protocols = {protocol for run in runs for protocol in run["results"]}
    digests += [[run["results"][p].get("code") for run in runs if p in run["results"]] for p in sorted(protocols)]
    found = "" if all(commit_of(environment, commits) for environment in made_with) else UNCOMMITTED
    found += "" if all(map(all, digests)) else NO_DIGEST
    return found + MIXED * any(len({digest for digest in group if digest}) > 1 for group in digests)


def _environments(run: Summary) -> list[Mapping[str, Any]]:
    """What a run was trained with and, if it is recorded, evaluated with."""
    evaluated_with = run.get("evaluated_with")
    return [run.get("environment", {}), *([evaluated_with] if evaluated_with else [])]


def commit_of(environment: Mapping[str, str | None], commits: Mapping[str, str]) -> str:
    """The commit whose code made a run; empty if the working tree had other code, or if that cannot be told.

    The digest of the code decides. The state of git is asked only where that is unknown: a tree also differs from its
    commit if it has new results in it.
    """
    commit, git = commits.get(environment.get("code") or "", ""), environment.get("git") or ""
    return commit or ("" if git.endswith("+") else git)


# What is stale


@functools.cache
def _training_digest(method: str, imports: tuple[str, ...]) -> str:
    return training_digest(method, imports)


@functools.cache
def _evaluation_digest() -> str:
    return evaluation_digest()


def stale_protocols(summary: Summary) -> list[str]:
    """The protocols whose numbers today's code might change; all of them if training has changed."""
    if is_trained_by_other_code(summary.get("environment", {}), summary["config"]):
        return list(summary["results"])
    return [name for name, result in summary["results"].items() if result.get("code") != _evaluation_digest()]


def is_trained_by_other_code(environment: Mapping[str, str], config: Mapping[str, Any]) -> bool:
    """Whether a run was trained by other code than today's; also True if it does not say by which."""
    imports = tuple(config.get("imports", ()))
    return environment.get("training_code") != _training_digest(config["method"], imports)


def stale_runs(needed: Iterable[PlannedRun], finished: Summaries) -> list[str]:
    """Names of the finished runs whose code has changed since. Those that do not record it have a mark instead."""
    names = []
    for planned in needed:
        run = find(planned, finished)
        if run and run.get("environment", {}).get("training_code") and stale_protocols(run):
            names.append(planned.in_precision(precision_of(run)).name)
    return names


# Commits


def read_commits(results: Path) -> dict[str, str]:
    """Commit by digest of the package's files; empty if the folder keeps none."""
    try:
        found = json.loads((results / COMMITS).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def find_commits(results: Path, summaries: Iterable[Summary]) -> dict[str, str]:
    """Look for the code of these runs in the history of this checkout, and keep what was found in the folder."""
    known = read_commits(results)
    codes = {code for run in summaries for made_with in _environments(run) if (code := made_with.get("code"))}
    if missing := codes - known.keys():
        known |= _search_history(missing)
        content = json.dumps(dict(sorted(known.items())), indent=1)
        write_atomically(results / COMMITS, f"{content}\n".encode())
    return known


def _search_history(codes: set[str]) -> dict[str, str]:
    """The newest commit with each of these digests; what is not in the history is left out."""
    folder, package = PACKAGE.parent, PACKAGE.name

    def git(*words: str) -> bytes:
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=True).stdout

    try:
        commits = git("rev-list", "--abbrev-commit", "--abbrev=12", "HEAD", "--", package).decode().split()
    except (OSError, subprocess.CalledProcessError):
        return {}
    found: dict[str, str] = {}
    contents: dict[str, bytes] = {}
    for commit in commits:
        if found.keys() == codes:
            break
        listed = git("ls-tree", "-r", "-z", commit, "--", package).decode()
        lines = [line.split("\t", 1) for line in listed.split("\0") if line]  # mode, type and blob; path
        files = {path: about.split()[2] for about, path in lines if path.endswith(SOURCES)}
        for blob in set(files.values()) - contents.keys():
            contents[blob] = git("cat-file", "blob", blob)
        digest = digest_of_files({Path(path).relative_to(package): contents[blob] for path, blob in files.items()})
        if digest in codes:
            found.setdefault(digest, commit)
    return found
