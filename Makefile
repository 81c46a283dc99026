# Every target sets up what it needs: a machine with Python 3.11+ and make is enough.
#   make help       these lines
#   make demo       the main job on embedded emulated engines, no GPU
#   make demo-scaleout  two Envoys, two endpoint pickers and two emulated engines; a picker is killed
#   make test       the tests (real sockets, no GPU, some minutes)
#   make test-compiled  the tests of what is compiled, slow ones too, on the compiled hot path (needs a C compiler)
#   make test-python  the tests of core and proxy on another Python, as PYTHON=python3.13; test-pythons: on each there is; test-newest-python
#   make test-slow  the fault matrix with fifty streams in the background, and as processes
#   make check      formatting, lint, types, of the benches too
#   make smoke      a short run of every bench, to see that it still runs (some minutes)
#   make test-vllm  the tests against real vLLM on CPU (installs it into .venv-vllm, some minutes)
#   make test-vllm-slow  the same of KV hand-overs between two servers, and of profiling without a network (more than an hour)
#   make fuzz       fuzz targets for a minute each, one on each core (cost per byte is one), ten thousand raw mutants on sockets
#   make properties  the property tests on examples that are new in every run (make test has the same in each)
#   make soak       ten minutes of load with clients cut and faults injected; MINUTES=60 for longer
#   make mutation   mutants of the core and of the framing gate: the share that the tests kill
#   make wheel      into dist/: the source package, a pure wheel, one compiled for this Python (needs a C compiler)
#   make release-check  the wheels, each installed in an empty environment with an empty HOME: demo, serve, bench, doctor
#   make docs       the documentation site, into build/site; a dead link is an error
#   make reference  docs/reference, the manual page and tests/sentences.txt, from the code
#   make pictures  docs/pictures: dashboard and top under load (Chromium), boards (Prometheus), diagrams, requests in flight (13 minutes)
#   make boards     configs/grafana: the dashboards of Grafana, from the table of configs/site/boards.py
#   make schemas    the JSON schemas of configs/schemas and of the Helm chart's values, from the tables that read the files
#   make test-helm  the Helm chart, rendered and linted by Helm's own engine (250 MB)
#   make test-sdks  openai, anthropic, litellm, langchain-openai and curl against an emulated engine and through hetlb
#   make bench      the recorded benches against real vLLM on CPU
#   make bench-head-to-head  hetlb and today's routers on the same load, and the tables of bench/head_to_head/RESULTS.md (90 minutes)
#   make bench-proxies  what hetlb and other proxies cost, and the tables of bench/proxies/RESULTS.md (an hour)

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# Tests wait for sockets and processes half of their time: two processes more than there are cores, each with
# tests of its own that have fixtures in common, until it is done and takes some of another.
JOBS ?= $(shell expr $$(nproc) + 2)
SPREAD := -n $(JOBS) --dist worksteal
# pytest, with what failed kept apart for each target.
TESTS = bash tests/run.sh $@
# Property tests of code that `make test` has tried on more examples: compiled; on another Python.
AGAIN := --hypothesis-profile=again
OTHER_PYTHON := --hypothesis-profile=other_python
# Folders of which `make test-slow` runs the tests; all of them.
SLOW ?=
# Tests of what is compiled. The rest runs interpreted in either build: dashboard, sources of instances, spans, the parent of workers.
INTERPRETED_OPTIONS := dns instance_files kubernetes tracing
COMPILED_TESTS := tests/core tests/proxy tests/options tests/faults tests/test_parity.py tests/cli/test_explain.py \
  tests/sim $(addprefix tests/emulator/test_,data_parallel.py generation.py prefix_caching.py) $(addprefix tests/fuzz/test_,growth.py corpus.py mutants.py) $(INTERPRETED_OPTIONS:%=--ignore=tests/options/%) \
  --ignore=tests/sim/test_against.py --ignore=tests/options/peers/workers/test_supervisor.py
