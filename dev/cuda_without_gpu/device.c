/* What the pretended device says of itself: the figures of an NVIDIA H100 80GB HBM3. */
#include "stub.h"

enum { SHARED_MEMORY = 227 << 10, SHARED_MEMORY_BY_DEFAULT = 48 << 10, REGISTERS = 65536 };

static int attribute(CUdevice_attribute which) {
    switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return 0;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 132;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: return REGISTERS;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return REGISTERS;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return SHARED_MEMORY_BY_DEFAULT;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return SHARED_MEMORY;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return SHARED_MEMORY + 1024;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 50 << 20;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 5120;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1980000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 2619000;
    default: return 1; /* most others ask whether the device can do something */
    }
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, NAME);
    memcpy(p->uuid.bytes, "without a GPU", 13);
    p->uuid.bytes[15] = device;
    p->totalGlobalMem = memory_size();
    p->major = 9;
    p->multiProcessorCount = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->regsPerBlock = p->regsPerMultiprocessor = REGISTERS;
    p->sharedMemPerBlock = SHARED_MEMORY_BY_DEFAULT;
    p->sharedMemPerBlockOptin = SHARED_MEMORY;
    p->sharedMemPerMultiprocessor = SHARED_MEMORY + 1024;
    p->reservedSharedMemPerBlock = 1024;
    p->l2CacheSize = 50 << 20;
    p->memoryBusWidth = 5120;
    p->totalConstMem = 65536;
    p->asyncEngineCount = 3;
    p->unifiedAddressing = p->managedMemory = p->concurrentManagedAccess = 1;
    p->concurrentKernels = p->cooperativeLaunch = p->streamPrioritiesSupported = 1;
    p->pciBusID = device + 1;
    return cudaSuccess;
}

/* --- the runtime and the driver ask the same ------------------------------------------------------------ */
__thread int current_device;

cudaError_t cudaGetDeviceCount(int *count) { *count = DEVICES; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = current_device; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { current_device = device; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDA_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDA_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 1; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
    *value = attribute((CUdevice_attribute)which); /* both have the same numbers */
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" :
        error == cudaErrorStreamCaptureUnsupported ? "operation not permitted when stream is capturing" : "error";
}
const char *cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

static void *const CONTEXT = (void *)0x77;
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = DEVICES; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; return CUDA_SUCCESS; }
CUresult cuDeviceGetName(char *text, int size, CUdevice device) { snprintf(text, size, NAME); return CUDA_SUCCESS; }
CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) { *bytes = memory_size(); return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
    *value = attribute(which);
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = CONTEXT; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = CONTEXT; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = current_device; return CUDA_SUCCESS; }
CUresult cuCtxGetApiVersion(CUcontext context, unsigned *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = cudaGetErrorString((cudaError_t)error);
    return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }

/* --- NVML ----------------------------------------------------------------------------------------------- */
enum { NVML_NOT_SUPPORTED = 3 };
int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = DEVICES; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = CONTEXT; return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle) { *handle = CONTEXT; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = CUDA_VERSION; return 0; }
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *infos) { *count = 0; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *infos) { *count = 0; return 0; }
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return 0; } /* info stays 0: not in a fabric */
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return NVML_NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, void *type) { return NVML_NOT_SUPPORTED; }
