# Lockstep. `make` alone prints what there is; every target sets up what it needs.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Which engine image the lab serves: sglang (real SGLang on CPU) or sim (a simulator of its log lines and faults).
ENGINE ?= sglang
export ENGINE

VENV := .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
UV := uv==0.13.9

# The lab on this machine: targets lab and lab-down.
-include tests/lab/lab.mk

.PHONY: help setup lock lint format test unit demo docs clean

help: ## What there is
	@echo "Lockstep: make TARGET [ENGINE=sglang|sim]"
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | awk -F'\t' '{printf "  %-10s %s\n", $$1, $$2}'

setup: ## Python packages from requirements.lock into .venv (does nothing when they are there)
	@tests/setup.sh

demo: setup ## The main job on the lab: three drifted hosts become one proven fleet
	@# The campaign's night: the hosts as they were found, then what the operator did by hand, then the main job.
	@$(LAB) reset --engine $(ENGINE)
	@$(LAB) free-spark2
	ansible-playbook serve.yml -e arm=e8
	@python -m lockstep_core receipt

test: setup ## Every test: unit, lint, engine, lab, molecule (STAGES="unit lint" runs a part)
	@python tests/stages.py $(STAGES)

unit: setup ## The quick tests only
	@pytest

lint: setup ## ansible-lint (production), yamllint, ruff, mypy
	ruff check .
	ruff format --check .
	@# The core is checked under the name it has outside Ansible, the plugins under the collection's.
	@mkdir -p .mypy_cache/path && ln -sfn ../../plugins/module_utils .mypy_cache/path/lockstep_core
	MYPYPATH=.mypy_cache/path:adapters:tests/lab mypy -p lockstep_core -p lockstep_engine -p lockstep_tools -p lockstep_lab
	MYPYPATH=collections mypy -p ansible_collections.lockstep.fleet.plugins
	yamllint --strict .
	ansible-lint

format: setup ## Format the Python files
	ruff check --fix .
	ruff format .

lock: setup ## Renew requirements.lock from pyproject.toml
	pip install --quiet $(UV)
	uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-emit-find-links --python-version 3.11 \
	  --extra dev --extra mitogen --custom-compile-command 'make lock' --output-file requirements.lock pyproject.toml

docs: setup ## Write docs/switches.md from the schema; list the modules and filters (ansible-doc lockstep.fleet.NAME)
	@python -m lockstep_core switches --markdown > docs/switches.md
	@for kind in module filter test; do ansible-doc --type $$kind --list lockstep.fleet; done

clean: ## Remove caches and test results; never results/<launch>, .venv or the lab
	rm -rf .mypy_cache .pytest_cache .ruff_cache .ansible results/tests lockstep.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
