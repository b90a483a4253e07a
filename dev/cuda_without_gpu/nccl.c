/* NCCL between processes of one machine: each call leaves its tensor in a file, and reads those of the others.

   The call is done when it returns, so that ranks wait for each other in the order of their programs. The sum of a
   reduction is the tensor of rank 0: nobody has computed what is summed. Ranks that do not make the same call get an
   error that names both calls, and so does a rank that waits for longer than PATIENCE.

   If the process of another rank has ended, then a call returns, but hangs on the device until its communicator is
   aborted, and the communicator has the error of NCCL between machines. */
#include "stub.h"
#include <fcntl.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#define __CUDA_FP16_H__ /* these two need headers that the packages lack */
#define __CUDA_BF16_H__
#include <nccl.h>

enum { PATIENCE = 30, MOST_CALLS = 1024, HEADER = 96 };
static const int SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* bytes of each ncclDataType_t */

struct ncclComm {
    int count, rank, device;
    u64 id, n_calls;
    u64 *n_sent, *n_received; /* by the other rank */
    char *was_seen;           /* whether the other rank has made a call */
    volatile int hangs, is_aborted;
};

enum operation { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, SEND, RECEIVE };
static const char *const NAMES[] = {"ncclAllReduce", "ncclAllGather", "ncclReduceScatter", "ncclAlltoAll",
                                    "ncclBroadcast", "ncclSend", "ncclSend"};
struct call {
    enum operation operation;
    const char *from;
    char *to;
    size_t bytes;
    int peer; /* the other rank, or the root */
    struct ncclComm *comm;
    u64 number;
    char header[HEADER];
};

/* --- whether a rank lives: its socket ends with its process ------------------------------------------------ */
static int find_socket(struct ncclComm *comm, int rank, int (*use)(int, const struct sockaddr *, socklen_t)) {
    struct sockaddr_un address = {AF_UNIX};
    int length = snprintf(address.sun_path + 1, 100, "cuda_without_gpu.%llx.%d", comm->id, rank);
    int descriptor = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    int failed = use(descriptor, (struct sockaddr *)&address, offsetof(struct sockaddr_un, sun_path) + 1 + length);
    if (failed || use == connect)
        close(descriptor);
    return failed;
}
static int has_ended(struct ncclComm *comm, int rank) {
    return comm->was_seen[rank] && find_socket(comm, rank, connect);
}

/* --- files ---------------------------------------------------------------------------------------------- */
enum { ALL = -1 };
static void name_file(char *path, struct ncclComm *comm, u64 number, int from, int to) {
    snprintf(path, 128, "/dev/shm/cuda_without_gpu.%llx.%llu.%d.%d", comm->id, number, from, to);
}

/* Whether each rank gets a part of what a rank brings. */
static int divides_input(enum operation operation) { return operation == REDUCE_SCATTER || operation == ALL_TO_ALL; }

/* Bytes that a rank brings, and those of them that travel. */
static size_t sent(struct call *call) {
    return divides_input(call->operation) ? call->comm->count * call->bytes : call->bytes;
}
static size_t moved(size_t bytes) { return bytes > MOST_MOVED ? 0 : bytes; }

static void put(struct call *call, const char *path) {
    char unfinished[160];
    snprintf(unfinished, sizeof unfinished, "%s.tmp", path);
    FILE *file = fopen(unfinished, "w");
    fwrite(call->header, HEADER, 1, file);
    fwrite(call->from, moved(sent(call)), 1, file);
    fclose(file);
    rename(unfinished, path);
}

/* Each reader of a file adds a byte to it, and the last one deletes it. size: that of the file without these bytes. */
static void note_reader(int file, const char *path, size_t size, int readers) {
    struct stat status;
    write(file, "", 1);
    if (!fstat(file, &status) && status.st_size >= size + readers)
        unlink(path);
}

/* Wait for a file of a rank and read some bytes of its tensor. Error if the file is of another call. */
static ncclResult_t take(struct call *call, const char *path, int from, size_t offset, void *to, size_t bytes) {
    struct ncclComm *comm = call->comm;
    char header[HEADER] = "nothing";
    int file = open(path, O_RDWR | O_APPEND);
    for (int wait = 0; file < 0 && wait < 2000 * PATIENCE && !comm->is_aborted; wait++) {
        usleep(500);
        if (wait % 100 == 0 && has_ended(comm, from) && access(path, F_OK)) {
            comm->hangs = 1;
            __sync_add_and_fetch(&n_hanging, 1);
        }
        if (comm->hangs)
            return ncclSuccess;
        file = open(path, O_RDWR | O_APPEND);
    }
    if (comm->is_aborted)
        return ncclSuccess;
    if (file >= 0)
        pread(file, header, HEADER, 0);
    if (strcmp(header, call->header)) {
        fprintf(stderr, "collectives differ: rank %d of %d calls %s, another rank %s\n", comm->rank, comm->count,
                call->header, header);
        return ncclInvalidUsage;
    }
    comm->was_seen[from] = 1;
    pread(file, to, bytes, HEADER + offset);
    if (call->operation == BROADCAST || call->operation == RECEIVE)
        note_number(to, bytes);
    note_reader(file, path, HEADER + moved(sent(call)), call->operation == RECEIVE ? 1 : call->comm->count);
    close(file);
    return ncclSuccess;
}

