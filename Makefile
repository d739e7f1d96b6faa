# make demo   train MNN on handwritten digits and show what it learned: no download, a minute or two on two CPU cores
# make test   run the linter (ruff), the type checker (mypy) and all tests
# make chaos  break tiny runs in hundreds of ways, resume them and compare: some 20 minutes (docs/robustness.md)
# make fuzz   hostile options, files and names for every reader: some minutes (docs/robustness.md)
# make soak   a long run in which memory, open files and disk must not grow: some minutes (docs/robustness.md)
# All set up .venv on their first call.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test chaos fuzz soak
demo: .venv/installed
	$(BIN)/mixnn demo

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

chaos: .venv/installed
	$(BIN)/python -m tests.chaos $(ARGS)

fuzz: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(ARGS)

soak: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak $(ARGS)

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@
