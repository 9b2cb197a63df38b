# make setup builds .venv from constraints.txt; every other target calls it when needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup demo test test-slow test-triton wheel gpu-check lint types bench clean help

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/' | column -t -s:

setup: $(STAMP)  ## the virtual environment in .venv, with every extra

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

test: setup lint types  ## lint, types and the whole fast suite, under 10 minutes on 2 cores
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2

test-slow: setup  ## what takes minutes
	$(BIN)/python -m pytest -m slow

test-triton: setup  ## compiled-code checks with triton 3.6 and 3.9, in folders of their own under out/triton
	$(BIN)/python experiments/005_compiled_code/other_versions.py out/triton

wheel: setup  ## the project's own wheel in dist/, and the commit it is from
	rm -f dist/laneformer-*.whl
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir dist .
	git rev-parse --short=12 HEAD > dist/commit.txt

gpu-check: wheel  ## everything that needs a GPU, checked and measured; GPU_CHECK=--tiny rehearses it without one
	PYTHON=$(BIN)/python experiments/gpu_check/run.sh out/gpu_check $(GPU_CHECK)

lint: setup  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

demo: setup  ## from source files to a trained model and a measured comparison, about 10 minutes on 2 cores
	$(BIN)/python experiments/demo.py --out out

clean:  ## everything that was built
	rm -rf $(VENV) build dist out *.egg-info
