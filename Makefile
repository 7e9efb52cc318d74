# Targets end with a `##` text; `make` alone lists them, in groups and in this order.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
DEMO_BIN := .venv-demo/bin
PIP := -m pip --disable-pip-version-check install --quiet
PYTEST_FLAGS ?=
# Tests start hundreds of processes, and pytest rewrites 800 modules: both keep what they compiled.
unexport PYTHONDONTWRITEBYTECODE
# A Postgres for each worker; a file's tests stay together because they share a bus. More workers than
# cores: half of the time tests wait for timers and processes.
PARALLEL := --numprocesses 4 --dist loadfile --no-loadscope-reorder
PACKAGES := dataplane operator pipeline
ALERTS := docs/alerts.yaml docs/operator-alerts.yaml
CODE := dataplane operator pipeline charts tests bench e2e examples .ci

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^# --- /{gsub(/^# -+ | -+$$/, ""); print "\n" $$0} \
		/^[a-z0-9-]+:.*## /{printf "  %-18s  %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# --- first --------------------------------------------------------------------------------------

.PHONY: setup
setup: .venv/.ready ## make .venv with everything for development

.venv/.ready: requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python $(PIP) --require-hashes -r requirements.lock
	$(BIN)/python $(PIP) --no-deps --no-build-isolation -e .
	@touch $@

.venv-demo/.ready: requirements-demo.lock pyproject.toml
	test -x $(DEMO_BIN)/python || $(PYTHON) -m venv .venv-demo
	$(DEMO_BIN)/python $(PIP) --require-hashes -r requirements-demo.lock
	$(DEMO_BIN)/python $(PIP) --no-deps --no-build-isolation -e .
	@touch $@

.venv-s3/.ready: requirements-s3.lock
	test -x .venv-s3/bin/python || $(PYTHON) -m venv .venv-s3
	.venv-s3/bin/python $(PIP) --require-hashes -r requirements-s3.lock
	@touch $@

.venv-declarative/.ready .venv-spark42/.ready: .venv-%/.ready: requirements-%.lock pyproject.toml
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python $(PIP) --require-hashes -r requirements-$*.lock
	.venv-$*/bin/python $(PIP) --no-deps --no-build-isolation -e .
	@touch $@

HOOK = $(shell git rev-parse --git-path hooks)/commit-msg

.PHONY: hooks
hooks: ## let git check each commit message as CI does
	@test ! -e "$(HOOK)" || grep -q commit_messages "$(HOOK)" || { echo "$(HOOK) exists" >&2; exit 1; }
	@mkdir -p "$(dir $(HOOK))"
	@printf '%s\n' '#!/bin/sh' 'f=.ci/commit_messages.py; test ! -x $$f || exec $$f "$$1"' > "$(HOOK)"
	@chmod +x "$(HOOK)"

# --- running ------------------------------------------------------------------------------------

.PHONY: demo
demo: .venv-demo/.ready ## a bus from nothing, used and checked with the SDK
	@$(DEMO_BIN)/python examples/demo.py

.PHONY: demo-pipeline
demo-pipeline: setup ## the same with pipelines, one of them killed; needs java
	@$(BIN)/python examples/demo_pipeline.py

.PHONY: dev
dev: .venv-demo/.ready ## a bus on this machine from examples/, data in .postbus
	@$(DEMO_BIN)/python -m postbus dev examples $(DEV_FLAGS)

.PHONY: accelerate
accelerate: setup ## compile the functions in C; needs a C compiler
	@$(BIN)/python dataplane/compile_runs.py

.PHONY: build
build: setup ## dist/: an sdist, a pure wheel, one of this platform
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation --sdist
	@POSTBUS_ACCELERATE=off $(BIN)/python -m build --no-isolation --wheel
	@$(BIN)/python -m build --no-isolation --wheel

.PHONY: images
images: ## build container images, with docker or buildah
	@e2e/build-images.sh

# --- load and faults ----------------------------------------------------------------------------

