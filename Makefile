# Each command sets up what it needs in a cache outside the checkout (PHALANX_CACHE, default ~/.cache/phalanx).
# CLUSTER=          create a real two-node cluster on this machine (root, Go, Debian)   [default]
# CLUSTER=current   use the cluster of the current kubeconfig; images from IMAGE_PREFIX=registry/path
# CLUSTER=none      no cluster: cluster tests are skipped and reported
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
VENV = $$(python3 tools/bootstrap.py dev)
UNIT = -m "not cluster and not gpu and not slow and not system" -n 2 --dist worksteal
export PYTHONPATH := crds:operator:runtime:.
CACHE := $(or $(PHALANX_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/phalanx)
# Bytecode is in the cache, not in the checkout: the environments have none, and a process that compiles torch starts twice as long.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CACHE)/bytecode
export MYPY_CACHE_DIR := $(CACHE)/mypy

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

demo:  ## a real cluster, two groups of TP 2, a chat answer that survives a deleted pod
	@python3 -m demo.setup answer

show:  ## the demo with traffic, console, dashboards and two minutes of faults (PROBLEM=1..3: a planted problem instead)
	@python3 -m demo.setup show $(if $(PROBLEM),--problem $(PROBLEM)) $(if $(MINUTES),--minutes $(MINUTES))

test:  ## what CI runs: check, whole programs, then the tests in a real cluster
	@python3 -m tests.run

test-all:  ## make test and every slow scenario
	@python3 -m tests.run --all

check: format-check lint types imports unit  ## formats, lint, types, import rules, unit tests with coverage; no cluster

format-check:
	@$(VENV)/bin/ruff format --check .

lint:
	@$(VENV)/bin/ruff check .

types:
	@$(VENV)/bin/mypy

imports:
	@$(VENV)/bin/lint-imports

unit:
	@v=$(VENV); rm -f .coverage .coverage.*; $$v/bin/python -m pytest $(UNIT) -q --durations=20 --cov --cov-report=term:skip-covered $(PYTEST_ARGS)

house:  ## size, names, calls, cycles and prose of the product code, as a table
	@python3 -m tests.architecture.house

search:  ## random worlds against the operator, then whole fleets in virtual time, for HOURS=n in all, on all cores
	@v=$(VENV); failed=0; for part in control router; do \
	  $$v/bin/python -m tests.$$part.search --hours $$($$v/bin/python -c 'print($(or $(HOURS),1) / 2)') || failed=1; done; exit $$failed

api-check:  ## schemathesis over /openapi.json and a fuzz of malformed requests, against a real runtime
	@$(VENV)/bin/python -m pytest tests/system/test_api.py tests/frontend/test_malformed.py -q

golden:  ## rewrite the golden files and generated files; read the diff before you commit
	@$(VENV)/bin/python -m pytest tests/control tests/golden tests/architecture -q --golden-update

requirements:  ## pin requirements/ from pyproject.toml
	@v=$(VENV); for e in operator router runtime dev api clients; do \
	  $$v/bin/uv pip compile -q --upgrade --universal --python-version 3.11 --extra $$e --generate-hashes --no-emit-index-url \
	    --no-emit-find-links --no-header pyproject.toml -o requirements/$$e.txt; done
	@v=$(VENV); for f in bench/clients/requirements/*.in; do \
	  $$v/bin/uv pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	    --no-emit-find-links --no-header $$f -o $${f%.in}.txt; done
	@v=$$(python3 tools/bootstrap.py dev); $$v/bin/python -m images.licences write

wheel:  ## the wheel of all programs in dist/
	@v=$(VENV); $$v/bin/uv build -q --wheel --no-build-isolation --python $$v/bin/python -o dist && ls dist/*.whl

licences:  ## licences of all packages in the images; fails for a Python package with one that is not allowed
	@$(VENV)/bin/python -m images.licences

sbom:  ## bills of materials of the images in build/sbom
	@$(VENV)/bin/python -m images.sbom dockerfiles build/sbom

cluster-up:  ## a real two-node Kubernetes cluster on this machine
	@python3 -m tests.cluster up

cluster-down:  ## stops the cluster and removes all of it except the cache
	@python3 -m tests.cluster down

clean: cluster-down  ## cluster-down, and removes build output of the checkout (not the cache)
	@rm -rf build dist .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: help demo show test test-all check format-check lint types imports unit house search api-check golden requirements wheel licences sbom cluster-up cluster-down clean
