# make demo     data, training, forecasts of five days: some minutes on a laptop
# make test     the tests, but those that take long
# make test-all all tests, as CI runs them; make test-nightly those that take longer still
# make test-gpu those that need GPUs, and the grids of ranks on as many as there are   NPROC=4
# make lint     ruff and its formatter
# make help     this list
# make doctor   is this machine ready?   ARGS="--config=base --nproc 4" looks at another section, on 4 ranks
# make plan     which layout?      PLAN="--config=mp --machine perlmutter --ranks 64"
# make ladder   what does each optimisation bring here? The same ARGS
# make quiz     predict what a flag brings, then measure it
# make site     the pages as a site, in build/site; make site-serve shows it while you write
# longer: make certificate (every grid is the same model), mutations (does it notice?), combinations (of flags),
#         faults, soak, slurm, storage, many-ranks (interrupted runs), properties, nightly (all of these), plan-check, skill, simulate, benchmark, figures, docs (the figures in the pages)
#
# Each creates .venv and installs the pinned requirements first; with LOCKED=1 exactly what locks/ has, by its hashes, in
# .venv-locked. `make demo VENV=system` uses the Python and torch that a module or a container gives, and installs nothing.

VENV ?= .venv$(if $(LOCKED),-locked)

ifeq ($(VENV),system)
PYTHON ?= python3
READY :=
TOOLS :=
SITE :=
else
PYTHON := $(VENV)/bin/python
# $(call install,requirements) in the versions that pip finds today for what they need, or in those of the lock.
install = $(PYTHON) -m pip install --disable-pip-version-check --no-compile -q $(if $(LOCKED),--require-hashes -r locks/$(1).txt,-r $(1).txt)
READY := $(VENV)/installed
TOOLS := $(VENV)/tools-installed
SITE := $(VENV)/site-installed
endif

# Where Python may not keep what it compiles (containers say so), every process would compile torch anew: 3 seconds.
COMPILE = @env -u PYTHONDONTWRITEBYTECODE $(PYTHON) -m compileall -q -j 0 $(VENV)/lib > /dev/null 2>&1 || true

.PHONY: help demo test test-all test-nightly test-gpu lint format readme docs doctor plan plan-check scaling ladder quiz site site-serve notebooks figures benchmark certificate mutations combinations faults soak slurm storage many-ranks properties nightly other-torch locks audit skill simulate clean

help:
	@sed -n 's/^# //p' Makefile | head -13

# DEMO="--num_iters 300 --rollout_from 250" trains half as long.
demo: data/demo
	$(PYTHON) train.py --config=demo $(DEMO)
	$(PYTHON) evaluate.py --checkpoint runs/demo/1GPU/00 --stride 4
	@echo
	@echo "Five days of forecast, a film:    runs/demo/1GPU/00/evaluation/pictures/forecast_vor_upper.gif"
	@echo "How good forecasts are, how long: runs/demo/1GPU/00/evaluation/pictures/skill_vor_upper.png"
	@echo "The curves of the training:       $(PYTHON) -m tensorboard.main --logdir runs"
	@echo "Next, the same in bfloat16:       $(PYTHON) train.py --config=demo --amp_mode bf16 --run_num bf16"
	@echo "and chapter 1, docs/1-one-device.md, which explains each flag."

data/demo: | $(READY)
	$(PYTHON) -m utils.sample_data

test: $(TOOLS)
	PYTHON=$(PYTHON) tests/run_tests.sh

test-all: $(TOOLS)
	PYTHON=$(PYTHON) tests/run_tests.sh --all

test-nightly: $(TOOLS)
	$(PYTHON) -m pytest -n 2 --dist worksteal -m nightly --none-skipped

# On as many GPUs as there are (NPROC=4): the tests of one GPU, then the certificate's grids with NCCL, a rank a GPU.
test-gpu: $(TOOLS)
	$(PYTHON) -m pytest -m gpu
	$(PYTHON) benchmarks/certificate.py --device cuda $(if $(NPROC),--ranks $(NPROC))