.PHONY: bench
bench: setup ## measure this bus beside its peers; needs a C++ compiler
	@$(BIN)/python bench/run.py $(BENCH_FLAGS)

.PHONY: bench-pipeline
bench-pipeline: setup ## measure pipelines; needs java, mvn, a C++ compiler
	@$(BIN)/python bench/pipelines.py $(BENCH_FLAGS)

.PHONY: kill-test
kill-test: setup ## kill -9 broker and Postgres under load, check the record
	@$(BIN)/python -m tests.faults.kill_nine $(KILL_FLAGS)

.PHONY: kill-test-mixed
kill-test-mixed: setup ## the same with sessions, topics, forwards, transactions
	@$(BIN)/python -m tests.faults.mixed_kills $(KILL_FLAGS)

.PHONY: kill-test-pipeline
kill-test-pipeline: setup ## kill -9 pipelines, broker, Postgres; needs java
	@for options in "drain" "drain --executors" "capture" "capture --format delta" \
		"capture --format iceberg" "state"; do \
		$(BIN)/python -m tests.faults.pipeline_kills --scenario $$options $(KILL_FLAGS) || exit; \
	done
	@$(BIN)/python -m tests.faults.group_reads
	@$(BIN)/python -m tests.faults.replay_kills $(KILL_FLAGS)
	@$(BIN)/python -m tests.faults.resend_kills $(KILL_FLAGS)

.PHONY: two-process-test
two-process-test: setup ## stop, kill, pause, cut off two processes on one store
	@$(BIN)/python -m tests.faults.two_processes $(ROUND_FLAGS)

.PHONY: e2e-faults
e2e-faults: setup ## faults of a bus on a node, under clients; FAULTS, SEED
	@e2e/test.sh $(BIN)/python -m e2e.faults.run --faults $(FAULTS) --seed $(SEED) $(FAULT_FLAGS)

FAULTS ?= 200
SEED ?= 1

.PHONY: fuzz
fuzz: accelerate ## mutated input for nine readers, 10 minutes each
	@$(BIN)/python -m tests.amqp.fuzz_connection $(FUZZ_SECONDS)
	@$(BIN)/python -m tests.message.fuzz_message $(FUZZ_SECONDS)
	@$(BIN)/python -m tests.rules.fuzz_filters $(FUZZ_SECONDS)
	@$(BIN)/python -m tests.broker.access.fuzz_tokens $(FUZZ_SECONDS)
	@$(BIN)/python -m tests.edge.runtime.fuzz_http $(FUZZ_SECONDS)
	@$(BIN)/python -m tests.edge.bulk.fuzz_bulk $(FUZZ_SECONDS)
	@$(BIN)/python -m tests.edge.atom.fuzz_atom $(FUZZ_SECONDS)
	@$(BIN)/python -m tests.edge.amqp.fuzz_websocket $(FUZZ_SECONDS)
	@$(BIN)/python -m tests.fast.fuzz_runs $(FUZZ_SECONDS)

.PHONY: fuzz-control
fuzz-control: setup ## the same for the control API and its OpenAPI document
	@$(BIN)/python -m tests.edge.control.fuzz_control $(FUZZ_SECONDS)

FUZZ_SECONDS ?= 600

# --- checks and tests ---------------------------------------------------------------------------

.PHONY: check
check: setup ## format, lint, types, layers, unused code
	$(BIN)/ruff format --check --quiet $(CODE)
	$(BIN)/ruff check --quiet $(CODE)
	$(BIN)/mypy --no-error-summary --export-ref-info --no-sqlite-cache
	$(BIN)/mypy --no-error-summary .ci/commit_messages.py
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.unused_definitions
	$(BIN)/python -m postbus_operator.crdgen --check crds
	$(BIN)/python -m postbus_operator.generate.reference --check docs/guides/kubernetes-reference.md
	$(BIN)/python -m postbus_operator.generate.chartgen --check charts $(ALERTS)
	$(BIN)/python -m dashboards.generate --check charts/postbus/dashboards

.PHONY: format
format: setup ## format the code and apply safe fixes
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

