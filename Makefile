# One set of commands for people and machines; CI (.ci/run) calls only these. `make help` lists them.
#
# ARGS reaches the program of serve, test and bench:   make test ARGS="-k tree"   make serve ARGS="--port 9000"
# Where pip's index has only CUDA builds of torch:     make install PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2-135m
ARGS ?=
BIN := $(VENV)/bin
# The MODEL of the command line is served (the first of several), unless a configuration file names one.
SERVE_MODEL := $(if $(filter file default undefined,$(origin MODEL)),,$(if $(findstring --config,$(ARGS)),,--model $(firstword $(MODEL))))
INSTALLED := $(VENV)/.installed
SERVING := $(VENV)/.serving
TOOLS := .venv-conformance
CLIENTS := .venv-clients
CLIENT_PINS := tests/conformance/clients
CLUSTER := .venv-cluster
DYNAMO := .venv-dynamo
# Compiled at installation, where there is a compiler.
NATIVE := $(wildcard engine/native/cpp/*.cpp engine/native/cpp/*.h)
# After a bin/: where the environment's packages are.
PURELIB := python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

ifdef PIP_EXTRA_INDEX_URL
export PIP_EXTRA_INDEX_URL
endif

# Every silence of five seconds is explained (.ci/shown): compiling the native library alone takes a minute.
define INSTALL
	@echo "installing $(2) in $(VENV): a few minutes where all is downloaded"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) | .ci/shown "making $(VENV)"
	@$(BIN)/python -m pip install --progress-bar off --disable-pip-version-check --no-compile -c constraints.txt -e '$(1)' \
	  | .ci/shown "installing, or compiling the native library"
	@$(BIN)/python -W ignore -m compileall -qq -j 0 -x '/tests/' "$$($(BIN)/$(PURELIB))" | .ci/shown "compiling Python files" || true
endef

.PHONY: help install weights serve replicas test test-fast cluster-test conformance lint format bench clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## make the environment in .venv, with the versions of constraints.txt

# pip would compile 16,000 files one after another; a few are of other Pythons, and compile in none.
$(INSTALLED): pyproject.toml constraints.txt $(NATIVE)
	$(call INSTALL,.[dev],the packages of development)
	@touch $@ $(SERVING)

# What serving needs. Where all is installed, nothing is.
$(SERVING): pyproject.toml constraints.txt $(NATIVE)
	$(call INSTALL,.,the packages of the server)
	@touch $@

weights: $(SERVING) ## fetch and convert the weights of MODEL (smollm2-135m), once
	$(BIN)/latebranch weights fetch $(MODEL)

serve: weights ## serve MODEL (smollm2-135m) on 127.0.0.1:8000
	$(BIN)/latebranch serve $(SERVE_MODEL) $(ARGS)

replicas: weights $(CLUSTER)/.installed ## serve REPLICAS (2) copies of MODEL behind the gateway smg on 127.0.0.1:8000
	deploy/replicas.sh $(BIN)/latebranch $(CLUSTER)/bin/smg $(SERVE_MODEL) $(ARGS)

# A process a core; what shares a loaded model stays in one of them (tests/scheduling.py).
test: $(INSTALLED) ## run the whole suite on every core
	$(BIN)/python -m pytest -n logical --maxprocesses 8 $(ARGS)

test-fast: $(INSTALLED) ## run the tests that need no model: about a minute on two cores
	$(BIN)/python -m pytest -n logical --maxprocesses 8 tests/selector tests/unit -m "not slow" $(ARGS)

cluster-test: $(INSTALLED) $(CLUSTER)/.installed $(DYNAMO)/.installed ## run the tests of replicas behind a gateway and Dynamo, and of ranks
	CLUSTER_VENV=$(abspath $(CLUSTER)) DYNAMO_VENV=$(abspath $(DYNAMO)) $(BIN)/python -m pytest tests/cluster $(ARGS)

# The gateway, apart from $(VENV): it has pins of its own.
$(CLUSTER)/.installed: tests/cluster/gateway.txt
	test -x $(CLUSTER)/bin/python || $(PYTHON) -m venv $(CLUSTER)
	$(CLUSTER)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

# Dynamo over the packages of $(VENV), which a path file shows it. A dependency of ai-dynamo is at pypi.nvidia.com alone.
$(DYNAMO)/.installed: tests/cluster/dynamo.txt
	test -x $(DYNAMO)/bin/python || $(BIN)/python -m venv $(DYNAMO)
	$(BIN)/$(PURELIB) > "$$($(DYNAMO)/bin/$(PURELIB))/under.pth"
	$(DYNAMO)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	$(DYNAMO)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps ai-dynamo==1.6.1
	touch $@

conformance: $(INSTALLED) $(TOOLS)/.installed $(CLIENTS)/.installed ## run the kit of docs/conformance.md at length, all clients and tools too
	CONFORMANCE_VENV=$(abspath $(TOOLS)) CLIENTS_VENV=$(abspath $(CLIENTS)) $(BIN)/python -m pytest tests/conformance --conformance-examples 100 $(ARGS)

# Over the packages of $(VENV), which a path file shows it: torch and transformers are not installed twice.
$(TOOLS)/.installed: tests/conformance/tools.txt
	test -x $(TOOLS)/bin/python || $(BIN)/python -m venv $(TOOLS)
	$(BIN)/$(PURELIB) > "$$($(TOOLS)/bin/$(PURELIB))/under.pth"
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

# Clients with pins of their own, apart from $(VENV).
$(CLIENTS)/.installed: $(CLIENT_PINS)/python.txt $(CLIENT_PINS)/instructor.txt $(CLIENT_PINS)/package.json
	for name in python instructor; do \
		test -x $(CLIENTS)/$$name/bin/python || $(BIN)/python -m venv $(CLIENTS)/$$name; \
		$(CLIENTS)/$$name/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r $(CLIENT_PINS)/$$name.txt; \
	done
	mkdir -p $(CLIENTS)/node && cp $(CLIENT_PINS)/package.json $(CLIENTS)/node
	if command -v npm > /dev/null; then npm --prefix $(CLIENTS)/node install --silent --no-audit --no-fund; fi
	touch $@

lint: $(INSTALLED) ## check style, layout (Python and C++), types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/language.py
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)

format: $(INSTALLED) ## format the code and fix what ruff can fix
	$(BIN)/ruff format
	$(BIN)/ruff check --fix
	$(BIN)/clang-format -i $(NATIVE)

bench: $(INSTALLED) ## measure a running engine on this machine
	$(BIN)/latebranch bench $(ARGS)

clean: ## delete the environment and every tool's cache; weights stay
	rm -rf $(VENV) $(TOOLS) $(CLIENTS) $(CLUSTER) $(DYNAMO) build dist *.egg-info engine/native/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
