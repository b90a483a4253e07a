// Activations and causal attention in bfloat16, forward and backward, on processors that multiply in bfloat16,
// by vectors (AVX512-BF16) or tiles (AMX). kilogpt/devices/cpu_kernels.py compiles this file and calls it.
#include <ATen/native/CPUBlas.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <immintrin.h>
#include <optional>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <tuple>
#include <vector>

using at::BFloat16;
using at::native::cpublas::brgemm;  // (M, N, K, row strides of A, B and C, whether to add to C, A, B, C)
using at::native::cpublas::brgemm_release;
using torch::headeronly::ScalarType;
using torch::stable::empty_like;
using torch::stable::new_empty;
using torch::stable::Tensor;

// Of attention, no matrix of all scores is kept: the backward pass computes them again, a block at a time
// (FlashAttention-2, Dao 2023, algorithms 1 and 2). Tensors are contiguous: q and y (B, T, H, D), k and v
// (B, T, G, D), where T and D are even. One task is a sequence and a key/value head, with all the query heads
// that read it, so that a result depends neither on the batch nor on the number of threads. Scores are computed
// transposed, a row for each key and a column for each of QUERIES queries: maxima and sums over keys then run
// along whole vectors of queries. With `first` (B, T), which does not fall along a sequence, query i sees the
// keys first[i] to i alone, and a block of queries leaves out the keys that none of them sees.
constexpr int64_t QUERIES = 64;  // of a block
constexpr int64_t KEYS = 256;    // of a block, in the backward pass
constexpr int64_t STEP = 32;     // keys that are left out together: brgemm makes code for each number of keys
constexpr float MASKED = -1e30f; // the score of a key that the query does not see

// --- numbers ---------------------------------------------------------------------------------------------

