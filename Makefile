# Every target sets up what it needs: a fresh clone needs Python 3.10 or later and make, nothing else.
SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup data data-wide demo test fresh lint site pytest coverage wheel test-elsewhere test-real nbtest \
    docs kernel lab bench clean

VENV  ?= .venv
# torch goes in first and alone, by version: a range would take a build for another machine
TORCH ?= torch==2.13.0
PYTHON ?= $(shell for p in python3 python3.1{4,3,2,1,0}; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
export PATH := $(abspath $(VENV))/bin:$(PATH)
# torch alone is thousands of files: what Python compiled of them once is kept in the venv, whatever the shell says
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/pycache

# The venv is as good as the files that describe it: the stamp's name is their checksum
READY := $(VENV)/ready-$(shell (cat settings.ini setup.py pyproject.toml; echo '$(TORCH)') | cksum | tr ' ' -)

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

setup: $(READY) ## .venv with torch (TORCH="torch==..."), this package and its tools
$(READY):
	@test -n "$(PYTHON)" || { echo "make: no Python 3.10 or later found; name one with PYTHON="; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	pip install --quiet --no-compile $(TORCH)
	pip install --quiet --no-compile --editable '.[dev]' --config-settings editable_mode=compat
	rm -f $(VENV)/ready-* && touch $@

data: setup ## the plays and the hourly bars to train on, into data/
	python tools/get_data.py plays
	-python tools/get_data.py bars

data-wide: setup ## 234 load profiles (simbench, ODbL, 91 MB to fetch), into data/loads.parquet
	python tools/get_data.py loads

demo: setup data ## train GRU-L3 on plays, about two minutes on two cores; predicted and measured bytes
	python tools/demo.py

test: fresh lint site pytest ## the checks of every change; CI runs `wheel` after them
test fresh lint site pytest coverage wheel nbtest: export OMP_NUM_THREADS = 1

NB_FILES = find nbs gruckpt settings.ini pyproject.toml -type f ! -path '*/.*' ! -path '*/__pycache__/*' \
    | LC_ALL=C sort | xargs cksum
fresh: setup ## test 1: notebooks are clean and gruckpt/ is their export
	@echo "notebooks clean, gruckpt/ their export"; \
	was=$$(mktemp); $(NB_FILES) > $$was; nbdev_export; nbdev_clean; \
	$(NB_FILES) | diff $$was - || { echo "fresh: these files were not as nbdev_export and nbdev_clean leave" \
	    "them. They are now: look at the change and commit it."; exit 1; }

# In a notebook an exported cell may use a name that only a test cell imports: in the package it is undefined
lint: setup ## test 2: ruff, on notebooks too, and for names that the package would miss
	ruff check .
	ruff check --isolated --select F821 gruckpt

site: setup ## test 3: docs build, links hold, docs/ and README.md follow the notebooks
	python tools/docs.py --check

# worksteal: a worker that has nothing left takes half of what the other still has
PYTEST = pytest -m '' --ignore tests/test_install.py -n auto --dist worksteal
pytest: setup ## test 4: form, every notebook cell by cell, and the tests, on all cores
	$(PYTEST) --durations 10

coverage: setup ## the same with the notebooks against the installed package, and what lines none of it runs
	$(PYTEST) --nb-package --cov

wheel: setup ## the wheel in a clean venv, without development tools
	pytest -m '' tests/test_install.py

test-elsewhere: setup ## notebooks and numeric tests under the kernels of other processors; ARGS="--only shuffled"
	python tools/elsewhere.py $(ARGS)

# Not part of `test`: 25 models of 17 packages, about 7 GB
VENV_REAL ?= .venv-real
REAL := $(VENV_REAL)/ready-$(shell cat tests/real/requirements.txt | cksum | tr ' ' -)
test-real: $(REAL) ## models of other packages before and after `convert` (ARGS="-k flair"); tests/real/results.csv
	OMP_NUM_THREADS=1 PYTHONPATH=. $(VENV_REAL)/bin/python -m pytest tests/real/test_real.py $(ARGS)
$(REAL):
	test -x $(VENV_REAL)/bin/python || $(PYTHON) -m venv $(VENV_REAL)
	$(VENV_REAL)/bin/pip install --quiet --no-compile $$(grep -E '^torch(vision)?==' tests/real/requirements.txt)
	$(VENV_REAL)/bin/pip install --quiet --no-compile -r tests/real/requirements.txt
	rm -f $(VENV_REAL)/ready-* && touch $@

# nbdev_test has no time limit of its own
nbtest: setup ## every notebook, as nbdev runs it
	$(if $(shell command -v timeout),timeout 900) nbdev_test --n_workers 2 --timing

docs: setup ## build docs/ and README.md from the notebooks
	python tools/docs.py

kernel: setup ## run every notebook in a fresh Jupyter kernel, writing nothing
	python tools/run_nbs.py --check

lab: setup ## JupyterLab on the notebooks
	jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) nbs

bench: setup ## time and bytes of recurrent layers, side by side; ARGS="..." goes to `gruckpt bench rnn`
	gruckpt bench rnn $(ARGS)

clean: ## remove what builds and tests leave; .venv and data/ stay
	rm -rf build dist _proc .coverage htmlcov .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
