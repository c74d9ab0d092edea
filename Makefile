# make demo | test | lint | bench: each sets itself up in .venv, and is quick the second time.
#
# make test PYTHON=python        an environment of your own, used as it is (nothing is installed into it)
# make test ARGS="-k trace"      more arguments for pytest, the demo or the benchmarks
# make TORCH=torch==2.12.0       another torch for a new .venv

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON := .venv/bin/python
BASE_PYTHON := $(or $(shell command -v python3.11),python3)
ARGS :=

# The version that is tested, CPU build first: on Linux the plain wheel brings gigabytes of CUDA libraries.
TORCH := torch==2.13.0
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
TRITON := triton==3.7.1
# Packages written by others whose models must run unmodified. Without dependencies: theirs pin old versions.
CLIENTS := deepctr-torch==0.3.0 torch-rechub==0.9.0

# `make lint` changes folder: a path must be absolute, a bare name is looked up as always.
ANYWHERE = $(if $(findstring /,$(PYTHON)),$(abspath $(PYTHON)),$(PYTHON))

# -Im: no user site, no PYTHONPATH, no current directory
PIP = .venv/bin/python -Im pip --disable-pip-version-check install --quiet

ifeq ($(PYTHON),.venv/bin/python)
RUN := .venv/run.stamp
DEV := .venv/dev.stamp
endif

.PHONY: help demo test coverage lint lint-rules lint-format lint-types bench clean
help:
	@sed -n '1,5s/^# \{0,1\}//p' Makefile

demo: $(RUN)
	$(PYTHON) -m heterps_compile.cli demo $(ARGS)

test: $(DEV)
	$(PYTHON) -m pytest $(ARGS)

# the same tests, about twice as slow: what they reach is printed at the end
coverage: $(DEV)
	$(PYTHON) -m pytest --cov --cov-report=term:skip-covered $(ARGS)

bench: $(DEV)
	for name in sparse ctr first_call clients; do $(PYTHON) "benchmarks/$$name.py" $(ARGS); done

# all three, whichever fails
lint: $(DEV)
	@$(MAKE) --no-print-directory --keep-going lint-rules lint-format lint-types

lint-rules: $(DEV)
	$(PYTHON) -m ruff check .

lint-format: $(DEV)
	$(PYTHON) -m ruff format --check .

# setup.py installs passes/ and kernels/ below heterps_compile: links show them to mypy there, sed gives the paths back.
lint-types: $(DEV)
	rm -rf build/typing && mkdir -p build/typing/heterps_compile
	@ln -s $(addprefix $(CURDIR)/,$(wildcard heterps_compile/*) passes kernels) build/typing/heterps_compile/
	cd build/typing && $(ANYWHERE) -m mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache \
		| sed -E 's#^heterps_compile/(passes|kernels)/#\1/#'

.venv/bin/python:
	$(BASE_PYTHON) -m venv .venv

.venv/run.stamp: setup.py pyproject.toml Makefile | .venv/bin/python
	.venv/bin/python -Ic 'import torch' 2>/dev/null \
		|| $(PIP) '$(TORCH)+cpu' 2>/dev/null \
		|| $(PIP) '$(TORCH)+cpu' --index-url '$(TORCH_CPU_INDEX)' --retries 1 --timeout 15 2>/dev/null \
		|| $(PIP) '$(TORCH)'
	if [ "$$(uname -s)" = Linux ]; then $(PIP) '$(TRITON)'; fi
	$(PIP) --editable .
	touch $@

.venv/dev.stamp: .venv/run.stamp
	$(PIP) --editable '.[test,lint]'
	$(PIP) --no-deps $(CLIENTS)
	touch $@

clean:
	rm -rf build dist .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage *.egg-info
