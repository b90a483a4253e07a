/* cuBLAS and cuDNN: products are accepted like kernels. */
#include "stub.h"
#include <library_types.h>

/* --- cuBLAS: products are reported with the type of their first factor ---------------------------------- */
static __thread void *stream_of_products;
int cublasSetStream_v2(void *handle, void *stream) { stream_of_products = stream; return 0; }

static int product(cudaDataType type) {
    return launch(type == CUDA_R_16BF ? "product in bfloat16" : type == CUDA_R_16F ? "product in float16" :
                  type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2 ? "product in float8" : "product in float32",
                  stream_of_products);
}

int cublasSgemm_v2(void) { return product(CUDA_R_32F); }
int cublasSgemmStridedBatched(void) { return product(CUDA_R_32F); }
int cublasGemmEx(void *handle, int transposes_a, int transposes_b, int m, int n, int k, const void *alpha,
                 const void *a, cudaDataType type) {
    return product(type);
}
int cublasGemmStridedBatchedEx(void *handle, int transposes_a, int transposes_b, int m, int n, int k,
                               const void *alpha, const void *a, cudaDataType type) {
    return product(type);
}
int cublasLtMatrixLayoutCreate(cudaDataType **layout, cudaDataType type) {
    *layout = malloc(sizeof type);
    **layout = type;
    return 0;
}
int cublasLtMatrixLayoutDestroy(cudaDataType *layout) { free(layout); return 0; }
int cublasLtMatmul(void *handle, void *description, const void *alpha, const void *a, cudaDataType *layout,
                   const void *b, void *layout_b, const void *beta, const void *c, void *layout_c, void *d,
                   void *layout_d, const void *algorithm, void *workspace, size_t bytes, void *stream) {
    stream_of_products = stream;
    return product(*layout);
}

int cublasCreate_v2(void **handle) { *handle = malloc(1); return 0; }
int cublasLtCreate(void **handle) { *handle = malloc(1); return 0; }
int cublasGetVersion_v2(void *handle, int *version) { *version = 130000; return 0; }
size_t cublasLtGetVersion(void) { return 130000; }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
const char *cublasGetStatusString(int status) { return "status"; }
const char *cublasLtGetStatusString(int status) { return "status"; }

/* One algorithm for each product: a cublasLtMatmulHeuristicResult_t of 96 bytes that are zero. */
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *found) {
    memset(results, 0, 96);
    *found = 1;
    return 0;
}

/* --- cuDNN: too old a version for attention, which then takes PyTorch's own kernels --------------------- */
size_t cudnnGetVersion(void) { return 8900; }