lint: $(TOOLS)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format: $(TOOLS)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

ARGS ?= --config=demo

doctor: data/demo
	$(PYTHON) benchmarks/doctor.py $(ARGS) --machine machine.json

# Which layout? On this machine, as the doctor measured it: make plan PLAN="--config=mp --machine perlmutter --ranks 64".
PLAN ?= --config=demo --machine machine.json --ranks 2

plan: $(READY)
	$(PYTHON) benchmarks/plan.py $(PLAN)

# Is the planner right? Predicts runs of 1, 2 and 4 ranks, and makes them: about 20 minutes on 2 cores.
plan-check: $(TOOLS)
	$(PYTHON) tests/proofs/planner.py --json benchmarks/results/plan.json
	$(PYTHON) benchmarks/plan.py --config=mp --machine perlmutter --ranks 64 --json benchmarks/results/plan_mp.json
	$(PYTHON) docs/make.py

# How far does it scale? Plans jobs of 4 to 16,384 GPUs, and runs none: about 25 minutes on 2 cores.
scaling: $(TOOLS)
	$(PYTHON) benchmarks/scaling.py --json benchmarks/results/scaling.json
	$(PYTHON) docs/make.py

# About ten minutes on 2 cores; interrupted, it goes on.
ladder: data/demo
	$(PYTHON) benchmarks/ladder.py $(ARGS)

# Five minutes; QUIZ="bf16 tp2" asks some of the questions.
quiz: data/demo
	$(PYTHON) exercises/quiz.py $(QUIZ)

# Every warning of MkDocs is an error here.
site: $(SITE)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

site-serve: $(SITE)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs serve

# Runs the notebooks from top to bottom, with what make demo trained; their outputs are not kept.
notebooks: $(TOOLS)
	$(PYTHON) -m pytest --nbmake -n 2 notebooks utils/check_rank_generator.ipynb

# Runs every laptop command of README.md and of the chapters, as written: some minutes. ITERATIONS=20 ends each after so many.
readme: data/demo
	PYTHON=$(PYTHON) $(PYTHON) tests/readme_commands.py $(ITERATIONS)

# Rewrites the figures and tables of the pages from the records, and says which are older than what they measure.
docs: $(READY)
	$(PYTHON) docs/make.py

# The pages' pictures: what `make demo` drew last, and the ERA5 sample beside the clone, with the figures of chapter 6;
# the grid, the mappings, the roofline, the loader's speed, example runs, and TensorBoard, which needs Chromium.
figures: demo $(TOOLS)
	$(PYTHON) docs/figures/draw.py
	$(PYTHON) docs/figures/vit.py
	$(PYTHON) docs/figures/rooms.py
	$(PYTHON) docs/figures/roofline.py
	$(PYTHON) docs/figures/loading.py
	cp runs/demo/1GPU/00/pictures/vor_upper.png docs/figures/demo_forecast.png
	cp runs/demo/1GPU/00/evaluation/pictures/forecast_vor_upper.gif docs/figures/demo_forecast.gif
	cp runs/demo/1GPU/00/evaluation/pictures/skill_vor_upper.png docs/figures/demo_skill.png
	cp runs/demo/1GPU/00/evaluation/pictures/scorecard_model.png docs/figures/demo_scorecard.png
	cp runs/demo/1GPU/00/evaluation/pictures/spectra_vor_upper.png docs/figures/demo_spectra.png
	$(PYTHON) train.py --config=era5_djf --num_iters 300 --ema_decay 0.99 --run_num average
	$(PYTHON) evaluate.py --checkpoint runs/era5_djf/1GPU/average
	$(PYTHON) docs/figures/forecasts.py runs/demo/1GPU/00/evaluation runs/era5_djf/1GPU/average/evaluation
	$(PYTHON) docs/example_logs/make.py
	$(PYTHON) docs/example_logs/checkers.py
	$(PYTHON) docs/figures/trace.py
	$(PYTHON) docs/figures/ranks.py
	$(PYTHON) docs/figures/tensorboard.py

