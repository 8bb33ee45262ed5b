# `make` alone lists what there is. Needs Python 3.11 or newer, and nothing else.

PYTHON ?= python3
VENV   ?= .venv
# The clients of others, whose dependencies differ from the product's.
CLIENTS ?= .clients-venv
BIN    := $(VENV)/bin
# What `make test` leaves out; `make test-faults`, `make test-browser`, `make test-clients`, `make compose-test` and
# `make gpu` run the rest.
QUICK  := not slow and not faults and not docker and not gpu and not browser and not clients

.DEFAULT_GOAL := help
.PHONY: docs help serve demo test test-again test-faults test-browser test-clients test-fuzz check lint format bench bench-morph bench-quality bench-paper bench-windows bench-transform bench-serving bench-scheduler bench-planner bench-placement bench-estimate bench-deploy bench-profile-load bench-prefix bench-peers gpu gpu-kit demo-model compose-test clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  INSTAR_PORT=9000 INSTAR_WORKERS=2 MODEL=path/to/model make serve"

serve: $(VENV)/.serve ## start the service; MODEL=dir, INSTAR_PORT and INSTAR_WORKERS choose what
	@$(if $(MODEL),INSTAR_MODEL='$(MODEL)') exec $(BIN)/instar serve

demo: $(VENV)/.serve ## a burst with and without morphs, and a long request, on a service of its own; under three minutes
	@$(BIN)/python -c "import matplotlib" 2>/dev/null || $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt matplotlib || \
	  echo "matplotlib cannot be installed: there will be no picture"
	@exec $(BIN)/instar demo

test: $(VENV)/.dev ## the tests, without the slow ones
	@$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "$(QUICK)"

test-again: $(VENV)/.dev ## the tests that failed last, alone; if all pass now, they depend on timing
	@$(BIN)/pytest -q -rA --last-failed --last-failed-no-failures none --show-capture no --maxfail 3 -m "$(QUICK)"

test-faults: $(VENV)/.dev ## harms the real service, and runs the slow tests; ends in a table; STORM_S=600: long storms; JOBS=3: files at once
	@STORM_S=$${STORM_S:-60} $(BIN)/pytest -q -n $${JOBS:-2} --dist loadfile --durations=40 -m "(faults or slow) and not docker and not gpu and not browser and not clients"

.PHONY: soak
soak: $(VENV)/.dev ## hours of load, morphs, deaths and replacements: nothing lost, nothing grows; HOURS=2
	@$(BIN)/python -m bench.soak --hours $(or $(HOURS),2)

.PHONY: test-upgrade
test-upgrade: $(VENV)/.dev ## replaces processes of the release before by those of this one, under load; some minutes
	@$(BIN)/pytest -q -s -m slow tests/upgrade

test-browser: $(VENV)/.browser ## the dashboard in chromium; INSTAR_SCREENSHOTS=1 writes docs/images
	@$(BIN)/pytest -q -m browser tests/browser

test-clients: $(CLIENTS)/.clients ## openai, langchain, litellm, lm-eval and others, unmodified, against the real service
	@SERVICE_PYTHON=$(BIN)/python $(CLIENTS)/bin/pytest -q -m clients tests/clients

test-fuzz: $(VENV)/.dev ## requests made from /openapi.json, to the real service; CASES=100000
	@$(BIN)/python -m bench.fuzz --cases $(or $(CASES),10000)

check: lint ## lint, format, spelling, types, and the rules of docs/structure.md
	@$(BIN)/pytest -q tests/test_structure.py

lint: $(VENV)/.dev ## check without its tests, which are also among the quick ones
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/codespell
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: $(VENV)/.dev ## put imports and spaces in order
	@$(BIN)/ruff check --select I --fix -q
	@$(BIN)/ruff format

bench: $(VENV)/.dev ## the numbers, each beside its baseline; JSON in bench/results
	@for part in 'engine offline' 'engine single_stream' 'engine steps' 'engine experts' 'gateway road' 'gateway idle'; do \
	  $(BIN)/python -m bench.$$part || exit 1; done

bench-quality: $(VENV)/.dev ## perplexity of the demo model against the number of swapped layers
	@$(BIN)/python -m bench.quality

bench-morph: $(VENV)/.dev ## a burst with and without morphs, and what swaps cost; a quarter of an hour
	@status=0; for part in burst cost disk; do $(BIN)/python -m bench.morph $$part || status=1; done; exit $$status