// exp(x) for x <= 0, to a few units in the last place. Unlike with std::exp, a loop of calls becomes vector
// instructions. NaN stays NaN.
static inline float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = std::nearbyint(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;  // x - n ln 2, with ln 2 in two parts
    float p = 1.9875691500e-4f;  // the polynomial of expf in the Cephes library
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t power = (static_cast<int32_t>(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &power, 4);
    return p * scale;
}

// The bits of x in bfloat16, rounded to the nearest, ties to even.
static inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

static inline float float_of(BFloat16 x) {
    uint32_t bits = static_cast<uint32_t>(x.x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Two numbers in bfloat16, the first in the lower half.
static inline uint32_t pair_of(float first, float second) {
    return bits_of(first) | bits_of(second) << 16;
}

// --- operands of products --------------------------------------------------------------------------------

// brgemm takes its second matrix, (K, N), in pairs of rows: (K / 2, N, 2). Each pair is a uint32_t here.

static const BFloat16* operand(const uint32_t* pairs) {
    return reinterpret_cast<const BFloat16*>(pairs);
}

// out (rows / 2, D) pairs = rows of x, an even number.
static void pack(const BFloat16* x, int64_t rows, int64_t stride, int64_t D, uint32_t* out) {
    for (int64_t row = 0; row < rows; row += 2) {
        const uint16_t* first = reinterpret_cast<const uint16_t*>(x + row * stride);
        const uint16_t* second = first + stride;
        for (int64_t d = 0; d < D; d++)
            out[row / 2 * D + d] = first[d] | static_cast<uint32_t>(second[d]) << 16;
    }
}

// A row of 16 columns becomes a column of 16 rows, in place: neighbours are exchanged first, then pairs, then
// quarters of the rows.
static inline void transpose_block(__m512i (&x)[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    // Quarter q of x[4 r + c] now is column 4 q + c of rows 4 r to 4 r + 3.
    for (int c = 0; c < 4; c++) {
        const __m512i even = _mm512_shuffle_i32x4(x[c], x[4 + c], 0x88);
        const __m512i odd = _mm512_shuffle_i32x4(x[c], x[4 + c], 0xdd);
        const __m512i lower_even = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0x88);
        const __m512i lower_odd = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0xdd);
        y[c] = _mm512_shuffle_i32x4(even, lower_even, 0x88);
        y[4 + c] = _mm512_shuffle_i32x4(odd, lower_odd, 0x88);
        y[8 + c] = _mm512_shuffle_i32x4(even, lower_even, 0xdd);
        y[12 + c] = _mm512_shuffle_i32x4(odd, lower_odd, 0xdd);
    }
    for (int i = 0; i < 16; i++)
        x[i] = y[i];
}

// out (columns, rows) = the transpose of x (rows, columns), a matrix of pairs. Strides count pairs.
static void transpose_pairs(const void* x, int64_t rows, int64_t columns, int64_t stride, void* out,
                            int64_t out_stride) {
    for (int64_t row = 0; row < rows; row += 16)
        for (int64_t column = 0; column < columns; column += 16) {
            const int64_t height = std::min<int64_t>(16, rows - row);
            const int64_t width = std::min<int64_t>(16, columns - column);
            __m512i block[16];
            for (int64_t i = 0; i < 16; i++)
                block[i] = _mm512_maskz_loadu_epi32(
                    i < height ? (1 << width) - 1 : 0,
                    static_cast<const uint32_t*>(x) + (row + i) * stride + column);
            transpose_block(block);
            for (int64_t i = 0; i < width; i++)
                _mm512_mask_storeu_epi32(static_cast<uint32_t*>(out) + (column + i) * out_stride + row,
                                         (1 << height) - 1, block[i]);
        }
}

// out (D / 2, QUERIES) pairs = the transpose of `rows` rows of x, and zeros beyond them.
static void pack_transposed(const BFloat16* x, int64_t rows, int64_t stride, int64_t D, uint32_t* out) {
    if (rows < QUERIES)
        std::fill(out, out + D / 2 * QUERIES, 0);
    transpose_pairs(x, rows, D / 2, stride / 2, out, QUERIES);
}

// The first `rows` columns of x (D, QUERIES), each times its factor, become the rows of out.
// pairs (D / 2, QUERIES): memory for what lies between.
static void unpack_transposed(const float* x, const float* factors, int64_t rows, int64_t stride, int64_t D,
                              uint32_t* pairs, BFloat16* out) {
    for (int64_t d = 0; d < D; d += 2) {
        const float *first = x + d * QUERIES, *second = first + QUERIES;
        for (int64_t i = 0; i < QUERIES; i++)
            pairs[d / 2 * QUERIES + i] = pair_of(first[i] * factors[i], second[i] * factors[i]);
    }
    transpose_pairs(pairs, D / 2, rows, QUERIES, out, stride / 2);
}

// out (D, T) = the transpose of x (T, D), whose rows are `stride` apart. pairs (T / 2, D): memory.
static void transpose(const BFloat16* x, int64_t T, int64_t stride, int64_t D, uint32_t* pairs,
                      BFloat16* out) {
    pack(x, T, stride, D, pairs);
    transpose_pairs(pairs, T / 2, D, D, out, T / 2);
}

// --- vectors of 16 numbers in bfloat16 -------------------------------------------------------------------

static inline __m512 load(const BFloat16* x) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

static inline void store(BFloat16* y, __m512 values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), (__m256i)_mm512_cvtneps_pbh(values));
}

// --- tensors ---------------------------------------------------------------------------------------------

static const BFloat16* numbers(const Tensor& x) {
    return static_cast<const BFloat16*>(x.const_data_ptr());
}

static const int64_t* integers(const std::optional<Tensor>& x) {
    return x ? static_cast<const int64_t*>(x->const_data_ptr()) : nullptr;
}

static const float* floats(const Tensor& x) {
    return static_cast<const float*>(x.const_data_ptr());
}

static BFloat16* output(const Tensor& x) {
    return static_cast<BFloat16*>(x.mutable_data_ptr());
}

// --- activations -----------------------------------------------------------------------------------------

constexpr int64_t BLOCK = 64;  // numbers that are looked up at a time, of which tensors have a multiple

// out[i] = table[the bits of x[i]], for BLOCK numbers. One at a time, since AMD's processors take twice as long
// with instructions that gather a vector.
static inline void look_up(const BFloat16* x, const float* table, float* out) {
    for (int64_t i = 0; i < BLOCK; i++) {
        out[i] = table[x[i].x];
        asm volatile("");  // keeps the compiler from gathering vectors
    }
}

