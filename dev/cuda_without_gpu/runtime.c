/* The CUDA runtime and driver: memory is the host's, streams and events are done at once, kernels do not run. */
#include "stub.h"

/* A program may set this function. It gets the name of a call, the bytes that the call is about, and the stream. */
void (*on_cuda_call)(const char *call, size_t bytes, const void *stream);

void report(const char *call, size_t bytes, const void *stream) {
    if (on_cuda_call)
        on_cuda_call(call, bytes, stream);
}

static u64 n_launches;

/* --- memory --------------------------------------------------------------------------------------------- */
enum kind { PAGEABLE = cudaMemoryTypeUnregistered, PINNED = cudaMemoryTypeHost, DEVICE = cudaMemoryTypeDevice };
static struct block { char *start; size_t bytes; enum kind kind; int device; } *blocks;
static int n_blocks;
static size_t used[DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void remember(void *start, size_t bytes, enum kind kind) {
    pthread_mutex_lock(&lock);
    blocks = realloc(blocks, (n_blocks + 1) * sizeof *blocks);
    blocks[n_blocks++] = (struct block){start, bytes, kind, current_device};
    pthread_mutex_unlock(&lock);
}

/* The block that an address is in; its kind is PAGEABLE if CUDA does not know the address. */
static struct block find(const void *address) {
    struct block found = {(char *)address, 0, PAGEABLE, current_device};
    pthread_mutex_lock(&lock);
    for (int i = n_blocks - 1; i >= 0; i--)
        if ((char *)address >= blocks[i].start && (char *)address < blocks[i].start + blocks[i].bytes) {
            found = blocks[i];
            break;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

static struct block forget(const void *start) {
    struct block forgotten = {0};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n_blocks; i++)
        if (blocks[i].start == start) {
            forgotten = blocks[i];
            blocks[i] = blocks[--n_blocks];
            break;
        }
    pthread_mutex_unlock(&lock);
    return forgotten;
}

/* Bytes of a device. */
size_t memory_size(void) {
    const char *mib = getenv("CUDA_WITHOUT_GPU_MIB");
    return (mib ? strtoull(mib, NULL, 10) : MIB) << 20;
}

static int take(size_t bytes) {
    if (used[current_device] + bytes > memory_size())
        return cudaErrorMemoryAllocation;
    used[current_device] += bytes;
    return cudaSuccess;
}

/* Addresses without memory: the host gives pages when they are touched, so that devices may have more than the host. */
static void *reserve(size_t bytes) {
    void *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return start == MAP_FAILED ? NULL : start;
}

static int allocate(void **address, size_t bytes, enum kind kind) {
    report(kind == DEVICE ? "cudaMalloc" : "cudaHostAlloc", bytes, NULL);
    *address = NULL;
    if (!bytes)
        return cudaSuccess;
    if (kind == DEVICE && take(bytes) || !(*address = reserve(bytes)))
        return cudaErrorMemoryAllocation;
    remember(*address, bytes, kind);
    return cudaSuccess;
}

static int release(void *address) {
    struct block block = forget(address);
    if (block.kind == DEVICE)
        used[block.device] -= block.bytes;
    if (block.bytes)
        munmap(block.start, block.bytes);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **address, size_t bytes) { return allocate(address, bytes, DEVICE); }
cudaError_t cudaMallocAsync(void **address, size_t bytes, cudaStream_t s) { return allocate(address, bytes, DEVICE); }
cudaError_t cudaMallocHost(void **address, size_t bytes) { return allocate(address, bytes, PINNED); }
cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags) { return allocate(address, bytes, PINNED); }
cudaError_t cudaFree(void *address) { return release(address); }
cudaError_t cudaFreeAsync(void *address, cudaStream_t s) { return release(address); }
cudaError_t cudaFreeHost(void *address) { return release(address); }
cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    remember(address, bytes, PINNED);
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *address) { forget(address); return cudaSuccess; }
CUresult cuMemAlloc(CUdeviceptr *address, size_t bytes) { return allocate((void **)address, bytes, DEVICE); }
CUresult cuMemFree(CUdeviceptr address) { return release((void *)address); }

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *total = memory_size();
    *free_bytes = *total - used[current_device];
    return cudaSuccess;
}
CUresult cuMemGetInfo(size_t *free_bytes, size_t *total) { return cudaMemGetInfo(free_bytes, total); }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
    struct block block = find(address);
    *found = (struct cudaPointerAttributes){.type = block.kind, .device = block.device};
    found->hostPointer = block.kind == DEVICE ? NULL : (void *)address;
    found->devicePointer = block.kind == PAGEABLE ? NULL : (void *)address;
    return cudaSuccess;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr address) {
    struct block block = find((void *)address);
    if (block.kind == PAGEABLE)
        return CUDA_ERROR_INVALID_VALUE;
    if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER || which == CU_POINTER_ATTRIBUTE_HOST_POINTER)
        *(CUdeviceptr *)value = address;
    else
        *(unsigned *)value = which == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL ? (unsigned)block.device : block.kind;
    return CUDA_SUCCESS;
}

