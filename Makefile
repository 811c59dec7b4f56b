# Everything happens in .venv; stamps in it say what is done, so a second run starts at once.
#
#   make up                          run it all on this machine, with a small demo model, on port 8000
#   make up MODEL=m.gguf SLOTS=8     the same with a model of yours (PORT=, HOST=, REDIS_URL=, DATA_DIR=, FRESH=1)
#   make up GPU=cuda|metal|vulkan    build llama.cpp for that device first; GPU=cpu goes back
#   make test [ARGS="-k stream"]     run the tests        make check   lint, format, types
#   make bench-compare LLAMA_SERVER=PATH   Slotline and llama.cpp's own server side by side (ten minutes)
#   make bench-cpu                   CPU time of a token by process and thread
#   make chaos [KILLS=200] [SEED=1]  kill everything under jobs, streams and batches (minutes)
#   make chaos-batch                 20,000 lines of a batch, everything killed twice (minutes)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
GPU ?=

CMAKE_ARGS_cpu :=
CMAKE_ARGS_cuda := -DGGML_CUDA=on
CMAKE_ARGS_metal := -DGGML_METAL=on
CMAKE_ARGS_vulkan := -DGGML_VULKAN=on

ifneq ($(GPU),)
ifeq ($(filter $(GPU),cpu cuda metal vulkan),)
$(error GPU=$(GPU) is not one of cpu, cuda, metal, vulkan)
endif
LLAMA := $(VENV)/.llama-$(GPU)
endif

.PHONY: help up test check setup bench bench-compare bench-cpu chaos chaos-batch clean

help:
	@sed -n 's/^#   //p' Makefile

up: $(VENV)/.demo $(LLAMA)
	@exec $(BIN)/slotline up $(if $(HOST),--host '$(HOST)') $(if $(PORT),--port '$(PORT)') \
		$(if $(MODEL),--model '$(MODEL)') $(if $(SLOTS),--slots '$(SLOTS)') \
		$(if $(REDIS_URL),--redis-url '$(REDIS_URL)') $(if $(DATA_DIR),--data-dir '$(DATA_DIR)') \
		$(if $(FRESH),--fresh) $(ARGS)

# Three processes, as tests wait more than they compute; ARGS="-n 0" runs all in one. What the tests start need not
# compile our modules each time, where Python is told to keep no bytecode.
test: $(VENV)/.test
	@$(BIN)/python -m compileall -q shared slotline webapi worker
	$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

check: $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/.demo $(LLAMA)
	$(BIN)/slotline bench engine $(if $(MODEL),--model '$(MODEL)') $(ARGS)

bench-compare: $(VENV)/.demo
	$(BIN)/python -m benchmarks.compare $(if $(LLAMA_SERVER),--llama-server '$(LLAMA_SERVER)') \
		$(if $(MODEL),--model '$(MODEL)') $(ARGS)

bench-cpu: $(VENV)/.demo
	$(BIN)/python -m benchmarks.cpu $(if $(MODEL),--model '$(MODEL)') $(ARGS)

chaos: $(VENV)/.test
	$(BIN)/python -m tests.chaos --kills $(or $(KILLS),200) --seed $(or $(SEED),1) $(ARGS)

chaos-batch: $(VENV)/.test
	$(BIN)/python -m tests.chaos.batch $(ARGS)

setup: $(VENV)/.test

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || \
		{ echo "make: $(PYTHON) is not installed; Slotline needs Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: Slotline needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1);" \
			"name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@for tool in cc c++; do command -v $$tool >/dev/null || \
		{ echo "make: there is no $$tool, and llama.cpp is compiled here: install a C and C++ compiler" \
			"(Debian, Ubuntu: apt install build-essential; Fedora: dnf install gcc-c++; macOS: xcode-select --install)" \
			>&2; exit 1; }; done
	@echo "Making a virtual environment in $(VENV) (seconds) ..."
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.created | $(LLAMA)
	@echo "Installing Slotline and what it needs (a minute; the first time llama.cpp is compiled, 5 to 15 minutes) ..."
	@$(PIP) install --editable '.[demo]'
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.created
	@echo "Installing Slotline and its tests (a minute; the first time llama.cpp is compiled, 5 to 15 minutes) ..."
	@$(PIP) install --editable '.[test]'
	@touch $@ $(VENV)/.demo

# From source and past the cache: a wheel from there would be for the CPU, or for another device.
$(VENV)/.llama-%: $(VENV)/.created
	@rm -f $(VENV)/.llama-*
	@echo "Compiling llama.cpp for $* (5 to 30 minutes) ..."
	@CMAKE_ARGS='$(CMAKE_ARGS_$*)' $(PIP) install --no-cache-dir --force-reinstall \
		--no-binary llama-cpp-python llama-cpp-python
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