.PHONY: test
test: setup ## all tests, on real Postgres and sockets; 16 minutes
	@POSTBUS_ACCELERATE=off $(BIN)/python -m pytest $(PARALLEL) $(PYTEST_FLAGS)

.PHONY: test-accelerated
test-accelerated: accelerate ## those of the broker with functions in C; 10 minutes
	@POSTBUS_ACCELERATE=require $(BIN)/python -m pytest $(PARALLEL) $(ACCELERATED) $(PYTEST_FLAGS)

# What runs a broker or a part of it; the operator and pipelines use none of these functions.
ACCELERATED := $(addprefix tests/,amqp assembly broker edge entity fast faults message store) \
	--ignore-glob="tests/faults/*pipeline*"

.PHONY: test-fast
test-fast: setup ## those that need no Postgres and no patience, in a minute
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile \
		-m "not slow and not postgres and not sdk and not kube" $(PYTEST_FLAGS)

.PHONY: test-sdk
test-sdk: setup ## SDKs of all languages on a bus; needs node, go, java, mvn
	@rm -rf tests/sdk/results
	@$(BIN)/python -m pytest tests/sdk -m sdk $(PYTEST_FLAGS)
	@$(BIN)/python -m tests.sdk.coverage $(REPORT_FLAGS)

.PHONY: test-store
test-store: setup ## the store with commits as statements of the driver
	@$(BIN)/python -m pytest tests/store --numprocesses 2 -m "thorough" $(PYTEST_FLAGS)

SPARK_VENVS := .venv-declarative/.ready .venv-s3/.ready .venv-spark42/.ready

.PHONY: test-pipeline
test-pipeline: setup $(SPARK_VENVS) ## more tests on Spark, with kills, also on 4.2; needs java
	@$(BIN)/python -m pytest tests/pipeline tests/faults -m "thorough" $(PYTEST_FLAGS)
	@.venv-spark42/bin/python -m pytest tests/pipeline $(PYTEST_FLAGS)

.PHONY: kube-tools
kube-tools: ## build etcd, kube-apiserver, kubectl and helm; needs go
	@e2e/build-tools.sh
	@tests/kube/foreign_types/build.sh

.PHONY: test-kube
test-kube: setup kube-tools ## custom resources on a real API server; needs go
	@$(MAKE) --no-print-directory metrics-tools || echo "no dashboards without prometheus" >&2
	@$(BIN)/python -m pytest tests/kube -m "kube and not thorough" \
		--numprocesses 2 --dist loadfile $(PYTEST_FLAGS)

.PHONY: test-kube-slow
test-kube-slow: setup kube-tools ## more of its cases: other failures, kills after each write
	@$(BIN)/python -m pytest tests/kube -m "kube and thorough" $(PYTEST_FLAGS)

.PHONY: e2e-up
e2e-up: ## start a cluster: E2E_CLUSTER=node (root), kind or existing
	@e2e/up.sh

.PHONY: e2e-down
e2e-down: ## end that cluster
	@e2e/down.sh

.PHONY: e2e
e2e: setup ## end-to-end tests on such a cluster, which then ends
	@E2E_IMAGES="$(E2E_IMAGES)" e2e/test.sh e2e/suite.sh $(PYTEST_FLAGS)

.PHONY: e2e-slow
e2e-slow: setup ## tests of such a cluster that wait for minutes of real time
	@E2E_IMAGES="$(E2E_IMAGES)" e2e/test.sh $(BIN)/python -m pytest e2e/tests -m slow $(PYTEST_FLAGS)

E2E_IMAGES := postbus postbus-store postbus-pipeline

.PHONY: e2e-scale
e2e-scale: setup ## measure 10,000 entities on the own node; SCALE="--help"
	@e2e/test.sh $(BIN)/python -m e2e.scale $(SCALE)

.PHONY: e2e-scale-buses
e2e-scale-buses: setup kube-tools ## measure 500 buses on a stand-in; no node
	@$(BIN)/python -m e2e.scale.buses $(SCALE)

