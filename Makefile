# The front door. Each target sets up what it needs (tools/bootstrap), works a second time, and offline from then on.
.DEFAULT_GOAL := help
.PHONY: help demo test build bench lint format wheel gpu-test gpu-bench cuda-archs clean

CCACHE := $(shell command -v ccache 2>/dev/null)
# Paths below this folder are relative for ccache, so that build/wheel finds what build/release has compiled.
export CCACHE_BASEDIR ?= $(CURDIR)
# $(call configure,PRESET): quiet unless it fails.
configure = mkdir -p build && { cmake -DCMAKE_CXX_COMPILER_LAUNCHER=$(CCACHE) --preset $(1) > build/configure.log 2>&1 || { cat build/configure.log; exit 1; }; }
PROMPT ?= And it came to pass in those days, that

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

# By the environment, so that its quotes are text.
demo: export PROMPT := $(PROMPT)
demo:  ## build the command line and generate text from the embedded model, speculatively
	@tools/bootstrap build
	@[ -e build/release/build.ninja ] || { $(call configure,demo); }  # what is configured already, perhaps with CUDA, stays so
	@cmake --build build/release --target specstate_cli
	@printf 'build/release/specstate generate --prompt "%s" --max-new-tokens 200 --mode dflash --check-lossless\n\n%s' "$$PROMPT" "$$PROMPT"
	@build/release/specstate generate --prompt "$$PROMPT" --max-new-tokens 200 --mode dflash --check-lossless

build:  ## everything, into build/release (with CUDA where nvcc is found)
	@tools/bootstrap build test python
	@$(call configure,release)
	@cmake --build build/release

test: build  ## every test that this machine can run; the last line is the sum
	@.venv/bin/python3 tools/run_tests.py $(TEST_FLAGS)

bench: build  ## the CPU benchmarks with all threads and with one, recorded in bench/results/cpu.json and docs/performance.md
	build/release/specstate bench all --device cpu --record
	SPECSTATE_NUM_THREADS=1 build/release/specstate bench all --device cpu --record
	@.venv/bin/python3 tools/bench_tables.py

lint:  ## the rules of tests/lint alone
	@tools/bootstrap build test
	@/usr/bin/python3 tests/lint

format:  ## clang-format over every C++ source
	@tools/bootstrap test
	@git ls-files '*.cpp' '*.hpp' '*.cu' '*.cuh' | xargs clang-format -i

wheel:  ## the Python wheel, into dist/ (with CUDA where nvcc is found; minutes, unless ccache knows the objects)
	@tools/bootstrap build python
	@CMAKE_CXX_COMPILER_LAUNCHER=$(CCACHE) CMAKE_GENERATOR=Ninja .venv/bin/python3 tools/build_wheel.py

gpu-test: build  ## every CUDA test and the GPU sanitizers, on a machine with an NVIDIA GPU; recorded in tests/gpu/evidence.json
	@.venv/bin/python3 tools/gpu_test.py $(TEST_FLAGS)

cuda-archs: build  ## do the CUDA sources compile for sm_80, sm_100 and sm_120 too? needs nvcc, no GPU; ONLY=/kda/ for one family
	@.venv/bin/python3 tools/cuda_archs.py --only "$(ONLY)"

gpu-bench: build  ## the benchmark on a GPU, recorded in bench/results/; WHEEL=FOLDER (sglang 0.5.23, unpacked) measures its kernels beside ours
	@.venv/bin/python3 tools/gpu_bench.py --wheel "$(WHEEL)"

clean:  ## remove build/ (the virtual environment stays)
	rm -rf build
