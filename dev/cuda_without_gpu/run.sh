#!/usr/bin/env bash
# Run Python on eight pretended H100s:
#   PYTHON=../venv-cuda/bin/python bash dev/cuda_without_gpu/run.sh train.py config/quickstart.py --device=cuda
set -euo pipefail
folder=$(cd "$(dirname "$0")" && pwd)
export PYTHON=${PYTHON:-python}
for file in "$folder"/*.[ch] "$folder"/build.sh; do
    [ "$folder/build/libcuda.so.1" -nt "$file" ] || { bash "$folder/build.sh" >&2; break; }
done
# By their names alone, so that the libraries of torch find these in memory instead of NVIDIA's.
export LD_LIBRARY_PATH=$folder/build${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
LD_PRELOAD="libcuda.so.1 libcudart.so.13 libcublas.so.13 libcublasLt.so.13 libcupti.so.13 libcudnn.so.9 libnccl.so.2"
export LD_PRELOAD="$LD_PRELOAD libnvidia-ml.so.1"
exec "$PYTHON" "$@"