/* Expandable segments and symmetric memory: addresses first, then memory behind them. */
static struct chunk { size_t bytes; char *start; int file, is_imported; } *chunks;
static CUmemGenericAllocationHandle n_chunks;

static CUmemGenericAllocationHandle new_chunk(struct chunk chunk) {
    pthread_mutex_lock(&lock);
    chunks = realloc(chunks, (n_chunks + 1) * sizeof *chunks);
    chunks[n_chunks] = chunk;
    pthread_mutex_unlock(&lock);
    return ++n_chunks;
}
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wish, u64 flags) {
    void *start = reserve(bytes);
    *address = (CUdeviceptr)start;
    if (!start)
        return CUDA_ERROR_OUT_OF_MEMORY;
    remember(start, bytes, DEVICE);
    return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    forget((void *)address);
    munmap((void *)address, bytes);
    return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *p,
                                       CUmemAllocationGranularity_flags flags) {
    *bytes = 2 << 20;
    return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *p, u64 flags) {
    report("cuMemCreate", bytes, NULL);
    *handle = new_chunk((struct chunk){bytes, NULL, -1, 0});
    return (CUresult)take(bytes);
}

/* Put the pages of a file that several processes have behind a chunk's addresses. */
static int map_file(struct chunk *chunk) {
    int flags = MAP_SHARED | MAP_FIXED;
    return mmap(chunk->start, chunk->bytes, PROT_READ | PROT_WRITE, flags, chunk->file, 0) == MAP_FAILED;
}
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, u64 flags) {
    struct chunk *chunk = chunks + handle - 1;
    chunk->start = (char *)address;
    return chunk->file >= 0 && map_file(chunk) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    for (size_t i = 0; i < n_chunks; i++)
        if (chunks[i].start == (char *)address && chunks[i].is_imported)
            return CUDA_SUCCESS; /* the memory of another device */
    used[find((void *)address).device] -= bytes;
    madvise((void *)address, bytes, MADV_DONTNEED);
    return CUDA_SUCCESS;
}

