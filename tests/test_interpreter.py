"""Without a GPU, the tests of the CUDA kernels run in Triton's interpreter: here, in one process for all of them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreter import CUDA, INTERPRETED

ROOT = Path(__file__).parents[1]
FILES = [str(f.relative_to(ROOT)) for f in ROOT.glob("tests/**/test_*.py") if "\n@runs_kernels\n" in f.read_text()]


@pytest.mark.skipif(CUDA or INTERPRETED, reason="the kernels run in this process")
def test_kernels_equal_plain_torch_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-rsp", *FILES]
    command += ["-W", "ignore:Conversion of an array"]  # the interpreter's, with numpy before 2.4
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(FILES) == 4
    assert {*re.findall(r"^PASSED ([\w/]+\.py)::", done.stdout, re.MULTILINE)} == {*FILES}
    reasons = re.findall(r"^SKIPPED \[\d+\] [\w/]+\.py(?::\d+)?: (.*)", done.stdout, re.MULTILINE)
    assert {*reasons} == {"needs a CUDA device"}, done.stdout
