# Everything runs in .venv with the exact versions of constraints.txt; a second call installs nothing.
PYTHON ?= python3
CONFIG ?= configs/tiny_cpu.yaml
ARGS ?=
# What is tested: all of tests/, or one of its folders, which mirror those of finetune/.
TESTED = $(if $(FOLDER),tests/$(FOLDER))

# Threads that wait sleep instead of spinning: two spinning processes on two cores slow each other tenfold.
export OMP_WAIT_POLICY ?= passive
# Without bytecode each worker compiles the tests in six seconds, and each process finetune in a quarter of one.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
READY := .venv/.ready
DEV := .venv/.ready-dev
OLDEST := .venv-oldest/bin
NEWEST := .venv-newest/bin
# The torch of test-oldest and test-newest. Of 2.11, the lowest allowed, not every mirror has a CPU build.
TORCH ?=
# What test-newest takes in place of released transformers, where it can be had; MAIN= takes the release.
MAIN ?= git+https://github.com/huggingface/transformers
# uv takes the build of torch for this machine's driver, or for a CPU, from PyTorch's index.
UV ?= $(shell command -v uv 2>/dev/null)
UV_FLAGS ?= --torch-backend=auto

.DEFAULT_GOAL := help
.PHONY: help setup finetune data plan fit merge test test-fast test-long durations test-oldest test-newest house lock check notebooks bench golden sweep many-gpus faults faults-ranks mutations exports answers gpu-check docs

help: ## Show the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | column -t -s '	'

setup: $(DEV) ## Create .venv and install the tested versions, with what tests and notebooks need.

$(READY): constraints.txt pyproject.toml
	$(call install,torch,--editable .)

$(DEV): constraints.txt pyproject.toml $(READY)
	$(call install,torch,--editable . --group dev)

.venv-oldest/.ready: constraints-oldest.txt pyproject.toml
	$(call install,torch==$(or $(TORCH),2.11.0),--editable . --group test)

# Made anew at each call, because new versions may have come out.
.venv-newest/.ready: FORCE
	$(check_python)
	rm -rf $(@D)
	mkdir -p build
	$(PYTHON) .ci/uncapped >build/uncapped.txt
	$(call install,torch$(if $(TORCH),==$(TORCH)),--requirement build/uncapped.txt)
	$(if $(MAIN),$(NEWEST)/python -m pip install $(MAIN) >build/main.log 2>&1 || echo 'skipped: $(MAIN) cannot be had (build/main.log)')
	$(NEWEST)/python -m pip install --quiet --no-deps --editable .

.PHONY: FORCE
FORCE:

# Install $(1), which is torch, and $(2) into the environment of the target, with the versions of its first prerequisite.
# Python compiles what a process imports; all of torch and transformers takes a minute.
ifneq ($(UV),)
define install
	$(check_python)
	$(UV) venv --quiet --allow-existing --seed --python $(PYTHON) $(@D)
	$(UV) pip install --quiet --python $(@D) $(UV_FLAGS) $(pins) $(1) $(2) || \
		{ echo "where PyTorch's index cannot be reached: make UV_FLAGS='--find-links FOLDER', or by pip: make UV="; exit 1; }
	@touch $@
endef
else
define install
	$(check_python)
	@test -d $(@D) || echo 'uv is not installed: pip takes minutes where it takes seconds (pip install uv)'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(if $(driver),,$(pip_install) --no-deps $(cpu_builds) $(1))
	$(pip_install) $(1) $(2)
	@touch $@
endef
endif
pip_install = $(@D)/bin/python -m pip install --quiet --no-compile $(pins)
pins = $(if $(filter %.txt,$<),--constraint $<)
driver = $(shell command -v nvidia-smi || ls /proc/driver/nvidia/version 2>/dev/null)
# Asked once, and only for torch: where it cannot be reached, pip takes the build that its other sources have.
cpu_builds := --retries 0 --timeout 10 --extra-index-url https://download.pytorch.org/whl/cpu

define check_python
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'error: finetune needs Python 3.11 or newer; set PYTHON=python3.x'; exit 4; }
endef

finetune: $(READY) ## Train CONFIG (default configs/tiny_cpu.yaml) with ARGS="section.key=value ...".
	$(BIN)/finetune train $(CONFIG) $(ARGS)

data: $(READY) ## Look at the rows of CONFIG as the model sees them; HTML=look.html writes a page.
	$(BIN)/finetune data $(CONFIG) $(if $(HTML),--html "$(HTML)") $(ARGS)

plan: $(READY) ## Forecast the memory of CONFIG on GPU="RTX 4090" (a card, a size, auto or cpu).
	$(BIN)/finetune plan $(CONFIG) $(if $(GPU),--gpu "$(GPU)") $(ARGS)

fit: $(READY) ## Write CONFIG fitted to GPU="RTX 4090".
	$(BIN)/finetune fit $(CONFIG) $(if $(GPU),--gpu "$(GPU)") $(ARGS)

merge: $(READY) ## Merge RUN=runs/... into a 16-bit model and prove it.
	$(BIN)/finetune merge $(or $(RUN),$(error give RUN=runs/NAME))

test: $(DEV) ## Run the tests, notebooks included; FOLDER=data runs those of finetune/data alone.
	$(BIN)/python -m pytest -n 2 --dist worksteal $(TESTED) $(ARGS)

