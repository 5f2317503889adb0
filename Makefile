PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-kernels test-variants check bench clean

demo: $(STAMP)  ## two clusters on this machine, one hybrid model, the same answer
	$(BIN)/python examples/two_clusters.py

test: $(STAMP) check  ## format, lint, types, every test
	$(BIN)/python -m pytest tests/unit tests/property tests/conformance -n 2
	$(BIN)/python -m pytest tests/e2e
	$(BIN)/python -m pytest tests/kernels -n 2 -m "not variant"
	$(MAKE) test-kernels

test-kernels: $(STAMP)  ## the Triton kernels, in Triton's interpreter
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels -n 2

test-variants: $(STAMP)  ## compiles every kernel for every processor in every dtype, 10 minutes
	$(BIN)/python -m pytest tests/kernels/test_ahead_of_time.py -n 2

check: $(STAMP)
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/mypy

bench: $(STAMP)  ## every benchmark, quick form
	$(BIN)/python benchmarks/bench_cache.py --quick
	$(BIN)/python benchmarks/bench_transport.py --quick
	$(BIN)/python benchmarks/bench_kernels.py --quick
	$(BIN)/python benchmarks/bench_router.py --quick
	$(BIN)/python benchmarks/bench_simulator.py --quick
	$(BIN)/python benchmarks/reproduce_paper.py --quick
	$(BIN)/python benchmarks/testbed.py --quick
	$(BIN)/python benchmarks/experiments.py --quick
	$(BIN)/python benchmarks/study.py --quick

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "prfaas needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $(STAMP)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