/* Memory moves to a file when it is first given to another process; what it has held is lost. */
CUresult cuMemExportToShareableHandle(void *file, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      u64 flags) {
    struct chunk *chunk = chunks + handle - 1;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (chunk->file < 0) {
        chunk->file = memfd_create("cuda_without_gpu", MFD_CLOEXEC);
        if (ftruncate(chunk->file, chunk->bytes) || map_file(chunk))
            return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *(int *)file = dup(chunk->file);
    return CUDA_SUCCESS;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *file,
                                        CUmemAllocationHandleType type) {
    int copy = dup((int)(intptr_t)file);
    *handle = new_chunk((struct chunk){lseek(copy, 0, SEEK_END), NULL, copy, 1});
    return CUDA_SUCCESS;
}

/* --- streams: what is not a kernel is done at once, unless a collective hangs before it ----------------- */
volatile int n_hanging;

static void wait_for_collectives(void) {
    while (n_hanging)
        usleep(1000);
}

static uintptr_t n_handles = 0x1000;
static const void *captured; /* the stream whose work is recorded into a graph */

static int new_handle(void *handle) {
    *(uintptr_t *)handle = __sync_add_and_fetch(&n_handles, 16);
    return cudaSuccess;
}

/* A wait of the host. None is allowed while the stream is recorded, and none of all streams either. */
static int wait(const char *call, size_t bytes, const void *stream) {
    report(call, bytes, stream);
    if (captured && captured == stream)
        return cudaErrorStreamCaptureUnsupported;
    wait_for_collectives();
    return cudaSuccess;
}

/* A single number that the host reads from the device is the one that came from a host last. If kernels were to
   compute it, its memory has whatever was there before, and the host reads 0; for a bool True, since most ask whether
   all is well. */
enum { NUMBERS = 256, NUMBER_BYTES = 8 };
static const void *numbers[NUMBERS]; /* where such numbers came from a host */
static unsigned n_numbers;

void note_number(const void *address, size_t bytes) {
    if (bytes <= NUMBER_BYTES && find(address).kind == DEVICE)
        numbers[n_numbers++ % NUMBERS] = address;
}

static int forget_number(const void *address) {
    for (int i = 0; i < NUMBERS; i++)
        if (numbers[i] == address) {
            numbers[i] = NULL;
            return 1;
        }
    return 0;
}

static void move(void *to, const void *from, size_t bytes) {
    if (bytes > MOST_MOVED && find(from).kind == DEVICE && find(to).kind == DEVICE)
        return;
    int is_read = find(from).kind == DEVICE && find(to).kind != DEVICE;
    if (is_read && bytes <= NUMBER_BYTES && !forget_number(from))
        memset(to, bytes == 1, bytes);
    else
        memmove(to, from, bytes);
    if (find(from).kind != DEVICE)
        note_number(to, bytes);
}

static int copy(void *to, const void *from, size_t bytes, const void *stream) {
    int error = cudaSuccess;
    if (find(to).kind == PAGEABLE || find(from).kind == PAGEABLE)
        error = wait("copy of pageable memory", bytes, stream); /* until the bytes are staged, or have arrived */
    else
        report("copy", bytes, stream);
    if (!error)
        move(to, from, bytes);
    return error;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    report("cudaMemcpy", bytes, NULL);
    wait_for_collectives();
    move(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(to, from, bytes, stream);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int d, const void *from, int s, size_t bytes, cudaStream_t stream) {
    return copy(to, from, bytes, stream);
}
static void fill(void *to, int value, size_t bytes) {
    if (bytes <= MOST_MOVED)
        memset(to, value, bytes);
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) { fill(to, value, bytes); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    report("memset", bytes, stream);
    fill(to, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return wait("cudaStreamSynchronize", 0, stream); }
cudaError_t cudaDeviceSynchronize(void) { return wait("cudaDeviceSynchronize", 0, captured); }
CUresult cuStreamSynchronize(CUstream stream) { return wait("cudaStreamSynchronize", 0, stream); }
CUresult cuCtxSynchronize(void) { return wait("cudaDeviceSynchronize", 0, captured); }

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return new_handle(stream); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return new_handle(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int p) { return new_handle(stream); }
CUresult cuStreamCreate(CUstream *stream, unsigned flags) { return new_handle(stream); }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags) { *flags = 0; return cudaSuccess; }
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device) { *device = current_device; return cudaSuccess; }
cudaError_t cudaStreamGetId(cudaStream_t stream, u64 *id) { *id = (uintptr_t)stream; return cudaSuccess; }

/* While the host waits for an event, the device has the later launches to do. */
struct event { u64 n_launches; int is_behind_hanging; };

static int new_event(void *event) {
    *(struct event **)event = calloc(1, sizeof(struct event));
    return cudaSuccess;
}
static int record_event(void *event) {
    *(struct event *)event = (struct event){n_launches, n_hanging > 0};
    return cudaSuccess;
}
static int query_event(struct event *event) {
    return event->is_behind_hanging && n_hanging ? cudaErrorNotReady : cudaSuccess;
}
static int wait_for_event(struct event *event) {
    report(event->n_launches < n_launches ? "wait for earlier work" : "cudaEventSynchronize", 0, NULL);
    while (query_event(event))
        usleep(1000);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return new_event(event); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return new_event(event); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return record_event(event); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t s, unsigned f) { return record_event(event); }
cudaError_t cudaEventQuery(cudaEvent_t event) { return query_event((void *)event); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return wait_for_event((void *)event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 1; return cudaSuccess; }
CUresult cuEventCreate(CUevent *event, unsigned flags) { return new_event(event); }
CUresult cuEventRecord(CUevent event, CUstream stream) { return record_event(event); }
CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) { return record_event(event); }
CUresult cuEventSynchronize(CUevent event) { return wait_for_event((void *)event); }
CUresult cuEventDestroy(CUevent event) { free(event); return CUDA_SUCCESS; }
CUresult cuEventElapsedTime(float *ms, CUevent a, CUevent b) { *ms = 1; return CUDA_SUCCESS; }

/* --- CUDA graphs ---------------------------------------------------------------------------------------- */
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    captured = stream;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    captured = NULL;
    return new_handle(graph);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = captured && captured == stream ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    return cudaStreamIsCapturing(stream, (enum cudaStreamCaptureStatus *)status);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, u64 *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *n_dependencies) {
    if (id)
        *id = 7;
    if (n_dependencies)
        *n_dependencies = 0;
    return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned flags) { return new_handle(graph); }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *graph, cudaGraph_t g, u64 flags) { return new_handle(graph); }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *graph, cudaGraph_t g, u64 f) { return new_handle(graph); }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    *count = 1; /* PyTorch warns of graphs without nodes */
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    n_launches++;
    report("graph", 0, stream);
    return cudaSuccess;
}