PACKAGES_OF_PROXY_TESTS := hypothesis openai pytest pytest-asyncio pytest-timeout pytest-xdist python-multipart \
  tokenizers trustme websockets
PYTHONS ?= $(shell for n in 12 13 14; do for each in python3.$$n $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.$$n.*/bin/python; do \
  $$each -c 0 2> /dev/null && echo $$each && break; done; done; true)
# More options of `make bench-head-to-head`, as `--minutes 30`. It goes on with its record; without that it begins.
HEAD_TO_HEAD ?=
# Seconds for each fuzz target (that for cost takes six times as long), and mutants.
FUZZ_SECONDS ?= 60
MUTANTS ?= 10000
# Tests start hundreds of processes: none of them is to compile all modules again (0.3 s each).
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help wheel release-check boards docs pictures reference schemas test-helm test-sdks demo demo-scaleout test install-python test-python test-pythons test-newest-python test-compiled test-slow check smoke format bench bench-head-to-head bench-proxies install-vllm test-vllm test-vllm-slow fuzz properties soak mutation clean
.DELETE_ON_ERROR:

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("hetlb needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv

.venv/.run: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[tools]'
	@touch $@

.venv/.dev: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@ .venv/.run

# Not editable: what is compiled is the tree as it is now. All other packages are those of .venv, found behind its own.
SITE := -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'
.venv-compiled/.done: pyproject.toml hatch_build.py $(shell find hetlb -name '*.py') | .venv/.dev
	test -x .venv-compiled/bin/python || $(BIN)/python -m venv .venv-compiled
	HETLB_COMPILE=1 .venv-compiled/bin/python -m pip install -q --disable-pip-version-check --no-deps .
	@$(BIN)/python $(SITE) > "$$(.venv-compiled/bin/python $(SITE))/packages.pth"
	@touch $@

help:
	@sed -n 's/^#   //p' $(firstword $(MAKEFILE_LIST))

demo: .venv/.run
	@$(BIN)/hetlb demo

demo-scaleout: .venv/.dev
	@$(BIN)/python bench/scale/demo.py

test: .venv/.dev
	$(TESTS) $(BIN)/python $(SPREAD)

# PYTHONSAFEPATH: the tests and what they start take the installed hetlb, not the one in this folder.
test-compiled: .venv-compiled/.done
	PYTHONSAFEPATH=1 $(TESTS) .venv-compiled/bin/python $(SPREAD) $(AGAIN) -m 'not vllm and not light' $(COMPILED_TESTS)

# The tests of core and proxy on another Python: `make test-python PYTHON=python3.13`.
OTHER_TESTS ?= tests/core tests/proxy
OTHER = .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
install-python:
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install -q --disable-pip-version-check -e . $(PACKAGES_OF_PROXY_TESTS)

test-python: install-python
	$(TESTS)$(OTHER) $(OTHER)/bin/python $(SPREAD) $(OTHER_PYTHON) -m 'not vllm and not slow and not light' $(OTHER_TESTS)

# The same on each newer Python that this machine has, and packages.
test-pythons:
	for each in $(PYTHONS); do \
	  $(MAKE) install-python PYTHON=$$each || { echo "$$each: not tested, its packages cannot be installed" >&2; continue; }; \
	  $(MAKE) test-python PYTHON=$$each || exit; done

# What a Python between this one and the newest breaks, one of the two breaks too. Of core, what asks the library for
# more than arithmetic: random draws, pickles, entry points, text, the order of a whole scheduler's decisions.
test-newest-python:
	$(MAKE) test-pythons PYTHONS="$(lastword $(PYTHONS))" OTHER_TESTS="tests/proxy $(patsubst %,tests/core/test_%.py,engine_metrics \
	  eventlog hetlb outside_policies pickle_by_fields predictor purity queue scheduler scheduler_properties)"

test-slow: .venv/.dev
	$(TESTS) $(BIN)/python $(SPREAD) -m 'slow and not vllm' $(SLOW)

check: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python bench/check_types.py
	$(BIN)/python bench/check_words.py

smoke: .venv/.dev
	$(BIN)/python bench/smoke.py

format: .venv/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install-vllm:
	PYTHON=$(PYTHON) bash tests/vllm/install.sh

test-vllm: .venv/.dev install-vllm
	$(TESTS) $(BIN)/python -m 'vllm and not slow' tests/vllm

test-vllm-slow: .venv/.dev install-vllm
	$(TESTS) $(BIN)/python -m 'vllm and slow' tests/vllm

.venv/.build: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install -q --disable-pip-version-check build
	@touch $@

# The pure wheel is built from the source package, so that both are known to work.
wheel: .venv/.build
	$(BIN)/python -m build -o dist
	HETLB_COMPILE=1 HETLB_COMPILE_LEVEL=2 $(BIN)/python -m build -w -o dist
	@ls -l dist

# Install each wheel of dist/ in an empty environment and use it as a stranger would.
release-check: wheel
	bash configs/release_check.sh dist $(PYTHON)

docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

pictures: .venv/.dev
	PYTHONPATH=tests:. $(BIN)/python tests/dashboard/pictures.py docs/pictures
	PYTHONPATH=tests:. $(BIN)/python tests/dashboard/boards.py docs/pictures
	$(BIN)/python configs/site/diagrams.py docs/pictures
	$(BIN)/python bench/in_flight.py

reference: .venv/.dev
	PYTHONPATH=. $(BIN)/python configs/site/reference.py
	$(BIN)/python configs/site/sentences.py

boards: .venv/.run
	$(BIN)/python configs/site/boards.py

schemas: .venv/.run
	for kind in fleet profile market cluster place stages; do $(BIN)/hetlb schema $$kind > configs/schemas/$$kind.json; done
	PYTHONPATH=. $(BIN)/python configs/site/chart_schema.py

test-helm: .venv/.dev
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[helm]'
	$(BIN)/python -m pytest tests/test_helm.py

# An environment of its own: these packages pin other versions of hetlb's dependencies.
.venv-sdks/.done: pyproject.toml
	test -x .venv-sdks/bin/python || $(PYTHON) -m venv .venv-sdks
	.venv-sdks/bin/python -m pip install -q --disable-pip-version-check -e '.[sdks]' hypothesis pytest pytest-asyncio pytest-timeout
	@touch $@

test-sdks: .venv-sdks/.done
	HETLB_ALL_SDKS=1 .venv-sdks/bin/python -m pytest tests/sdks

mutation: .venv/.dev
	$(BIN)/python bench/mutation/run.py

bench: .venv/.dev install-vllm
	$(BIN)/python bench/vllm_pair.py

bench-head-to-head: .venv-compiled/.done install-vllm
	.venv-compiled/bin/python bench/head_to_head/run.py --page --resume $(HEAD_TO_HEAD)

bench-proxies: .venv/.run
	$(BIN)/python bench/proxies/run.py --instances 2,8 --page \
	  --proxies hetlb,hetlb-interpreted,vllm-router,vllm-router-rr,sglang-router,envoy,nginx,haproxy,litellm,aiohttp-relay

.venv/.fuzz: pyproject.toml | .venv/.dev
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[fuzz]' || echo 'no atheris for this Python: fuzzing without coverage'
	@touch $@

fuzz: .venv/.dev .venv/.fuzz
	$(BIN)/python tests/fuzz/run.py --seconds $(FUZZ_SECONDS) --mutants $(MUTANTS)

properties: .venv/.dev
	$(BIN)/python -m pytest $(SPREAD) -m 'hypothesis and not vllm' --hypothesis-profile=search

soak: .venv/.dev
	$(BIN)/python bench/faults/soak.py --minutes $(or $(MINUTES),10)

clean:
	rm -rf build dist .venv .venv-3.* .venv-compiled .venv-sdks .venv-vllm .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
