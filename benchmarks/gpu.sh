#!/bin/sh
# What needs a GPU, in one go of under eight minutes: the tests marked cuda, the sampler's benchmark, the step's.
#   sh benchmarks/gpu.sh MODEL [OUT]     MODEL: a model folder; OUT: a folder for the JSON files
set -eu
model=$1 out=${2:-.} python=${PYTHON:-python}
$python -m pytest -m cuda
timeout 120 $python -m benchmarks.sampler "$model" --dtype bf16 --prompts 32 --tokens 256 --out "$out/sampler.json"
timeout 180 $python -m benchmarks.step "$model" --dtype bf16 --prompts 32 --tokens 256 --microbatch-tokens 16384 \
    --methods grpo dph_f dph_js rkl --out "$out/step.json"
