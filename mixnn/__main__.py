"""python -m mixnn"""

from mixnn.cli import main

raise SystemExit(main())
