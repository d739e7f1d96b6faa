# make demo   train MNN on handwritten digits and show what it learned: no download, a minute or two on two CPU cores
# make test   run the linter (ruff), the type checker (mypy) and all tests
# Both set up .venv on their first call.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test
demo: .venv/installed
	$(BIN)/mixnn demo

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@
