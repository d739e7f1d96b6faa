# make demo   train MNN on handwritten digits and show what it learned: no download, a minute or two on two CPU cores
# make test   run the linter (ruff), the type checker (mypy) and all tests, and build the documentation
# make pages  write the tables of the README, the pages and the figures again, after new files in results/
# make wheel  build the wheel, install it into an empty environment and run its demo: some minutes
# make docs   build this documentation as a site in build/site; every warning is an error
# make pictures  draw the pictures of the documentation again: two minutes; needs Chromium
# make chaos  break tiny runs in hundreds of ways, resume them and compare: some 20 minutes (docs/robustness.md)
# make fuzz   hostile options, files and names for every reader: some minutes (docs/robustness.md)
# make soak   a long run in which memory, open files and disk must not grow: some minutes (docs/robustness.md)
# All but wheel set up .venv on their first call.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test pages wheel docs pictures chaos fuzz soak
demo: .venv/installed
	$(BIN)/mixnn demo

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2
	$(MAKE) docs

wheel:
	rm -rf build/lib build/empty build/demo dist
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv build/empty
	build/empty/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/mixnn-*.whl
	cd build && empty/bin/mixnn --version && empty/bin/mixnn demo --out demo $(ARGS)

docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # not --quiet: that would ignore warnings

pictures: .venv/installed
	$(BIN)/python -m docs.pictures

pages: .venv/installed
	$(BIN)/python -m docs.tables
	$(BIN)/python benchmarks/scaling.py --page

chaos: .venv/installed
	$(BIN)/python -m tests.chaos $(ARGS)

fuzz: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(ARGS)

soak: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak $(ARGS)

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,docs]"
	touch $@
