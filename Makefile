# Environments are made with uv, which pip fetches: seconds instead of minutes.

VENV := .venv
PYTHON := $(VENV)/bin/python
PYTHON3 := python3
UV := $(VENV)/bin/uv
PYTEST := $(PYTHON) -m pytest -q -rs --durations=15 --dist loadfile --no-loadscope-reorder
MKDOCS := NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs

# Kernels are compiled on first use: where the machine has no C compiler, one comes from the package index.
KERNELS := $(if $(shell command -v cc 2>/dev/null),,$(comma)kernels)
comma := ,

# For images: the program that builds them, and their version.
BUILDER := docker
TAG = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' api/baton_api/__init__.py)

# Bytecode is kept: without it each of the processes that tests start compiles torch's modules again, for 4 seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check check-types check-rules fix docs bench mutants e2e images release login push publish

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/demo ## fetch a small model, start everything, answer two questions
	$(VENV)/bin/baton demo

# With one thread each, because its processes use all cores. In `test-all`, torch has as many as users' workers.
test: $(VENV)/dev ## run the tests that need no servers and no long time
	OMP_NUM_THREADS=1 $(PYTEST) -n auto -m 'not slow'

test-all: $(VENV)/dev ## run all tests; up to three that fail run again, alone
	$(PYTEST) -n logical || $(PYTHON) -m checks.repeat $$?

check: $(VENV)/dev ## what a change must pass besides the tests
	@$(MAKE) --no-print-directory --jobs=2 check-types check-rules

check-types: # by one core, for most of the time
	$(VENV)/bin/mypy

check-rules:
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/codespell
	$(VENV)/bin/vulture
	$(VENV)/bin/lint-imports
	$(PYTHON) -m baton_operator.crd --check
	$(PYTHON) -m baton_operator.chart --check
	$(PYTHON) -m baton_observing --check
	$(PYTHON) -m docs.generators.reference --check
	$(MKDOCS) build --strict --quiet

fix: $(VENV)/dev ## format, repair what can be repaired, write the generated pages
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(PYTHON) -m baton_operator.crd
	$(PYTHON) -m baton_operator.chart
	$(PYTHON) -m baton_observing
	$(PYTHON) -m docs.generators.reference

docs: $(VENV)/dev ## build the documentation site in build/site; dead links are errors
	$(MKDOCS) build --strict

mutants: $(VENV)/dev ## count the small changes of the pure modules (or of TARGETS) that no test notices; an hour
	$(PYTHON) -m benchmarks.mutants $(TARGETS)

e2e: $(VENV)/dev ## run the stories on a real Kubernetes: the one of KUBECONFIG, or one started here (Linux, root, Go)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" e2e/run $(STORIES)

bench: $(VENV)/dev ## measure this machine's limits and MODEL (default smollm2) served alone and by a pair
	$(PYTHON) -m benchmarks.limits
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PYTHON) -m benchmarks.serving --model $(or $(MODEL),smollm2) \
	  --server 'one worker=baton serve {model} --port {port}' --server 'a pair=baton up {model} --port {port}'

images: ## build the images of operator, router and worker by BUILDER (docker), for REGISTRY, with TAG
	@set -e; for name in operator router worker; do \
	  DOCKER_BUILDKIT=1 $(BUILDER) build -f images/Dockerfile --target $$name -t $(if $(REGISTRY),$(REGISTRY)/)baton-$$name:$(TAG) \
	    --build-arg VERSION=$(TAG) --build-arg REVISION="$$(git rev-parse HEAD 2>/dev/null)" \
	    $(foreach name,BASE INDEX TORCH_INDEX DEVICE,$(if $($(name)),--build-arg $(name)="$($(name))")) \
	    $(if $(NETRC),--secret id=netrc$(comma)src="$(NETRC)") $(BUILD_FLAGS) .; \
	done

# REGISTRY is the images' registry, such as ghcr.io/ORGANIZATION; RELEASE is the tag in git, such as v0.2.0, or empty.
release: $(VENV)/dev ## build and check packages, chart, custom resources, bills of materials and images in build/release
	$(PYTHON) -m checks.release build/release --registry '$(REGISTRY)' --tag '$(RELEASE)' --builder '$(BUILDER)' $(if $(BASE),--base '$(BASE)')

login: ## log in to REGISTRY as REGISTRY_USER with REGISTRY_PASSWORD
	@printf %s "$$REGISTRY_PASSWORD" | $(BUILDER) login --username "$$REGISTRY_USER" --password-stdin $(firstword $(subst /, ,$(REGISTRY)))
	@printf %s "$$REGISTRY_PASSWORD" | helm registry login --username "$$REGISTRY_USER" --password-stdin $(firstword $(subst /, ,$(REGISTRY)))

