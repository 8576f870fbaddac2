# Everything here needs only make and a Python >= 3.10; `make help` lists the targets.
PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help setup serve test clusters test-long browser helm-tools lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv, install the package, pull the default model (a second run skips what is done)
	@$(BIN)/headwater model pull >/dev/null

# The stamp is touched last, so an interrupted install is done again; pip skips what is already there.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found: set PYTHON=/path/to/python3.10-or-newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1): Headwater needs 3.10 or newer (set PYTHON=...)" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "setup: creating .venv"; \
	  $(PYTHON) -m venv --clear .venv || { \
	  echo "error: $(PYTHON) cannot create .venv: install its venv module (python3-venv)" >&2; exit 1; }; }
	@echo "setup: installing headwater and its dependencies into .venv (some minutes the first time)"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq -c constraints.txt -e '.[test]'
	@touch $@

serve: setup ## start a cluster and the gateway here; pass flags in ARGS="--prefill 2 --decode 2"
	@exec $(BIN)/headwater serve $(ARGS)

lint: $(STAMP) ## ruff, mypy and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The linters take one core for half a minute, and clusters rarely need both. Tests of clusters share one Ray and the
# machine, so they run one by one; of the others, most take one core each.
test: setup ## lint, types and the tests; pass pytest flags in ARGS
ifeq ($(strip $(ARGS)),)
	@$(MAKE) --no-print-directory -j2 lint clusters
	$(BIN)/python -m pytest -n 2 --dist loadfile --ignore-glob='tests/cluster/test_*' tests
else
	@$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest $(ARGS)
endif

clusters: $(STAMP) browser
	$(BIN)/python -m pytest tests/cluster/test_*.py

test-long: setup browser ## the tests that take minutes, and the property tests with many more examples
	$(BIN)/python -m pytest -m 'long or hypothesis' --hypothesis-profile=long $(ARGS)

browser: ## install a headless Chromium for the dashboard's tests, unless one is there or it may not
	@tests/browser.sh

helm-tools: $(STAMP) ## fetch the Helm that the chart's tests use, unless it is there; prints its path
	@$(BIN)/python helm/get_helm.py

clean: ## remove .venv and what the tools leave (the model cache stays)
	rm -rf .venv build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
