# kvlab. `make` alone lists the targets.
#
# Every target that needs Python builds .venv first, when it is missing and only
# then: a finished set-up leaves the stamp .venv/.ready. To build it again after
# changing the dependencies: rm -rf .venv && make venv

VENV  := .venv
PY    := $(VENV)/bin/python
PIP   := $(VENV)/bin/pip
READY := $(VENV)/.ready

# The interpreter .venv is made from. Choose another: make venv PYTHON=/path/to/python3.12
PYTHON ?=

# The build of PyTorch on Linux: cpu, or cuda (several GB, for a GPU): make venv TORCH=cuda
TORCH ?= cpu
CPU   := https://download.pytorch.org/whl/cpu

# What `make lab` opens: the learner edition, in lab/, or the solved notebooks: make lab EDITION=solution
EDITION ?= learner

NOTEBOOKS := $(wildcard notebooks/*.ipynb)

.DEFAULT_GOAL := help
.PHONY: help demo test coverage browser fuzz test-newest lab notebooks test-workshop workshop test-kit slides page site test-site test-ray cluster-demo gpu test-triton wheel reproduce bench lint map format clean venv

help: ## list the targets
	@echo "kvlab: a course and a laboratory about the KV cache"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "The first target you run sets up $(VENV) (two to three minutes, 2 GB)."

demo: $(READY) ## run every method on the built-in model and write a report
	$(PY) -m eval all --out results/demo
	@echo
	@echo "The report: results/demo/report.html (open it in a browser)"

test: $(READY) ## run the tests, and the notebooks strictly
	HF_HUB_OFFLINE=1 $(PY) -m pytest -n 2 --dist worksteal tests
ifneq ($(NOTEBOOKS),)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile --nbval --nbval-current-env notebooks
endif

browser: $(READY) ## install a Chromium for the tests of pages, where there is none and apt can
	@if $(PY) -c 'import sys; from course.pdf import find; sys.exit(find() is None)'; then \
	  echo "A Chromium is there."; \
	elif command -v apt-get >/dev/null && { [ "$$(id -u)" = 0 ] || command -v sudo >/dev/null; }; then \
	  sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
	  $$sudo apt-get update -q && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends chromium; \
	else \
	  echo "Install Chromium or Chrome, or name one: export KVLAB_BROWSER=/path/to/chrome" >&2; exit 1; \
	fi

coverage: $(READY) ## run the tests and count the lines that they reach, which takes half as long again
	HF_HUB_OFFLINE=1 $(PY) -m pytest -n 2 --dist worksteal --cov --cov-report=term tests

SECONDS := 600
fuzz: $(READY) ## do to every method whatever people do, for ten minutes (make fuzz SECONDS=3600); then other facts to the page
	HF_HUB_OFFLINE=1 PYTHONPATH=.:tests $(PY) -m fuzz $(SECONDS)
	HF_HUB_OFFLINE=1 KVLAB_PAGE_SEED=$$(date +%s) $(PY) -m pytest tests/course/page

test-newest: $(READY) ## run the notebooks with whatever versions are installed, outputs not compared
	HF_HUB_OFFLINE=1 $(PY) -m pytest -n 2 --dist loadfile --nbval-lax --nbval-current-env notebooks

lab: $(READY) ## open the chapters to work through (make lab EDITION=solution: the solved ones)
ifeq ($(EDITION),solution)
	$(PY) -m jupyter lab --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb
else ifeq ($(EDITION),learner)
	$(PY) -m course lab
	$(PY) -m jupyter lab --LabApp.default_url=/lab/tree/lab/00_start_here.ipynb
else
	@echo "EDITION is learner or solution, not $(EDITION)" >&2; exit 2
endif

notebooks: $(READY) ## run all chapters again and store their outputs
	HF_HUB_OFFLINE=1 $(PY) -m course run

test-workshop: $(READY) ## run every learner edition from top to bottom
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(PY) -m course try

workshop: $(READY) ## write what learners and instructors are handed: two zips
	$(PY) -m course workshop --out build/workshop

test-kit: $(READY) ## set up the learner's zip in an empty folder, and run a chapter in it (needs pip's index)
	KVLAB_KIT=1 $(PY) -m pytest tests/course/kit/test_zip.py

slides: $(READY) ## write the slides of every chapter and of the talk (PDF=1: print them, too)
	$(PY) -m course slides $(if $(PDF),--pdf) --out build/slides

page: $(READY) ## write the live page, one HTML file that runs the workshop model in a browser
	HF_HUB_OFFLINE=1 $(PY) -m course.page.build
	@echo
	@echo "The page: notebooks/page.html (open it in a browser)"

# Jupyter Book needs other versions than kvlab: it has an environment of its own.
SITE := .venv-site

site: $(READY) $(SITE)/.ready ## build the static site from what is stored, nothing is executed
	$(PY) -m course site --out build/site
	$(SITE)/bin/jupyter-book build --warningiserror --keep-going build/site/source --path-output build/site
	@echo
	@echo "The site: build/site/_build/html/index.html"

$(SITE)/.ready: requirements-site.txt | $(READY)
	$(PY) -m venv --clear $(SITE)
	$(SITE)/bin/pip install --quiet --disable-pip-version-check -r requirements-site.txt
	touch $@

test-site: $(READY) ## look at every page of the built site in an installed Chromium
	KVLAB_SITE=build/site/_build/html $(PY) -m pytest tests/course/test_site.py tests/course/test_slides.py

# Ray brings 26 packages: its environment is one of its own, beside .venv, whose packages it sees.
RAY := .venv-ray

test-ray: $(RAY)/.ready ## start Ray clusters and kill their parts: the tests marked ray, and S3's protocol (minutes)
	HF_HUB_OFFLINE=1 $(RAY)/bin/python -m pytest -m ray tests/eval/cluster
	HF_HUB_OFFLINE=1 $(RAY)/bin/python -m pytest tests/eval/test_results.py tests/eval/cluster -k "s3 or schema"

cluster-demo: $(RAY)/.ready ## a small sweep on a Ray cluster of two nodes, one of which is killed while it works
	HF_HUB_OFFLINE=1 PYTHONPATH=. $(RAY)/bin/python docs/deploy/demo.py --out results/cluster-demo -- \
	  --limit 4 --tasks recall chain agreement --methods full int8 h2o:budget=0.3

$(RAY)/.ready: requirements-ray.txt | $(READY)
	$(PY) -m venv --clear $(RAY)
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(RAY)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kvlab.pth"
	$(RAY)/bin/pip install --quiet --disable-pip-version-check -r requirements-ray.txt
	touch $@

# Triton's wheel (190 MB) needs nothing of what torch's CUDA build brings, as long as its kernels are interpreted.
TRITON := .triton

test-triton: $(READY) ## interpret the Triton kernels and try `make gpu` in small, on the CPU (needs pip's index)
ifeq ($(shell uname -sm),Linux x86_64)
	$(MAKE) --no-print-directory $(TRITON)/.ready
	rm -rf build/gpu-dry
	HF_HUB_OFFLINE=1 PYTHONPATH=$(CURDIR):$(CURDIR)/$(TRITON) $(PY) -m pytest -n 2 --dist loadfile -m triton tests/fast \
	  tests/place/test_cuda.py tests/oracles/test_quantize_kernel.py tests/eval/gpu
	HF_HUB_OFFLINE=1 PYTHONPATH=$(CURDIR):$(CURDIR)/$(TRITON) $(PY) -m eval gpu --dry --out build/gpu-dry
else
	@echo "Triton has wheels for Linux on x86-64 alone: on $$(uname -sm) its kernels are not tried."
endif

$(TRITON)/.ready: requirements-triton.txt | $(READY)
	$(PIP) install -q --disable-pip-version-check --no-deps --upgrade --target $(TRITON) -r requirements-triton.txt
	touch $@

gpu: $(READY) ## ask a GPU what a CPU cannot answer, nine minutes (make gpu DRY=--dry: in small, on the CPU)
	$(PY) -m eval gpu $(DRY)

# Rows that you have, where there is no hub: make reproduce ROWS=FOLDER (docs/results.md says which files)
ROWS  ?=
QUICK ?=

reproduce: $(READY) ## make every stored study again, hours (QUICK=1: in small, under ten minutes)
	$(PY) -m eval reproduce $(if $(QUICK),--quick) $(if $(ROWS),--rows $(ROWS))

bench: $(READY) ## run the full speed grid on a wider model (about half an hour)
	$(PY) -m eval speed --suite wide --out results/bench
	@echo
	@echo "The results: results/bench"

# The wheel is made from the source package, in a folder of its own: nothing that lies in build/ gets into it.
wheel: $(READY) ## build what an index would hold, a wheel and a source package, into dist/, and check them
	rm -rf dist
	$(PY) -m build --no-isolation
	$(PY) -m twine check --strict dist/*

lint: $(READY) ## check style and format, change nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

map: ## print every file of Python with the first line of its docstring
	@for file in $$(git ls-files 'kvlab/*.py' 'eval/*.py' 'course/*.py'); do \
	  awk -v name="$$file" 'NR == 1 && /^"""/ { gsub(/"""/, ""); print name ": " $$0 }' "$$file"; done

format: $(READY) ## repair style and format in place
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean: ## remove build products and the results of demo and bench
	rm -rf build dist *.egg-info htmlcov .coverage .coverage.*
	rm -rf .pytest_cache .ruff_cache .hypothesis
	rm -rf results/demo results/bench
	find . -path ./$(VENV) -prune -o -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) \
	  -exec rm -rf {} +
	@echo "Kept: $(VENV), lab/, runs/ and every other folder in results/."

venv: $(READY) ## set up .venv, once
	@echo "$(VENV) is ready: $$($(PY) --version), torch $$($(PY) -c 'import importlib.metadata as m; print(m.version("torch"))')"

$(READY):
	@set -e; \
	for python in $(or $(PYTHON),python3.12 python3.11 python3 python); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    found="$$python"; break; \
	  fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
	  echo "kvlab needs Python 3.11 or later; found: $$( \
	    $(or $(PYTHON),python3) --version 2>&1 | head -n 1)." \
	    "Install it, or name one: make venv PYTHON=/path/to/python3.12" >&2; \
	  exit 1; \
	fi; \
	if ! "$$found" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "$$found cannot make a virtual environment: install its venv module" \
	    "(on Debian and Ubuntu: apt install python3-venv)." >&2; \
	  exit 1; \
	fi; \
	echo "Setting up $(VENV) with $$("$$found" --version) (once, two to three minutes) ..."; \
	"$$found" -m venv $(VENV); \
	torch="$$(sed -n 's/^torch==//p' constraints.txt)"; \
	if [ "$(TORCH)" = cpu ] && [ "$$(uname -s)" = Linux ] && \
	  ! $(PIP) install -q --disable-pip-version-check --no-deps --extra-index-url $(CPU) \
	    "torch==$$torch+cpu"; then \
	  echo "No CPU build of torch $$torch could be had from $(CPU) (see above)." \
	    "With CUDA, several GB, it comes from PyPI: make venv TORCH=cuda" >&2; \
	  exit 1; \
	fi; \
	$(PIP) install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"; \
	$(PY) -m kvlab.fast; \
	touch $(READY)