/* --- kernels -------------------------------------------------------------------------------------------- */
int launch(const char *call, const void *stream) {
    n_launches++;
    report(captured && captured == stream ? "recorded kernel" : call, 0, stream);
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return launch("kernel", stream);
}
cudaError_t __cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return launch("kernel", stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **args) {
    return launch("kernel", config->stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **args, size_t n, cudaStream_t stream) {
    return launch("kernel", stream);
}
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void **args, void **extra) {
    return launch("kernel", stream);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **args, void **extra) {
    return launch("kernel", config->hStream);
}

/* nvcc compiles f<<<grid, block>>>() into a push, and a pop just before the launch. */
static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared = shared;
    pushed.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *(void **)stream = pushed.stream;
    return cudaSuccess;
}
void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
cudaError_t __cudaGetKernel(void **kernel, const void *f) { *kernel = (void *)f; return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) { *address = (void *)symbol; return cudaSuccess; }
cudaError_t cudaGetFuncBySymbol(cudaFunction_t *f, const void *symbol) { *f = (void *)symbol; return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *f) {
    *found = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = 90,
                                         .binaryVersion = 90};
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *f, int size, size_t shared) {
    *count = 2;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *f, int size, size_t shared,
                                                                   unsigned flags) {
    *count = 2;
    return cudaSuccess;
}
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction f, const CUlaunchConfig *c) { *count = 2; return 0; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { return new_handle(module); }
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned n, CUjit_option *options, void **values) {
    return new_handle(module);
}
CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) { return new_handle(f); }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction f) {
    *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return CUDA_SUCCESS;
}

/* --- functions that programs find by name --------------------------------------------------------------- */
static int return_success(void) { return 0; }

static void *find_function(const char *name) {
    char versioned[256];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    void *found = dlsym(RTLD_DEFAULT, versioned);
    found = found ? found : dlsym(RTLD_DEFAULT, name);
    return found ? found : (void *)return_success;
}

CUresult cuGetProcAddress(const char *name, void **f, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *result) {
    *f = find_function(name);
    if (result)
        *result = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version, u64 flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    return cuGetProcAddress(name, f, version, flags, (CUdriverProcAddressQueryResult *)result);
}