push: ## push the images of `make images` to REGISTRY
	$(if $(REGISTRY),,$(error REGISTRY is not set. Name the one that nodes pull from: make push REGISTRY=registry.example/team))
	@set -e; for name in operator router worker; do $(BUILDER) push $(REGISTRY)/baton-$$name:$(TAG); done

publish: push ## publish what `make release` built: images, chart, packages, and a release of the forge
	helm push build/release/baton-*.tgz oci://$(REGISTRY)/charts
	$(UV) publish build/release/*.whl build/release/*.tar.gz
	gh release create $(RELEASE) --verify-tag --generate-notes build/release/*

# The package index's torch comes with CUDA. Without a GPU the demo leaves it out, as images with DEVICE=cpu do, and so
# it leaves out NIXL for another CUDA. An environment for tests has all of it.
GPUS := $(wildcard /dev/nvidiactl /dev/dxg /proc/driver/nvidia/version)
$(VENV)/demo: EXTRAS = runtime,nixl,chat$(KERNELS)
$(VENV)/demo: DEVICE ?= $(if $(GPUS)$(wildcard $(VENV)/dev),any,cpu)
$(VENV)/dev: EXTRAS = dev$(KERNELS)
$(VENV)/dev: DEVICE = any

# uv does not read pip's configuration; a mirror that is set there is meant for it too. The kernels need a compiler
# and none of the packages, so they are compiled meanwhile. If that fails, the first start compiles them.
# xds-protos has older files of the same names as opentelemetry-proto, and the package that uv writes last wins.
$(VENV)/demo $(VENV)/dev: pyproject.toml constraints.txt images/cpu_only.py | $(UV)
	@if [ "$(DEVICE)" = cpu ]; then \
	  echo "Installing for CPUs (no NVIDIA GPU was found; for one: make demo DEVICE=any)."; \
	  echo "Packages that uv has not cached are downloaded, 0.7 GB at most; $(VENV) becomes 1.7 GB."; \
	  $(PYTHON) images/cpu_only.py excluded constraints.txt >$(VENV)/excluded; \
	else \
	  echo "Installing with CUDA. Packages that uv has not cached are downloaded, 3.2 GB at most; $(VENV) becomes 6 GB."; \
	fi
	@index="$${PIP_INDEX_URL:-$$(python3 -m pip config get global.index-url 2>/dev/null)}"; \
	if [ -n "$$index" ] && [ -z "$$UV_DEFAULT_INDEX$$UV_INDEX_URL" ]; then export UV_DEFAULT_INDEX="$$index"; fi; \
	PYTHONPATH=api:runtime/engine $(PYTHON) -m baton_engine.ops.native.library >/dev/null 2>&1 & \
	$(UV) pip install --python $(PYTHON) --constraint constraints.txt $(if $(filter cpu,$(DEVICE)),--overrides $(VENV)/excluded) --editable '.[$(EXTRAS)]' $(if $(filter dev%,$(EXTRAS)),\
	  && $(UV) pip install --python $(PYTHON) --constraint constraints.txt --no-deps --reinstall-package opentelemetry-proto opentelemetry-proto)
	@[ "$(DEVICE)" != cpu ] || $(PYTHON) images/cpu_only.py $(VENV)/lib/python3*/site-packages $(shell command -v cc)
	@touch $@

# A system's Python may have no venv module, and may refuse to install anything outside of one. What failed leaves no
# environment, which the next try would take for one that works.
$(UV):
	@$(PYTHON3) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Baton needs Python 3.11 or newer; $(PYTHON3) is $$($(PYTHON3) --version 2>&1)." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON3=python3.12 (on Ubuntu 22.04: apt install python3.11-venv)." >&2; \
	  exit 1; }
	@if $(PYTHON3) -m venv --clear $(VENV) 2>/dev/null; then \
	  $(PYTHON) -m pip install --constraint constraints.txt uv; \
	else \
	  rm -rf $(VENV) && $(PYTHON3) -m pip install --target build/uv uv && \
	  build/uv/bin/uv venv --seed --python $(PYTHON3) $(VENV) && cp build/uv/bin/uv $(UV); \
	fi || { rm -rf $(VENV); echo "Cannot install uv into $(VENV). Needed: Python with venv or pip (on Debian: apt install python3-venv)," \
	  "and the package index." >&2; exit 1; }
