"""Tests of CUDA kernels run on a GPU, or else in Triton's interpreter.

The interpreter is chosen by an environment variable when Triton is imported, for the whole process. So without a GPU
one test of each file runs that file in a process of its own, where the others are not skipped.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest
import torch

if not importlib.util.find_spec("triton"):
    pytest.skip("triton is not installed", allow_module_level=True)
CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA else "cpu"

runs_kernels = pytest.mark.skipif(not CUDA and not INTERPRETED, reason="run in the interpreter, in another process")
starts_interpreter = pytest.mark.skipif(CUDA or INTERPRETED, reason="the kernels run in this process")


def check_in_interpreter(path: str, num_tests: int) -> None:
    """Run a file of tests in the interpreter: `num_tests` must pass, and none may fail."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", path]
    command += ["-W", "ignore:Conversion of an array"]  # the interpreter's, with numpy before 2.4
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"\b{num_tests} passed", done.stdout), done.stdout
