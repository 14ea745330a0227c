# Two commands do everything on a fresh machine: `make demo` and `make test`. Variables: see setup.sh.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long test-slurms faults gpu lint docs bench clean
PY := .venv/bin/python
# hundreds of processes would compile the package, each for itself
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo 'make demo    three acts on a private Slurm: paused in place; stopped and requeued; elastic. Tables and pictures'
	@echo 'make test    run every test, those on a real Slurm included'
	@echo 'make test-long   what make test leaves out: every framework and elastic case, sweeps, measuring tools (LONG.md says when)'
	@echo 'make test-slurms  what depends on the release of Slurm, on 24.11 and 26.05 (root, Debian; about 20 minutes)'
	@echo 'make faults  200 randomised fault rounds of runs of 2 to 4 ranks (about ten minutes)'
	@echo 'make gpu     what only a machine with a GPU can show, into build/gpu (at most eight minutes)'
	@echo 'make lint    format, lint and type checks'
	@echo 'make docs    build the site into build/site; broken links and anchors fail'
	@echo 'make bench   measure every figure in README and docs, peers included (about forty minutes)'
	@echo 'make setup   only install what the others need; the demo alone takes less: ./setup.sh demo'

setup:
	@./setup.sh

demo:
	@./setup.sh demo
	@$(PY) hydroslurm/examples/demo.py $(ARGS)

test: setup
	@$(PY) -m pytest -n 3 $(ARGS)

# whoever closes an issue that touches one of them writes its result into tests/LONG.md
test-long: setup
	@$(PY) -m pytest -n 3 --long=all -m 'long and not slurms' $(ARGS)

# each in a mount namespace of its own: nothing is installed
test-slurms: setup
	@for suite in trixie sid; do tests/slurms.sh $$suite $(PY) -m pytest -n 2 -m 'slurm or slurms' @tests/slurms.txt || exit; done

faults: setup
	@FAULT_ROUNDS=200 FAULT_SEED=1 $(PY) -m pytest --long=all tests/faults/test_fault_rounds.py $(ARGS)

# a torch with CUDA: TORCH=... make setup. Without a network: profiling/gpu.sh, which needs no setup
gpu: setup
	@PYTHON=$(PY) profiling/gpu.sh $(ARGS)

lint: setup
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy

docs: setup
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo 'build/site/index.html'

bench: setup
	@$(PY) profiling/bench.py $(ARGS)

clean:
	rm -rf .venv .hydroslurm build .mypy_cache .ruff_cache .pytest_cache