# About an hour and a half on 2 cores.
benchmark: data/demo $(TOOLS)
	$(PYTHON) benchmarks/step.py --json benchmarks/results/step.json
	$(PYTHON) benchmarks/loader.py --json benchmarks/results/loader.json
	$(PYTHON) benchmarks/checkpoint.py --json benchmarks/results/checkpoint.json
	$(PYTHON) benchmarks/observers.py --json benchmarks/results/observers.json
	$(PYTHON) benchmarks/evaluation.py --json benchmarks/results/evaluation.json
	$(PYTHON) benchmarks/startup.py --json benchmarks/results/startup.json
	$(PYTHON) benchmarks/memory.py --json benchmarks/results/memory.json
	$(PYTHON) benchmarks/batches.py --json benchmarks/results/batches.json
	$(PYTHON) benchmarks/optimizers.py --json benchmarks/results/optimizers.json
	$(PYTHON) benchmarks/derivatives.py --json benchmarks/results/derivatives.json

# Every grid of 1, 2, 4 and 8 ranks against one process, in float64: about an hour on 2 cores.
certificate: $(READY)
	$(PYTHON) benchmarks/certificate.py --json benchmarks/results/certificate.json
	$(PYTHON) docs/make.py

# Are the certificate and the tests worth something? Changes one line at a time: about two hours.
mutations: $(TOOLS)
	$(PYTHON) tests/proofs/mutate.py

# Precision, fused optimiser, compilation, checkpoints, chunks: 72 combinations, the same losses. About 10 minutes.
combinations: $(READY)
	$(PYTHON) benchmarks/combinations.py --json benchmarks/results/combinations.json
	$(PYTHON) docs/make.py

# Every fault on every grid, and every layout after another one: about 20 minutes. 2,000 random interruptions: two hours.
# Where that is too long at once: make soak SOAK="--minutes 60", then SOAK="--more --minutes 60" until all are there.
faults: $(TOOLS)
	$(PYTHON) tests/proofs/fault_matrix.py --json benchmarks/results/faults.json
	$(PYTHON) docs/make.py

soak: $(TOOLS)
	$(PYTHON) tests/proofs/soak.py --json benchmarks/results/soak.json $(SOAK)
	$(PYTHON) docs/make.py

# A storage that fails for a while under data, checkpoints, records, pictures, and other commands: half an hour. Needs a C compiler.
storage: $(TOOLS)
	$(PYTHON) tests/proofs/failing_storage.py --json benchmarks/results/storage.json
	$(PYTHON) docs/make.py

# 64 ranks on this machine, 4 minutes on 2 cores; then what a start costs by the number of ranks.
many-ranks: data/demo $(TOOLS)
	$(PYTHON) tests/proofs/many_ranks.py --json benchmarks/results/many_ranks.json
	$(PYTHON) benchmarks/startup.py --json benchmarks/results/startup.json
	$(PYTHON) docs/make.py

# A thousand new examples of each property: 2 minutes.
properties: $(TOOLS)
	HYPOTHESIS_PROFILE=nightly $(PYTHON) -m pytest -n 2 tests/properties

# All long proofs, one after the other, and docs/nightly.md; NIGHT="soak storage" runs some.
nightly: $(TOOLS)
	$(PYTHON) tests/proofs/nightly.py $(if $(NIGHT),--only $(NIGHT))

# The quick tests with another torch, in an environment of its own: make other-torch TORCH=2.8.0
other-torch:
	TORCH=$(TORCH) tests/other_torch.sh

# Pins all that is installed, with hashes, for Python 3.11 to 3.13 and every system, and lists the licences: locks/.
locks: $(VENV)-locks/installed
	for each in $(REQUIREMENTS); do \
	    $(VENV)-locks/bin/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate \
	        --no-header $$each.txt -o locks/$$each.txt \
	        $$([ $$each = requirements-dev ] || echo -c locks/requirements-dev.txt) \
	        $$([ $$each != requirements-hta ] || echo --no-deps) || exit 1; \
	done
	$(MAKE) VENV=$(VENV)-locked LOCKED=1 $(VENV)-locked/tools-installed
	{ $(VENV)-locks/bin/pip-licenses --python $(VENV)-locked/bin/python --with-system --format=markdown --order=license && echo && \
	    echo "$(LICENCES)"; } > locks/licences.md