.PHONY: e2e-smoke
e2e-smoke: setup ## install, message, pod kill, five faults on such a cluster
	@e2e/test.sh e2e/smoke.sh $(PYTEST_FLAGS)

.PHONY: e2e-upgrade
e2e-upgrade: setup ## from charts and images of FROM to this commit and back
	@e2e/upgrade.sh $(PYTEST_FLAGS)

.PHONY: metrics-tools
metrics-tools: ## unpack prometheus and promtool; needs Debian
	@command -v promtool >/dev/null || e2e/install.sh metrics

.PHONY: test-alerts
test-alerts: metrics-tools ## the alert rules with Prometheus's own promtool
	$(PROMTOOL) check rules $(ALERTS)
	$(PROMTOOL) test rules tests/alerts_test.yaml tests/operator_alerts_test.yaml

PROMTOOL = PATH="$$PATH:$${E2E_CACHE:-e2e/.cache}/bin" promtool

# --- written by programs ------------------------------------------------------------------------

.PHONY: behaviours
behaviours: setup ## run all tests, write docs/behaviours.md from them
	@$(BIN)/python -m pytest $(PARALLEL) --behaviours-write

.PHONY: openapi
openapi: setup ## write docs/openapi.json from the table of the control API
	@$(BIN)/python -c "from postbus.edge.control.openapi import openapi_text as text; print(text(), end='')" > docs/openapi.json

.PHONY: crds
crds: setup ## write crds/, their reference and what charts have of them
	@$(BIN)/python -m postbus_operator.crdgen crds
	@$(BIN)/python -m postbus_operator.generate.reference docs/guides/kubernetes-reference.md
	@$(BIN)/python -m postbus_operator.generate.chartgen charts $(ALERTS)
	@$(BIN)/python -m dashboards.generate charts/postbus/dashboards

.PHONY: manifests
manifests: setup ## write operator/manifests from the chart; needs helm
	@$(HELM) template postbus charts/postbus --namespace postbus-system > $(RENDERED)
	@$(BIN)/python -m postbus_operator.generate.plain_manifests < $(RENDERED) > operator/manifests/operator.yaml
	@rm $(RENDERED)

HELM ?= $(or $(shell command -v helm),$(or $(E2E_CACHE),e2e/.cache)/bin/helm)
RENDERED := operator/manifests/rendered.tmp

.PHONY: dashboard
dashboard: setup kube-tools metrics-tools ## draw the dashboards of a loaded bus, three minutes
	@$(BIN)/python -m tests.kube.draw_dashboards docs/images

.PHONY: lock
lock: setup ## compile the lock files from pyproject.toml
	$(BIN)/uv pip compile pyproject.toml $(LOCK_FLAGS) --extra bulk --extra dataplane --extra embedded --extra operator --extra pipeline --extra tracing --group dev -o requirements.lock
	$(BIN)/uv pip compile pyproject.toml $(LOCK_FLAGS) --extra dataplane --extra embedded --group demo -c requirements.lock -o requirements-demo.lock
	$(BIN)/uv pip compile pyproject.toml $(LOCK_FLAGS) --extra bulk --extra dataplane --extra operator --extra tracing --group sdk -c requirements.lock -o requirements-image.lock
	$(BIN)/uv pip compile pyproject.toml $(LOCK_FLAGS) --extra pipeline -c requirements.lock -o requirements-pipeline.lock
	$(BIN)/uv pip compile --group build $(LOCK_FLAGS) -c requirements.lock -o requirements-build.lock
	$(BIN)/uv pip compile --group s3 $(LOCK_FLAGS) -o requirements-s3.lock
	$(BIN)/uv pip compile pyproject.toml $(LOCK_FLAGS) --extra pipeline --group declarative -c requirements.lock -o requirements-declarative.lock
	$(BIN)/uv pip compile pyproject.toml $(LOCK_FLAGS) --extra bulk --extra dataplane --extra embedded --extra pipeline --group spark42 -c requirements-demo.lock -o requirements-spark42.lock

LOCK_FLAGS := --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock"