test-fast: $(DEV) ## Run all but the slow tests, for while you edit; FOLDER=data as above.
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu and not long" $(TESTED) $(ARGS)

test-long: $(DEV) ## Run the long tests, which make test leaves out: more cases of what others show.
	$(BIN)/python -m pytest -n 3 --dist worksteal -m long $(TESTED) $(ARGS)

durations: $(DEV) ## Run the tests on an idle machine and write the seconds of each file to tests/durations.json.
	report=$$(mktemp) && $(BIN)/python -m pytest -n 2 --dist worksteal --junitxml "$$report" && \
		$(BIN)/python tests/durations.py "$$report"

test-oldest: .venv-oldest/.ready ## Run the quick tests with the lowest versions that pyproject.toml allows.
	$(OLDEST)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu and not long" $(ARGS)

test-newest: SHELL := bash
test-newest: $(DEV) .venv-newest/.ready ## Run the quick tests with the newest versions of all, and say what moves beside .venv.
	set -o pipefail; failed=0; \
	$(NEWEST)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu and not long" $(ARGS) \
		|& tee build/newest.log || failed=1; \
	$(BIN)/python benchmarks/versions.py $(NEWEST)/python --output build/versions.json |& tee build/moved.md || failed=1; \
	grep -E '^(FAILED|ERROR) ' build/newest.log | sed 's/^/- /' | tee -a build/moved.md; \
	exit $$failed

house: $(DEV) ## Count what a reader or a new feature has to go through.
	$(BIN)/python tests/test_house.py

lock: ## Pin what pyproject.toml allows in constraints*.txt; ARGS=--upgrade takes the newest. Needs uv.
	.ci/lock $(ARGS)

check: $(DEV) ## Lint, types, unused code, the direction of imports and the subjects of new commits.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/vulture
	$(BIN)/lint-imports
	.ci/subjects

docs: $(DEV) ## Write tables, references and tests/messages.txt, and the site to site/, with its links checked.
	$(BIN)/python benchmarks/write_docs.py
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "" --record-messages
	$(BIN)/mkdocs build --strict

notebooks: $(DEV) ## Execute the notebooks.
	$(BIN)/python -m pytest -m "" tests/test_notebooks.py

bench: $(DEV) ## Run the CPU benchmarks and write benchmarks/results/ (an hour).
	$(BIN)/python benchmarks/installing.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/log_probs.py
	$(BIN)/python benchmarks/int8_cpu.py
	$(BIN)/python benchmarks/batching.py
	$(BIN)/python benchmarks/by_length.py
	$(BIN)/python benchmarks/preparation.py
	$(BIN)/python benchmarks/saving.py
	$(BIN)/python benchmarks/merge.py
	$(BIN)/python benchmarks/served.py
	$(BIN)/python benchmarks/rounding.py
	$(BIN)/python benchmarks/start_up.py

golden: $(DEV) ## Record the pinned trajectories and forecasts anew, after a repair that moved them.
	$(BIN)/python tests/golden/golden_jobs.py

sweep: $(DEV) ## Compare the forecast with real training steps and with the peers, time it, and cost a step (two hours).
	$(BIN)/python benchmarks/forecast_cpu.py
	$(BIN)/python benchmarks/forecast_peers.py
	$(BIN)/python benchmarks/forecast_memtracker.py --measured benchmarks/results/forecast_cpu.json
	$(BIN)/python benchmarks/forecast_speed.py
	$(BIN)/python benchmarks/plan_many_gpus.py
	$(BIN)/python benchmarks/step_cost.py
	$(BIN)/python benchmarks/fit_cpu.py

many-gpus: $(DEV) ## Train by several ranks, as copies and in slices: equal results, and memory by rank (two hours).
	$(BIN)/python benchmarks/many_gpus.py

faults: $(DEV) ## Kill runs 200 times and at each write, fsync and rename, beside a plain Trainer script (an hour).
	$(BIN)/python benchmarks/faults.py
	$(BIN)/python benchmarks/faults.py --objective dpo --kills 30

exports: $(DEV) ## Compare GGUF files of every family in llama.cpp with transformers (ten minutes).
	$(BIN)/python benchmarks/gguf_in_llama_cpp.py

answers: $(DEV) ## Compare batched answers with single ones, and the memory of each KV cache with its forecast (five minutes).
	$(BIN)/python benchmarks/answers.py

faults-ranks: $(DEV) ## Kill ranks of runs 85 times and resume, sharded ones out of memory as well (half an hour).
	$(BIN)/python benchmarks/faults_ranks.py
	$(BIN)/python benchmarks/faults_ranks.py --share fsdp --out-of-memory --kills 20
	$(BIN)/python benchmarks/faults_ranks.py --share deepspeed --out-of-memory --kills 15

mutations: $(DEV) ## Put 1,700 faults into what reads rows, masks, loss normaliser and checkpoints, and see which the tests find (an hour).
	$(BIN)/python benchmarks/mutations.py

# Not through $(READY): an offline GPU machine brings its own Python, with finetune's wheels on its path.
gpu-check: ## On a CUDA machine: all that only a GPU decides, in slices, within 40 minutes; ARGS="--slices beside-7b".
	$(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu_check.py $(ARGS)
