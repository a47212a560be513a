# Two commands on a fresh machine with Python 3.12 and make: `make demo`, `make test`.
PYTHON ?= python3.12
VENV ?= .venv
BIN := $(VENV)/bin
GPU_PYTHON ?= python3
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo quick test test-deep test-all test-exhaustive test-rota check format bench gpu gpu-pack bundled clean

demo: $(VENV)/.base
	$(BIN)/jmoe demo

# Bytecode is kept, whatever the environment says: two workers and dozens of servers would each
# compile every module anew, for 10 seconds a worker. Threads of NumPy's BLAS wait in loops, and would
# take the processor from the other worker.
KEPT := PYTHONDONTWRITEBYTECODE= JAX_PLATFORMS=cpu OPENBLAS_NUM_THREADS=1
# Files in their own order: in that of their numbers of tests, slow ones with one test would come last.
PYTEST := $(KEPT) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=20

# A minute: contracts of imports, settings, scheduler, controllers, the engine over a fake device, and
# one golden model.
QUICK := tests/test_layers.py tests/serving/test_settings.py tests/serving/scheduling \
    tests/serving/control tests/serving/test_engine.py tests/serving/test_engine_faults.py \
    tests/serving/test_classes.py --ignore tests/serving/control/test_rest.py \
    'tests/jmoe/test_golden.py::test_forward_equals_transformers[qwen2_moe]'
quick: $(VENV)/.quick
	$(KEPT) $(BIN)/python -m pytest -m "not deep" $(QUICK)

# What a change to serving, model, training or an op's contract can break: six minutes on two cores.
test: $(VENV)/.dev
	$(PYTEST) -m "not deep"

# The rest, marked deep: kernels emulated and compiled for an H200, whole steps, long runs.
test-deep: $(VENV)/.dev
	$(PYTEST) -m "deep and not exhaustive"

# Both in one go, which collects and compiles less than one after the other.
test-all: $(VENV)/.dev
	$(PYTEST) -m "not exhaustive"

# More models, shapes and cases of deep tests: after a change to a kernel, a step program or a
# benchmark, and before a release.
test-exhaustive: $(VENV)/.dev
	$(PYTEST) -m exhaustive

# As many of these as begin within a minute and a half; others at every call.
test-rota: $(VENV)/.dev
	$(PYTEST) -m exhaustive --dist load --rota $$(date +%s)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The bursts under every controller, and what a step costs; CPU figures are about this CPU.
bench: $(VENV)/.base
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.pairs expert_op
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.pairs step_time
	$(BIN)/jmoe demo --controllers

# On an H200, with whatever Python has jax for CUDA there: a piece of at most nine minutes; call again
# until nothing is left (docs/gpu.md). `make gpu ARGS='--parts step'` chooses.
gpu:
	$(GPU_PYTHON) -m benchmarks.gpu --limit-s 540 $(ARGS)

# For a GPU machine without network, in one archive (docs/gpu.md): the committed tree but for what
# no part of `make gpu` reads, and wheels that an image with jax, flax, optax, orbax, transformers and
# torch lacks.
GPU_WHEELS := annotated-types fastapi fastapi-swagger grpcio grpcio-health-checking grpcio-reflection \
    httptools jiter llguidance opentelemetry-api orjson protobuf pydantic pydantic-core pyzmq starlette \
    typing-inspection uvicorn
gpu-pack: $(VENV)/.base
	rm -rf out/gpu-pack && mkdir -p out/gpu-pack/jmoe
	git archive HEAD . ':!jmoe/bundled_family' ':!docs/*.png' ':!tests/golden/*/config_changes.npz' | tar -x -C out/gpu-pack/jmoe
	$(BIN)/python -m pip download --quiet --disable-pip-version-check -c constraints.txt --no-deps \
	    --only-binary=:all: -d out/gpu-pack/jmoe/wheels $(GPU_WHEELS)
	tar -czf out/gpu-pack.tar.gz -C out/gpu-pack jmoe
	@du -m --apparent-size out/gpu-pack.tar.gz out/gpu-pack/jmoe/wheels

# Tasks, tokenizer, weights and united experts of the bundled model, from nothing.
bundled: $(VENV)/.base
	$(BIN)/python -m training.remake --out jmoe/bundled
	$(BIN)/python -c 'import pathlib, jmoe.packed; jmoe.packed.pack(pathlib.Path("jmoe/bundled"))'

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[all]'
	@touch $@

$(VENV)/.quick: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[serve,test]'
	@touch $@

# `aot` compiles for an H200 where there is none, `aep` schedulers for the CPU, with what workers talk
# over; the tests use both.
$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[all,dev,aot,aep,ray,otel]'
	@touch $(VENV)/.base $@

clean:
	rm -rf $(VENV) .cache out build *.egg-info