PAPER = $(if $(TRACES),--traces '$(TRACES)') $(if $(SIZE),--size '$(SIZE)') $(if $(MINUTES),--minutes '$(MINUTES)')

bench-paper: $(VENV)/.dev ## the paper's evaluation; TRACES=dir of Azure's traces; hours, MINUTES=60 at a time; SIZE=100M
	@$(BIN)/python -m bench.paper $(PAPER)

bench-windows: $(VENV)/.dev ## ten windows of Azure's traces at their own speed; TRACES, MINUTES and SIZE as above; hours
	@$(BIN)/python -m bench.paper windows $(PAPER)

bench-transform: $(VENV)/.dev ## what a change of tensor parallelism costs, and padding for it; some minutes
	@status=0; for part in padding costs; do $(BIN)/python -m bench.transform $$part || status=1; done; exit $$status

bench-serving: $(VENV)/.dev ## four real workers under long requests, our scheduler against others; 25 minutes
	@$(BIN)/python -m bench.serving

bench-scheduler: $(VENV)/.dev ## the same in a model of eight GPUs; some minutes
	@$(BIN)/python -m bench.scheduler

bench-planner: $(VENV)/.dev ## the planner against each lever alone, simulated; some minutes
	@$(BIN)/python -m bench.planner

bench-placement: $(VENV)/.dev ## placement policies in a model of eight GPUs; a quarter of a minute
	@$(BIN)/python -m bench.placement

bench-estimate: $(VENV)/.dev ## what two layers tell of whole models, against real runs; a quarter of an hour
	@$(BIN)/python -m bench.estimate

bench-deploy: $(VENV)/.dev ## models deployed by intent against fixed configurations; a quarter of an hour
	@$(BIN)/python -m bench.deploy

bench-profile-load: $(VENV)/.dev ## what requests feel of a model that is profiled on their worker; a quarter of an hour
	@$(BIN)/python -m bench.profiling

bench-prefix: $(VENV)/.dev ## conversations with and without the prefix cache; some minutes
	@$(BIN)/python -m bench.prefix

bench-peers: $(VENV)/.dev ## beside llama.cpp and transformers, writes README's table; LLAMA_SERVER=path; 40 minutes
	@$(BIN)/python -m bench.peers $(if $(LLAMA_SERVER),--llama-server '$(LLAMA_SERVER)')

gpu: ## every measurement on a GPU, in parts; PARTS=card,decode; needs a PYTHON with torch, triton and more
	@$(PYTHON) -m bench.gpu $(if $(PARTS),--parts '$(PARTS)')

gpu-kit: $(VENV)/.dev ## pack what such a machine lacks into gpu-kit/, also WITH="flashinfer humming"; there: gpu-kit/run --parts card,decode
	@$(BIN)/python -m bench.gpu.kit $(foreach name,$(WITH),--with '$(name)')

demo-model: $(VENV)/.dev ## train models/demo anew
	@$(BIN)/python models/train_demo.py

docs: $(VENV)/.docs ## the documentation as a site, in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q && echo "build/site/index.html"

compose-test: $(VENV)/.dev ## docker compose up for real, one completion through it, down
	@$(BIN)/pytest -q -s -m docker

clean: ## remove the environment and caches
	rm -rf $(VENV) $(CLIENTS) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# Stamps: installed anew when a pin or a dependency changed.
$(VENV)/.serve: constraints.txt pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV) (the first time takes minutes: torch is large)"
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[services,worker,embedded]'
	@touch $@

# All that .serve has and more, so that a fresh clone resolves and installs once.
$(VENV)/.dev: constraints.txt pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV) (the first time takes minutes: torch is large)"
	@$(BIN)/pip install -q --disable-pip-version-check $(PIP_OPTIONS) -c constraints.txt -e '.[services,worker,embedded,otel,dev]'
	@touch $(VENV)/.serve $@

$(VENV)/.browser: constraints.txt pyproject.toml | $(VENV)/.dev
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[browser]'
	@touch $@

$(VENV)/.docs: constraints.txt pyproject.toml | $(VENV)/.serve
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

$(CLIENTS)/.clients: tests/clients/requirements.txt tests/clients/constraints.txt | $(VENV)/.dev
	@echo "Installing the clients into $(CLIENTS)"
	@$(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/pip install -q --disable-pip-version-check -c tests/clients/constraints.txt -r tests/clients/requirements.txt
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Instar needs Python 3.11 or newer and $(PYTHON) is older: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV)