# The one that has nearly all comes first: the others take its versions.
REQUIREMENTS = requirements-dev $(filter-out requirements-dev,$(basename $(wildcard requirements*.txt)))
LICENCES = Those that are UNKNOWN here have their licence in the package: eccodeslib and eckitlib Apache-2.0, hdf5plugin MIT \
    (each filter in it has its own), torchao BSD-3-Clause. cuda-toolkit is empty: it names other packages.

# Asks PyPI for known vulnerabilities of all that is pinned, for whatever Python and system. It takes one version of a name
# in a list: a second one (for another Python) goes to a list of its own.
audit: $(VENV)-locks/installed
	rm -rf build/audit && mkdir -p build/audit
	cat locks/*.txt | sed -n 's/^\([A-Za-z0-9_.-]*==[^ ;\\]*\).*/\1/p' | sort -u \
	    | awk -F== '{ print > ("build/audit/" n[$$1]++ ".txt") }'
	for each in build/audit/*.txt; do \
	    $(VENV)-locks/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r $$each || exit 1; \
	done

$(VENV)-locks/installed: locks/requirements-locks.txt
	python3 -m venv $(VENV)-locks
	$(VENV)-locks/bin/pip install --disable-pip-version-check -q --require-hashes -r locks/requirements-locks.txt
	touch $@

# Jobs that reach their time limit, the ladder and an evaluation in a job, on a Slurm of one node: about 8 minutes.
slurm: $(TOOLS)
	$(PYTHON) -m pytest --none-skipped \
	    tests/slurm/at_the_limit.py tests/slurm/ladder_in_a_job.py tests/slurm/evaluation_in_a_job.py

# What chapter 6's flags bring: the same trainings without and with overlap, several steps and so on: about an hour.
skill: data/demo
	$(PYTHON) benchmarks/skill.py --config=demo --json benchmarks/results/skill_demo.json
	$(PYTHON) benchmarks/skill.py --config=era5_djf --json benchmarks/results/skill_era5_djf.json
	$(PYTHON) benchmarks/ensembles.py --json benchmarks/results/ensembles.json

# What large grids hold and send, computed on this machine: chapter 2's table.
simulate: $(READY)
	$(PYTHON) benchmarks/simulate.py --json benchmarks/results/simulate.json

# What make installed. Data and runs stay.
clean:
	rm -rf .venv .venv-lock* .venv-torch-* .pytest_cache .ruff_cache

$(VENV)/installed: requirements.txt $(if $(LOCKED),locks/requirements.txt)
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "make: Python 3.11 or newer is needed, and python3 is $$(python3 -V): load another, or use VENV=system"; exit 1; }
	@echo "Installing torch and what else training needs into $(VENV): 1 GB, and some more where torch brings CUDA"
	python3 -m venv $(VENV)
	$(call install,requirements)
	$(COMPILE)
	touch $@

$(VENV)/site-installed: requirements-site.txt $(if $(LOCKED),locks/requirements-site.txt) $(READY)
	$(call install,requirements-site)
	$(COMPILE)
	touch $@

# The tests' tools, and every extra that they try; of Holistic Trace Analysis not JupyterLab, which only shows it.
$(VENV)/tools-installed: requirements-dev.txt requirements-tools.txt requirements-dali.txt requirements-prepare.txt \
    requirements-mlflow.txt requirements-maps.txt requirements-site.txt requirements-torchao.txt requirements-hta.txt \
    $(if $(LOCKED),locks/requirements-dev.txt locks/requirements-hta.txt) $(READY)
	@echo "Installing the tools of the tests, and every extra that they try, into $(VENV): 2 GB more"
	$(call install,requirements-dev)
	$(call install,requirements-hta) --no-deps
	$(COMPILE)
	touch $@