// f(x), or f(x) factor. values: f of each of the 65,536 numbers, by its bits. Nearly all x are among a few
// thousand of them, whose values stay in the nearest cache.
static Tensor activation(Tensor x, std::optional<Tensor> factor, Tensor values) {
    const Tensor y = empty_like(x);
    const BFloat16 *in = numbers(x), *factors = factor ? numbers(*factor) : nullptr;
    const float* table = floats(values);
    BFloat16* out = output(y);
    const int64_t size = x.numel();
    #pragma omp parallel for schedule(static)
    for (int64_t start = 0; start < size; start += BLOCK) {
        float found[BLOCK];
        look_up(in + start, table, found);
        for (int64_t i = 0; i < BLOCK; i += 16) {
            __m512 result = _mm512_loadu_ps(found + i);
            if (factors)
                result = _mm512_mul_ps(result, load(factors + start + i));
            store(out + start + i, result);
        }
    }
    return y;
}

// The gradients of x and of factor from that of y; without a factor, nothing as its gradient.
// slopes: the derivative of f at each number, by its bits.
static std::tuple<Tensor, Tensor> activation_backward(Tensor grad_y, Tensor x, std::optional<Tensor> factor,
                                                      Tensor values, Tensor slopes) {
    const Tensor grad_x = empty_like(x), grad_factor = factor ? empty_like(x) : new_empty(x, {0});
    const BFloat16 *grads = numbers(grad_y), *in = numbers(x);
    const BFloat16* factors = factor ? numbers(*factor) : nullptr;
    const float *value_table = floats(values), *slope_table = floats(slopes);
    BFloat16 *out = output(grad_x), *factor_out = output(grad_factor);
    const int64_t size = x.numel();
    #pragma omp parallel for schedule(static)
    for (int64_t start = 0; start < size; start += BLOCK) {
        float found_slopes[BLOCK], found_values[BLOCK];
        look_up(in + start, slope_table, found_slopes);
        if (factors)
            look_up(in + start, value_table, found_values);
        for (int64_t i = 0; i < BLOCK; i += 16) {
            __m512 grad = load(grads + start + i);
            if (factors) {
                store(factor_out + start + i, _mm512_mul_ps(grad, _mm512_loadu_ps(found_values + i)));
                grad = _mm512_mul_ps(grad, load(factors + start + i));
            }
            store(out + start + i, _mm512_mul_ps(grad, _mm512_loadu_ps(found_slopes + i)));
        }
    }
    return {grad_x, grad_factor};
}

// --- what queries see ------------------------------------------------------------------------------------

// What the queries of a block see. Without `first`, each sees all keys up to its own position.
struct Visible {
    int64_t begin = 0;            // the block computes with the keys from this one on, a multiple of STEP
    int64_t common = 0;           // every query sees the keys from this one on, up to its own position
    int32_t firsts[QUERIES] = {}; // the first key that each query sees

    // first (T): of one sequence, or null. The block has `rows` queries from `start` on.
    Visible(const int64_t* first, int64_t start, int64_t rows) {
        if (!first)
            return;
        begin = first[start] / STEP * STEP;
        common = first[start + rows - 1];
        std::copy(first + start, first + start + rows, firsts);
    }
};

// The largest number of keys with which a block computes.
static int64_t most_keys(const int64_t* first, int64_t B, int64_t T) {
    if (!first)
        return T;
    for (int64_t i = 0; i < B * T; i++) {
        const int64_t before = i % T ? first[i - 1] : 0;
        STD_TORCH_CHECK(before <= first[i] && first[i] <= i % T,
                        "first must neither fall along a row nor be beyond the query, nor below 0");
    }
    int64_t most = 0;
    for (int64_t b = 0; b < B; b++)
        for (int64_t start = 0; start < T; start += QUERIES) {
            const int64_t end = std::min(start + QUERIES, T);
            most = std::max(most, end - Visible(first + b * T, start, end - start).begin);
        }
    return most;
}

// --- attention -------------------------------------------------------------------------------------------

