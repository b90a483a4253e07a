/* What the files of the stub share. */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#undef cudaGetDeviceProperties

#define NAME "NVIDIA H100 80GB HBM3"
enum { DEVICES = 8, MIB = 81559 };
/* Larger tensors do not move from device to device: nobody has computed them, and pages would be touched. */
enum { MOST_MOVED = 1 << 20 };
typedef unsigned long long u64;
extern __thread int current_device;

/* Tell whoever has set `on_cuda_call` of a call that takes time on a real device. */
void report(const char *call, size_t bytes, const void *stream);

/* Bytes of a device: MIB, or the variable CUDA_WITHOUT_GPU_MIB. */
size_t memory_size(void);

/* Accept a kernel. */
int launch(const char *call, const void *stream);

/* Note that a number on the device came from a host. */
void note_number(const void *address, size_t bytes);

/* Communicators with a collective that does not end on the device. */
extern volatile int n_hanging;
