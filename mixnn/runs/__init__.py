"""Run folders: what was run, how, and what came out."""

from mixnn.runs.folder import Run

__all__ = ["Run"]
