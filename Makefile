# make demo   train, evaluate and show MNN on the embedded digits: two CPU cores, a minute or two
# make test   ruff, mypy and the test suite
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