// y = softmax(q kᵀ / √D) v, causal, and log_sums (B, H, T), the logarithms of the softmax's denominators.
static std::tuple<Tensor, Tensor> attention(Tensor queries, Tensor keys, Tensor values,
                                            std::optional<Tensor> firsts) {
    const int64_t B = queries.size(0), T = queries.size(1), H = queries.size(2), D = queries.size(3);
    const int64_t G = keys.size(2);
    const Tensor results = empty_like(queries);
    const Tensor all_log_sums = new_empty(queries, {B, H, T}, ScalarType::Float);
    const BFloat16 *q = numbers(queries), *k = numbers(keys), *v = numbers(values);
    BFloat16* y = output(results);
    float* log_sums = static_cast<float*>(all_log_sums.mutable_data_ptr());
    const int64_t* all_firsts = integers(firsts);
    const int64_t most = most_keys(all_firsts, B, T);
    const float scale = 1 / std::sqrt(static_cast<float>(D));
    #pragma omp parallel
    {
        std::vector<BFloat16> v_transposed(D * T);
        std::vector<uint32_t> v_pairs(T / 2 * D);
        std::vector<float> scores(most * QUERIES), y_transposed(D * QUERIES);
        std::vector<uint32_t> q_pairs(D / 2 * QUERIES), weights(most / 2 * QUERIES);
        float largest[QUERIES], sums[QUERIES], factors[QUERIES];
        #pragma omp for schedule(static)
        for (int64_t task = 0; task < B * G; task++) {
            const int64_t b = task / G, g = task % G, first_key = (b * T * G + g) * D;
            transpose(v + first_key, T, G * D, D, v_pairs.data(), v_transposed.data());
            for (int64_t h = g * (H / G); h < (g + 1) * (H / G); h++)
                for (int64_t start = 0; start < T; start += QUERIES) {
                    const int64_t rows = std::min(QUERIES, T - start);
                    const Visible visible(all_firsts ? all_firsts + b * T : nullptr, start, rows);
                    const int64_t begin = visible.begin, seen = start + rows - begin;
                    const int64_t place = (b * T + start) * H * D + h * D;
                    pack_transposed(q + place, rows, H * D, D, q_pairs.data());
                    brgemm(seen, QUERIES, D, G * D, QUERIES, QUERIES, false, k + first_key + begin * G * D,
                           operand(q_pairs.data()), scores.data());
                    for (int64_t key = begin; key < visible.common; key++) {
                        float* row = &scores[(key - begin) * QUERIES];
                        for (int32_t i = 0; i < QUERIES; i++)
                            row[i] = key < visible.firsts[i] ? MASKED : row[i];
                    }
                    std::fill(largest, largest + QUERIES, MASKED);
                    for (int64_t key = 0; key < seen; key++) {
                        float* row = &scores[key * QUERIES];
                        const int32_t first_query = begin + key - start;
                        for (int32_t i = 0; i < QUERIES; i++) {
                            row[i] = i < first_query ? MASKED : row[i] * scale;
                            largest[i] = largest[i] < row[i] ? row[i] : largest[i];
                        }
                    }
                    std::fill(sums, sums + QUERIES, 0.0f);
                    for (int64_t key = 0; key < seen; key += 2) {
                        const float* row = &scores[key * QUERIES];
                        uint32_t* out = &weights[key / 2 * QUERIES];
                        for (int64_t i = 0; i < QUERIES; i++) {
                            const float first = exp_of(row[i] - largest[i]);
                            const float second = exp_of(row[QUERIES + i] - largest[i]);
                            sums[i] += first + second;
                            out[i] = pair_of(first, second);
                        }
                    }
                    brgemm(D, QUERIES, seen, T, QUERIES, QUERIES, false, v_transposed.data() + begin,
                           operand(weights.data()), y_transposed.data());
                    for (int64_t i = 0; i < QUERIES; i++)
                        factors[i] = 1 / sums[i];
                    unpack_transposed(y_transposed.data(), factors, rows, H * D, D, q_pairs.data(),
                                      y + place);
                    for (int64_t i = 0; i < rows; i++)
                        log_sums[(b * H + h) * T + start + i] = largest[i] + std::log(sums[i]);
                }
        }
        brgemm_release();
    }
    return {results, all_log_sums};
}