/* --- calls ---------------------------------------------------------------------------------------------- */
static void begin(struct call *call) {
    struct ncclComm *comm = call->comm;
    char path[128];
    if (comm->hangs || comm->is_aborted)
        return;
    if (call->operation == SEND) {
        name_file(path, comm, comm->n_sent[call->peer]++, comm->rank, call->peer);
        put(call, path);
    } else if (call->operation != RECEIVE) {
        call->number = comm->n_calls++;
        name_file(path, comm, call->number, comm->rank, ALL);
        put(call, path);
    }
}

static ncclResult_t end(struct call *call) {
    struct ncclComm *comm = call->comm;
    size_t bytes = call->bytes, share = comm->rank * bytes;
    char path[128];
    ncclResult_t error = ncclSuccess;
    if (call->operation == SEND || comm->hangs || comm->is_aborted)
        return error;
    if (call->operation == RECEIVE) {
        name_file(path, comm, comm->n_received[call->peer]++, call->peer, comm->rank);
        return take(call, path, call->peer, 0, call->to, bytes);
    }
    for (int rank = 0; rank < comm->count && !error && !comm->hangs && !comm->is_aborted; rank++) {
        int joins_output = call->operation == ALL_GATHER || call->operation == ALL_TO_ALL;
        int is_read = joins_output || rank == call->peer;
        name_file(path, comm, call->number, rank, ALL);
        error = take(call, path, rank, divides_input(call->operation) ? share : 0,
                     call->to + (joins_output ? rank * bytes : 0), is_read ? bytes : 0);
    }
    return error;
}

/* The calls between ncclGroupStart and ncclGroupEnd begin and end together. */
static __thread int depth, n_grouped;
static __thread struct call grouped[MOST_CALLS];

ncclResult_t ncclGroupStart(void) { depth++; return ncclSuccess; }
ncclResult_t ncclGroupEnd(void) {
    ncclResult_t error = ncclSuccess;
    if (--depth)
        return error;
    for (int i = 0; i < n_grouped; i++)
        begin(grouped + i);
    for (int i = 0; i < n_grouped && !error; i++)
        error = end(grouped + i);
    n_grouped = 0;
    return error;
}

static ncclResult_t make(enum operation operation, const void *from, void *to, size_t n, ncclDataType_t type,
                         int peer, struct ncclComm *comm, void *stream) {
    struct call call = {operation, from, to, n * SIZES[type], peer, comm};
    snprintf(call.header, HEADER, "%s of %zu elements of type %d", NAMES[operation], n, type);
    report(operation == RECEIVE ? "ncclRecv" : NAMES[operation], call.bytes, stream);
    ncclGroupStart();
    grouped[n_grouped++] = call;
    return ncclGroupEnd();
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t n, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
    return make(ALL_REDUCE, from, to, n, type, 0, comm, stream);
}
ncclResult_t ncclReduceScatter(const void *from, void *to, size_t n, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    return make(REDUCE_SCATTER, from, to, n, type, 0, comm, stream);
}
ncclResult_t ncclAllGather(const void *from, void *to, size_t n, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    return make(ALL_GATHER, from, to, n, type, 0, comm, stream);
}
ncclResult_t ncclAlltoAll(const void *from, void *to, size_t n, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
    return make(ALL_TO_ALL, from, to, n, type, 0, comm, stream);
}
ncclResult_t ncclBroadcast(const void *from, void *to, size_t n, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    return make(BROADCAST, from, to, n, type, root, comm, stream);
}
ncclResult_t ncclSend(const void *from, size_t n, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return make(SEND, from, NULL, n, type, peer, comm, stream);
}
ncclResult_t ncclRecv(void *to, size_t n, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return make(RECEIVE, NULL, to, n, type, peer, comm, stream);
}

/* --- groups of ranks ------------------------------------------------------------------------------------ */
ncclResult_t ncclGetVersion(int *version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    static u64 n_ids;
    memset(id, 0, sizeof *id);
    *(u64 *)id = (u64)getpid() << 16 | ++n_ids;
    return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int count, ncclUniqueId id, int rank, ncclConfig_t *config) {
    *comm = malloc(sizeof **comm);
    **comm = (struct ncclComm){count, rank, current_device, *(u64 *)&id, 0, calloc(count, sizeof(u64)),
                               calloc(count, sizeof(u64)), calloc(count, 1)};
    find_socket(*comm, rank, bind);
    return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    comm->is_aborted = 1;
    if (__sync_bool_compare_and_swap(&comm->hangs, 1, 0))
        __sync_sub_and_fetch(&n_hanging, 1);
    return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int count, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(comm, count, id, rank, NULL);
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) { *count = comm->count; return ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) { *rank = comm->rank; return ncclSuccess; }
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) { *device = comm->device; return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    *error = comm->hangs ? ncclRemoteError : ncclSuccess;
    return ncclSuccess;
}
const char *ncclGetErrorString(ncclResult_t error) { return "collectives differ"; }
const char *ncclGetLastError(ncclComm_t comm) { return ""; }
