"""Tests of CUDA kernels run on a GPU, or else in Triton's interpreter.

The interpreter is chosen by an environment variable when Triton is imported, for the whole process. So without a GPU
tests/test_interpreter.py runs these tests in a process of its own. To run one file of them:

    TRITON_INTERPRET=1 pytest tests/nn/test_stem_kernels.py
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if not importlib.util.find_spec("triton"):
    pytest.skip("triton is not installed", allow_module_level=True)
CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA else "cpu"

runs_kernels = pytest.mark.skipif(not CUDA and not INTERPRETED, reason="run in the interpreter, in another process")
