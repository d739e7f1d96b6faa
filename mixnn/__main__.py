"""python -m mixnn"""

import atexit
import os
import sys

from mixnn.cli import main
from mixnn.processes import world_size

code = main()
if world_size() > 1:
    # A Python that exits in the usual way takes its modules apart while gloo's threads still run. They have
    # aborted a process after its run had ended well.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
raise SystemExit(code)
