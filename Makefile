# Quire on a fresh machine with Python 3.11 or later, pip and make: each target does all its own set-up.
#
#   make serve   serve the default model            make chat      talk to it
#   make test    run the tests                      make test-all  and those marked `long`
#   make bench   compare with peers on this CPU     make soak      an hour of mixed load
#   make clean   remove what these made             make fuzz      an hour of hostile clients and files

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: serve chat test test-all lint bench soak fuzz clean

serve: $(VENV)/.installed
	@$(BIN)/quire serve

chat: $(VENV)/.installed
	@$(BIN)/quire chat

# These watch clocks, sockets and signals, or divide a model over processes: they have the machine to themselves. All
# others go on two cores at once.
ALONE := $(addprefix tests/,test_chaos.py test_soak.py executor/test_ray.py api/test_bench_serve.py api/test_cli.py \
	$(addprefix api/server/,test_connection.py test_guard.py test_memory.py test_serve.py test_shape.py) layouts ui)

# -O: there an `assert` checks nothing, and what is safe must be so without.
test: SHORT := -m "not long"
test test-all: $(VENV)/.installed-test lint
	@$(BIN)/python -m pytest -q -n 2 --dist loadgroup $(SHORT) tests $(addprefix --ignore=,$(ALONE) tests/security)
	@$(BIN)/python -m pytest -q $(SHORT) $(ALONE)
	@$(BIN)/python -O -m pytest -q -n 2 --dist loadgroup $(SHORT) tests/security

lint: $(VENV)/.installed-test
	@$(BIN)/ruff check src tests benchmarks examples
	@$(BIN)/ruff format --check -q src tests benchmarks examples
	@$(BIN)/mypy

bench: $(VENV)/.installed-test
	@$(BIN)/python benchmarks/cpu.py

soak: $(VENV)/.installed-test
	@$(BIN)/python benchmarks/soak.py --seconds 3600

fuzz: $(VENV)/.installed-test
	@$(BIN)/python benchmarks/fuzz.py --seconds 3600

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .hypothesis .ruff_cache

$(VENV)/bin/python:
	@echo "Setting up a virtual environment in $(VENV) …"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Quire needs Python 3.11 or later: make PYTHON=python3.11 …")'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --upgrade pip

# Without an NVIDIA GPU the CPU build of torch is enough; `make TORCH=torch==2.12.1` chooses a version.
$(VENV)/.installed: pyproject.toml $(VENV)/bin/python
	@echo "Installing Quire and what it needs (torch is large: this takes a minute) …"
	@$(BIN)/python -m pip install -q --progress-bar=on $(TORCH) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/bin/python
	@echo "Installing Quire, what it needs and what its tests need (torch is large: this takes a minute) …"
	@$(BIN)/python -m pip install -q --progress-bar=on $(TORCH) -e '.[test]'
	@touch $@ $(VENV)/.installed