// The gradients of q, k and v from that of y. y and log_sums are what `attention` gave.
static std::tuple<Tensor, Tensor, Tensor> attention_backward(Tensor grads, Tensor queries, Tensor keys,
                                                             Tensor values, Tensor results,
                                                             Tensor all_log_sums,
                                                             std::optional<Tensor> firsts) {
    const int64_t B = queries.size(0), T = queries.size(1), H = queries.size(2), D = queries.size(3);
    const int64_t G = keys.size(2);
    const Tensor query_grads = empty_like(queries), key_grads = empty_like(keys);
    const Tensor value_grads = empty_like(values);
    const BFloat16 *q = numbers(queries), *k = numbers(keys), *v = numbers(values), *y = numbers(results);
    const BFloat16* grad_y = numbers(grads);
    const float* log_sums = floats(all_log_sums);
    const int64_t* all_firsts = integers(firsts);
    BFloat16 *grad_q = output(query_grads), *grad_k = output(key_grads), *grad_v = output(value_grads);
    const int64_t most = most_keys(all_firsts, B, T);
    const float scale = 1 / std::sqrt(static_cast<float>(D));
    #pragma omp parallel
    {
        const int64_t size = std::min(KEYS, most) * QUERIES;  // of a block
        std::vector<BFloat16> k_transposed(D * T), weights(size), grad_scores(size);
        std::vector<float> scores(size), grad_weights(size);
        std::vector<float> grad_q_transposed(D * QUERIES), grad_k_sum(T * D), grad_v_sum(T * D);
        std::vector<uint32_t> k_pairs(T / 2 * D);
        std::vector<uint32_t> q_pairs(QUERIES / 2 * D), q_transposed(D / 2 * QUERIES);
        std::vector<uint32_t> grad_y_pairs(QUERIES / 2 * D), grad_y_transposed(D / 2 * QUERIES);
        std::vector<uint32_t> grad_score_pairs(size / 2);
        float log_sum[QUERIES], mean[QUERIES], scales[QUERIES];
        std::fill(scales, scales + QUERIES, scale);
        #pragma omp for schedule(static)
        for (int64_t task = 0; task < B * G; task++) {
            const int64_t b = task / G, g = task % G, first_key = (b * T * G + g) * D;
            transpose(k + first_key, T, G * D, D, k_pairs.data(), k_transposed.data());
            std::fill(grad_k_sum.begin(), grad_k_sum.end(), 0.0f);
            std::fill(grad_v_sum.begin(), grad_v_sum.end(), 0.0f);
            for (int64_t h = g * (H / G); h < (g + 1) * (H / G); h++)
                for (int64_t start = 0; start < T; start += QUERIES) {
                    const int64_t rows = std::min(QUERIES, T - start), seen = start + rows;
                    const Visible visible(all_firsts ? all_firsts + b * T : nullptr, start, rows);
                    const int64_t place = (b * T + start) * H * D + h * D;
                    if (rows < QUERIES) {  // queries that are not there add zeros
                        std::fill(q_pairs.begin(), q_pairs.end(), 0);
                        std::fill(grad_y_pairs.begin(), grad_y_pairs.end(), 0);
                    }
                    pack(q + place, rows, H * D, D, q_pairs.data());
                    pack(grad_y + place, rows, H * D, D, grad_y_pairs.data());
                    pack_transposed(q + place, rows, H * D, D, q_transposed.data());
                    pack_transposed(grad_y + place, rows, H * D, D, grad_y_transposed.data());
                    // The mean of a query's weight gradients, by its weights, is the product of y and grad_y.
                    std::fill(log_sum, log_sum + QUERIES, 0.0f);
                    std::fill(mean, mean + QUERIES, 0.0f);
                    for (int64_t i = 0; i < rows; i++) {
                        const BFloat16 *result = y + place + i * H * D, *grad = grad_y + place + i * H * D;
                        float product = 0;
                        #pragma omp simd reduction(+ : product)
                        for (int64_t d = 0; d < D; d++)
                            product += float_of(grad[d]) * float_of(result[d]);
                        mean[i] = product;
                        log_sum[i] = log_sums[(b * H + h) * T + start + i];
                    }
                    for (int64_t block = visible.begin; block < seen; block += KEYS) {
                        const int64_t keys = std::min(KEYS, seen - block);
                        const int64_t key_place = first_key + block * G * D;
                        brgemm(keys, QUERIES, D, G * D, QUERIES, QUERIES, false, k + key_place,
                               operand(q_transposed.data()), scores.data());
                        brgemm(keys, QUERIES, D, G * D, QUERIES, QUERIES, false, v + key_place,
                               operand(grad_y_transposed.data()), grad_weights.data());
                        // The weights and the gradients of the scores of two keys.
                        // is_before: whether a key comes before the first one that a query sees.
                        const auto compute = [&](int64_t key, auto is_before) {
                            const float* row = &scores[key * QUERIES];
                            const float* grad_row = &grad_weights[key * QUERIES];
                            uint16_t* weight = reinterpret_cast<uint16_t*>(&weights[key * QUERIES]);
                            uint16_t* grad = reinterpret_cast<uint16_t*>(&grad_scores[key * QUERIES]);
                            uint32_t* pairs = &grad_score_pairs[key / 2 * QUERIES];
                            const int32_t first_query = block + key - start;
                            for (int32_t i = 0; i < QUERIES; i++) {
                                float first = exp_of(row[i] * scale - log_sum[i]);
                                first = i < first_query || is_before(block + key, i) ? 0 : first;
                                float second = exp_of(row[QUERIES + i] * scale - log_sum[i]);
                                second = i <= first_query || is_before(block + key + 1, i) ? 0 : second;
                                weight[i] = bits_of(first);
                                weight[QUERIES + i] = bits_of(second);
                                first *= grad_row[i] - mean[i];
                                second *= grad_row[QUERIES + i] - mean[i];
                                grad[i] = bits_of(first);
                                grad[QUERIES + i] = bits_of(second);
                                pairs[i] = pair_of(first, second);
                            }
                        };
                        for (int64_t key = 0; key < keys; key += 2)
                            if (block + key < visible.common)
                                compute(key, [&](int32_t at, int32_t i) { return at < visible.firsts[i]; });
                            else
                                compute(key, [](int32_t, int32_t) { return false; });
                        brgemm(keys, D, QUERIES, QUERIES, D, D, true, weights.data(),
                               operand(grad_y_pairs.data()), &grad_v_sum[block * D]);
                        brgemm(keys, D, QUERIES, QUERIES, D, D, true, grad_scores.data(),
                               operand(q_pairs.data()), &grad_k_sum[block * D]);
                        brgemm(D, QUERIES, keys, T, QUERIES, QUERIES, block > visible.begin,
                               &k_transposed[block],
                               operand(grad_score_pairs.data()), grad_q_transposed.data());
                    }
                    unpack_transposed(grad_q_transposed.data(), scales, rows, H * D, D, q_transposed.data(),
                                      grad_q + place);
                }
            for (int64_t t = 0; t < T; t++)
                for (int64_t d = 0; d < D; d++) {
                    grad_k[first_key + t * G * D + d].x = bits_of(grad_k_sum[t * D + d] * scale);
                    grad_v[first_key + t * G * D + d].x = bits_of(grad_v_sum[t * D + d]);
                }
        }
        brgemm_release();
    }
    return {query_grads, key_grads, value_grads};
}

// --- what kilogpt/devices/cpu_kernels.py calls -------------------------------------------------------------------

// Whether oneDNN has products in bfloat16 here. It throws if not, as with ONEDNN_MAX_CPU_ISA=AVX512_CORE.
extern "C" int is_supported() {
    const uint32_t ones[2] = {pair_of(1, 1), pair_of(1, 1)};  // as (2, 2), and as pairs of rows of (2, 2)
    float product[4] = {};
    try {
        brgemm(2, 2, 2, 2, 2, 2, false, operand(ones), operand(ones), product);
        brgemm_release();
    } catch (const std::exception&) {
        return false;
    }
    return product[0] == 2;
}

// The schemas are in kilogpt/devices/cpu_kernels.py.
STABLE_TORCH_LIBRARY_IMPL(kilogpt, CPU, library) {
    library.impl("attention", TORCH_BOX(&attention));
    library.impl("attention_backward", TORCH_BOX(&attention_backward));
    library.impl("activation", TORCH_BOX(&activation));
    library.impl("activation_backward", TORCH_BOX(&activation_backward));
}
