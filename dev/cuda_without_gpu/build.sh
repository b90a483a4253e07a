#!/usr/bin/env bash
# Build the stub of CUDA in build/, for a Python that has a CUDA build of torch (run.sh calls this):
#   PYTHON=../venv-cuda/bin/python bash dev/cuda_without_gpu/build.sh
# One library stands for all: the files here define what must return something, and every other function of
# NVIDIA's libraries is generated to return 0, which means success.
set -euo pipefail
python=$(command -v "${PYTHON:-python}")
cd "$(dirname "$0")"
rm -rf build
mkdir build
packages=$("$python" -c 'import nvidia, triton; print(*nvidia.__path__, *triton.__path__)') || {
    echo "error: $python has no CUDA build of torch: pip install torch, and set PYTHON" >&2
    exit 1
}
read -r nvidia triton <<< "$packages"
includes="-I $nvidia/cu13/include -I $nvidia/nccl/include -I $triton/backends/nvidia/include"

for file in device runtime libraries nccl; do
    # shellcheck disable=SC2086  # several options
    gcc -c -O1 -fPIC -fno-builtin -w $includes $file.c -o build/$file.o
done
nm build/*.o | awk '$2 == "T" || $2 == "B" {print $3}' | sort -u > build/written
{
    for library in cu13/lib/libcudart.so.13 cu13/lib/libcublas.so.13 cu13/lib/libcublasLt.so.13 \
            cu13/lib/libcupti.so.13 cudnn/lib/libcudnn.so.9 nccl/lib/libnccl.so.2; do
        nm -D --defined-only "$nvidia/$library" | awk '$2 ~ /[TWi]/ {print $3}' | sed 's/@.*//'
    done
    grep -ohE '\bcu[A-Z][A-Za-z0-9_]+ *\(' "$nvidia/cu13/include/cuda.h" | tr -d ' ('
} | grep -E '^_*(cu|nccl)[A-Za-z0-9_]+$' | sort -u | comm -23 - build/written > build/generated
sed 's/.*/int &(void) { return 0; }/' build/generated > build/generated.c
gcc -shared -fPIC -w -o build/libcuda.so.1 build/*.o build/generated.c -ldl -lpthread
for name in libcudart.so.13 libcublas.so.13 libcublasLt.so.13 libcupti.so.13 libcudnn.so.9 libnccl.so.2 \
        libnvidia-ml.so.1; do
    ln -s libcuda.so.1 build/$name
done
echo "CUDA without a GPU: $(wc -l < build/written) functions written, $(wc -l < build/generated) generated"
