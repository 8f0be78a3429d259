#!/bin/sh
# What needs a GPU, in one go of under eight minutes and without a network: the tests marked cuda, then benchmarks/gpu.py.
#   sh benchmarks/gpu.sh                 on random models of the shapes of Qwen2.5-0.5B and 1.5B
#   sh benchmarks/gpu.sh MODEL [OUT]     on a model folder; gpu.json and gpu.md go to the folder OUT
#   sh benchmarks/gpu.sh --tiny [OUT]    the same lines on a CPU; the tests are found and not run
set -eu
model=${1:-} out=${2:-.} python=${PYTHON:-python}
export HF_HUB_OFFLINE=1
if [ "$model" = --tiny ]; then
    $python -m pytest -m cuda --collect-only
else
    timeout 120 $python -m pytest -m cuda
fi
timeout 360 $python -m benchmarks.gpu ${model:+"$model"} --out "$out"
