// Products with packed weights, and the step from token to token of a whole GPT in one call, on processors
// with AVX512-BF16 and AVX512-VNNI. cpu_step.py compiles this file, fills its structures and calls it.
//
// A token of one text reads every weight once, so its time is the time in which the weights come from memory.
// Nothing here allocates, and threads do not sleep between phases. A row of a result does not depend on the
// other rows of its batch, nor on the number of threads: each element is summed in one order.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <omp.h>
#include <sched.h>

// How weights are kept, and what they are multiplied with. Sums are in float32.
enum Kind : int64_t {
    FLOAT32,   // float32 with float32
    WIDENED,   // bfloat16 with float32
    BFLOAT16,  // bfloat16 with bfloat16
    INT8,      // 8 bits and a scale for each output, with 16 bits and a scale for each GROUP inputs
};

constexpr int64_t COLUMNS = 32;  // outputs that are computed together: two vectors
constexpr int64_t GROUP = 128;   // products of 15 and 7 bits whose sum fits into 31, with room to spare
constexpr int64_t AHEAD = 2048;  // bytes: how far ahead of few rows' products weights are asked for
constexpr int64_t TILE = 12;     // rows that are computed together, in 24 of the 32 registers

// --- numbers ---------------------------------------------------------------------------------------------

// exp(x) to a few units in the last place, by vector instructions where a loop calls it. NaN stays NaN.
static inline float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float n = std::nearbyint(x * 1.44269504f);
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;  // x - n ln 2, with ln 2 in two parts
    float p = 1.9875691500e-4f;  // the polynomial of expf in the Cephes library
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t power = (static_cast<int32_t>(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &power, 4);
    return p * scale;
}

static inline float tanh_of(float x) {
    return 1.0f - 2.0f / (exp_of(2.0f * x) + 1.0f);
}

// erf(x) with an error below 2e-7 (Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26).
static inline float erf_of(float x) {
    const float size = std::fabs(x), t = 1.0f / (1.0f + 0.3275911f * size);
    float p = 1.061405429f;
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    return std::copysign(1.0f - p * t * exp_of(-x * x), x);
}

// The bits of x in bfloat16, rounded to the nearest, ties to even.
static inline uint16_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline int64_t round_up(int64_t number, int64_t unit) {
    return (number + unit - 1) / unit * unit;
}

// --- threads ---------------------------------------------------------------------------------------------

// One phase of a call: its tasks are taken by a counter, and it has ended when all of them are done. A thread
// that the system stops between two tasks holds nobody up, and passes over the phases that it has missed.
struct Phase {
    std::atomic<int32_t> taken, done;
};

// One of the threads of a call, all of which run through the same phases.
struct Worker {
    Phase* phase;
    int n_threads;

    // work(task) for each task, by any of the threads; all have been done when this returns.
    template <class Work>
    void share(int64_t tasks, const Work& work) {
        if (n_threads == 1) {
            for (int64_t task = 0; task < tasks; task++)
                work(task);
            return;
        }
        int32_t mine = 0;
        for (int64_t task; (task = phase->taken.fetch_add(1, std::memory_order_relaxed)) < tasks; mine++)
            work(task);
        if (mine)
            phase->done.fetch_add(mine, std::memory_order_acq_rel);
        for (int spins = 0; phase->done.load(std::memory_order_acquire) < tasks; spins++) {
            if (spins < 4096)
                _mm_pause();
            else  // a thread that has a task waits for a core
                sched_yield();
        }
        phase++;
    }
};

// work(worker) in each of n_threads threads. phases: memory for as many as work has.
template <class Work>
static void in_threads(int n_threads, Phase* phases, int64_t n_phases, const Work& work) {
    if (n_threads <= 1) {
        work(Worker{phases, 1});
        return;
    }
    std::memset(static_cast<void*>(phases), 0, n_phases * sizeof(Phase));
#pragma omp parallel num_threads(n_threads)
    work(Worker{phases, n_threads});
}

// --- products --------------------------------------------------------------------------------------------

// Weights are in blocks of COLUMNS outputs. A block has a row of COLUMNS numbers for each input, or COLUMNS
// pairs for each pair of inputs if numbers have 16 or 8 bits. Zeros fill up the last block and the last pair.
struct Matrix {
    const char* weight;
    const float* scale;  // (outputs in whole blocks,), for INT8
    const float* bias;   // (outputs,) or null
    int64_t inputs, outputs, kind;

    int64_t blocks() const { return (outputs + COLUMNS - 1) / COLUMNS; }
    int64_t block_bytes() const {
        const int64_t even = round_up(inputs, 2);
        return COLUMNS * (kind == FLOAT32 ? inputs * 4 : kind == INT8 ? even : even * 2);
    }
};

// Bytes of a row of inputs in the form in which products of a kind read it.
static int64_t row_bytes(int64_t kind, int64_t inputs) {
    const int64_t even = round_up(inputs, 2);
    if (kind == INT8)
        return round_up(round_up(even * 2, 64) + (inputs + GROUP - 1) / GROUP * 4, 64);
    return round_up(even * (kind == BFLOAT16 ? 2 : 4), 64);
}

// Write a row of inputs in that form.
static void convert_row(int64_t kind, const float* x, int64_t inputs, char* out) {
    if (kind == BFLOAT16) {
        uint16_t* bits = reinterpret_cast<uint16_t*>(out);
        for (int64_t i = 0; i < inputs; i++)
            bits[i] = bits_of(x[i]);
        if (inputs % 2)
            bits[inputs] = 0;
    } else if (kind == INT8) {
        int16_t* numbers = reinterpret_cast<int16_t*>(out);
        float* scales = reinterpret_cast<float*>(out + round_up(round_up(inputs, 2) * 2, 64));
        for (int64_t begin = 0; begin < inputs; begin += GROUP) {
            const int64_t end = std::min(begin + GROUP, inputs);
            float largest = 0.0f;
            for (int64_t i = begin; i < end; i++)
                largest = std::max(largest, std::fabs(x[i]));
            const float factor = largest > 0.0f ? 32767.0f / largest : 0.0f;
            for (int64_t i = begin; i < end; i++)
                numbers[i] = static_cast<int16_t>(static_cast<int32_t>(std::nearbyint(x[i] * factor)));
            float scale = largest / 32767.0f;
            for (int64_t i = begin; i < end; i++)  // NaN and infinity do not survive as 16 bits
                scale = std::isfinite(x[i]) ? scale : NAN;
            scales[begin / GROUP] = scale;
        }
        if (inputs % 2)
            numbers[inputs] = 0;
    } else {
        std::memcpy(out, x, inputs * 4);
        if (inputs % 2)
            std::memset(out + inputs * 4, 0, 4);
    }
}

static inline __m512i load(const void* address) {
    return _mm512_loadu_si512(address);
}

static inline int32_t pair_at(const char* row, int64_t pair) {
    int32_t bits;
    std::memcpy(&bits, row + 4 * pair, 4);
    return bits;
}

// sums (ROWS, COLUMNS) = x (ROWS, inputs) times a block of weights. stride: bytes between rows of x.
// ahead: weights to ask for meanwhile, `step` bytes of them for each line or two of the block.
template <int KIND, int ROWS>
static void product(const char* x, int64_t stride, const char* w, int64_t inputs, const char* ahead,
                    int64_t step, float (*sums)[COLUMNS]) {
    const int64_t pairs = (inputs + 1) / 2;
    if constexpr (KIND == INT8) {
        const int64_t scales = round_up(2 * pairs * 2, 64);
        for (int64_t begin = 0; begin < pairs; begin += GROUP / 2) {
            __m512i part[ROWS][2];
            for (int r = 0; r < ROWS; r++)
                part[r][0] = part[r][1] = _mm512_setzero_si512();
            const int64_t end = std::min(begin + GROUP / 2, pairs);
            for (int64_t i = begin; i < end; i++, w += 64, ahead += step) {
                _mm_prefetch(ahead, _MM_HINT_T0);
                const __m512i w0 = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)w));
                const __m512i w1 = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(w + 32)));
                for (int r = 0; r < ROWS; r++) {
                    const __m512i values = _mm512_set1_epi32(pair_at(x + r * stride, i));
                    part[r][0] = _mm512_dpwssd_epi32(part[r][0], values, w0);
                    part[r][1] = _mm512_dpwssd_epi32(part[r][1], values, w1);
                }
            }
            // The sums of earlier groups are in memory, since registers hold those of this one.
            for (int r = 0; r < ROWS; r++) {
                const float* of_groups = reinterpret_cast<const float*>(x + r * stride + scales);
                const __m512 scale = _mm512_set1_ps(of_groups[begin / (GROUP / 2)]);
                for (int half = 0; half < 2; half++) {
                    float* sum = sums[r] + 16 * half;
                    const __m512 before = begin ? _mm512_loadu_ps(sum) : _mm512_setzero_ps();
                    _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[r][half]), scale, before));
                }
            }
        }
        return;
    }
    __m512 total[ROWS][2];
    for (int r = 0; r < ROWS; r++)
        total[r][0] = total[r][1] = _mm512_setzero_ps();
    if constexpr (KIND == FLOAT32) {
        for (int64_t i = 0; i < inputs; i++, w += 128, ahead += step) {
            _mm_prefetch(ahead, _MM_HINT_T0);
            _mm_prefetch(ahead + 64, _MM_HINT_T0);
            const __m512 w0 = _mm512_loadu_ps(w), w1 = _mm512_loadu_ps(w + 64);
            for (int r = 0; r < ROWS; r++) {
                const __m512 value = _mm512_set1_ps(reinterpret_cast<const float*>(x + r * stride)[i]);
                total[r][0] = _mm512_fmadd_ps(value, w0, total[r][0]);
                total[r][1] = _mm512_fmadd_ps(value, w1, total[r][1]);
            }
        }
    } else if constexpr (KIND == WIDENED) {
        const __m512i upper = _mm512_set1_epi32(0xffff0000);
        for (int64_t i = 0; i < pairs; i++, w += 128, ahead += step) {
            _mm_prefetch(ahead, _MM_HINT_T0);
            _mm_prefetch(ahead + 64, _MM_HINT_T0);
            const __m512i w0 = load(w), w1 = load(w + 64);
            const __m512 even0 = _mm512_castsi512_ps(_mm512_slli_epi32(w0, 16));
            const __m512 even1 = _mm512_castsi512_ps(_mm512_slli_epi32(w1, 16));
            const __m512 odd0 = _mm512_castsi512_ps(_mm512_and_si512(w0, upper));
            const __m512 odd1 = _mm512_castsi512_ps(_mm512_and_si512(w1, upper));
            for (int r = 0; r < ROWS; r++) {
                const float* values = reinterpret_cast<const float*>(x + r * stride) + 2 * i;
                const __m512 first = _mm512_set1_ps(values[0]), second = _mm512_set1_ps(values[1]);
                total[r][0] = _mm512_fmadd_ps(second, odd0, _mm512_fmadd_ps(first, even0, total[r][0]));
                total[r][1] = _mm512_fmadd_ps(second, odd1, _mm512_fmadd_ps(first, even1, total[r][1]));
            }
        }
    } else if constexpr (KIND == BFLOAT16) {
        for (int64_t i = 0; i < pairs; i++, w += 128, ahead += step) {
            _mm_prefetch(ahead, _MM_HINT_T0);
            _mm_prefetch(ahead + 64, _MM_HINT_T0);
            const __m512bh w0 = (__m512bh)load(w), w1 = (__m512bh)load(w + 64);
            for (int r = 0; r < ROWS; r++) {
                const __m512bh values = (__m512bh)_mm512_set1_epi32(pair_at(x + r * stride, i));
                total[r][0] = _mm512_dpbf16_ps(total[r][0], values, w0);
                total[r][1] = _mm512_dpbf16_ps(total[r][1], values, w1);
            }
        }
    }
    for (int r = 0; r < ROWS; r++) {
        _mm512_storeu_ps(sums[r], total[r][0]);
        _mm512_storeu_ps(sums[r] + 16, total[r][1]);
    }
}

template <int KIND>
static int64_t product_of_rows(const char* x, int64_t stride, int64_t rows, const char* w, int64_t inputs,
                               const char* ahead, int64_t step, float (*sums)[COLUMNS]) {
    if (rows >= TILE)
        return product<KIND, TILE>(x, stride, w, inputs, ahead, step, sums), TILE;
    if (rows >= 8)
        return product<KIND, 8>(x, stride, w, inputs, ahead, step, sums), 8;
    if (rows >= 4)
        return product<KIND, 4>(x, stride, w, inputs, ahead, step, sums), 4;
    if (rows >= 2)
        return product<KIND, 2>(x, stride, w, inputs, ahead, step, sums), 2;
    return product<KIND, 1>(x, stride, w, inputs, ahead, step, sums), 1;
}

// use(row, column, values (n,)) for x (rows, inputs), as convert_row writes it, times a block, plus the bias.
template <class Use>
static void multiply_block(const Matrix& m, const char* x, int64_t rows, int64_t block, const Use& use) {
    const int64_t stride = row_bytes(m.kind, m.inputs), column = block * COLUMNS;
    const int64_t n = std::min(COLUMNS, m.outputs - column);
    const int64_t bytes = m.block_bytes(), read_at_once = m.kind == INT8 ? 64 : 128;
    const char* w = m.weight + block * bytes;
    const char* next = w + omp_get_num_threads() * bytes;  // the block that this thread will probably take
    const bool asks_for_next = rows >= 2 * TILE;
    const int64_t step = asks_for_next ? read_at_once * TILE / rows + 1 : read_at_once;
    alignas(64) float sums[TILE][COLUMNS];
    for (int64_t row = 0, done; row < rows; row += done) {
        const char* first = x + row * stride;
        // The weights of few rows come while these are computed. Of many rows, each tile asks for a share.
        const char* ahead = asks_for_next ? next + row * bytes / rows : w + AHEAD;
        const auto multiply_rows = m.kind == FLOAT32    ? product_of_rows<FLOAT32>
                                   : m.kind == WIDENED  ? product_of_rows<WIDENED>
                                   : m.kind == BFLOAT16 ? product_of_rows<BFLOAT16>
                                                        : product_of_rows<INT8>;
        done = multiply_rows(first, stride, rows - row, w, m.inputs, ahead, step, sums);
        for (int64_t r = 0; r < done; r++) {
            if (m.kind == INT8)
                for (int64_t i = 0; i < COLUMNS; i++)
                    sums[r][i] *= m.scale[column + i];
            if (m.bias)
                for (int64_t i = 0; i < n; i++)
                    sums[r][i] += m.bias[column + i];
            use(row + r, column, sums[r], n);
        }
    }
}

// out (inputs,) = the weights of one output of a matrix.
static void unpack_output(const Matrix& m, int64_t output, float* out) {
    const char* block = m.weight + output / COLUMNS * m.block_bytes();
    const int64_t column = output % COLUMNS;
    for (int64_t i = 0; i < m.inputs; i++) {
        const int64_t place = (i / 2 * COLUMNS + column) * 2 + i % 2;
        if (m.kind == FLOAT32) {
            out[i] = reinterpret_cast<const float*>(block)[i * COLUMNS + column];
        } else if (m.kind == INT8) {
            out[i] = reinterpret_cast<const int8_t*>(block)[place] * m.scale[output];
        } else {
            const uint32_t bits = reinterpret_cast<const uint16_t*>(block)[place] << 16;
            std::memcpy(out + i, &bits, 4);
        }
    }
}

// A `use` of multiply_block: write the results to out (rows, width).
static auto store(float* out, int64_t width) {
    return [=](int64_t row, int64_t column, const float* values, int64_t n) {
        std::memcpy(out + row * width + column, values, n * 4);
    };
}

// A `use` of multiply_block: add `scale` times the results to out (rows, width). What it reads is copied: the
// compiler uses no vectors if `out` may point to it.
static auto add_scaled(float* out, int64_t width, float scale) {
    return [=](int64_t row, int64_t column, const float* values, int64_t n) {
        float* to = out + row * width + column;
        for (int64_t i = 0; i < n; i++)
            to[i] += scale * values[i];
    };
}

// --- the parts of a block --------------------------------------------------------------------------------

struct Norm {
    enum : int64_t { NONE, RMS, LAYER };
    const float* weight;  // null: all ones
    const float* bias;
    double eps;
    int64_t form;

    // y (n,) = the norm of x (n,); y may be x.
    void apply(const float* x, int64_t n, float* y) const {
        if (form == NONE) {
            if (y != x)
                std::memcpy(y, x, n * 4);
            return;
        }
        float mean = 0.0f, square = 0.0f;
        if (form == LAYER) {
            for (int64_t i = 0; i < n; i++)
                mean += x[i];
            mean /= n;
        }
        for (int64_t i = 0; i < n; i++)
            square += (x[i] - mean) * (x[i] - mean);
        const float factor = 1.0f / std::sqrt(square / n + static_cast<float>(eps));
        for (int64_t i = 0; i < n; i++) {
            const float value = (x[i] - mean) * factor * (weight ? weight[i] : 1.0f);
            y[i] = bias ? value + bias[i] : value;
        }
    }
};

enum Form : int64_t { GELU, GELU_TANH, RELU2, SWIGLU, GEGLU };

template <class Function>
static void activate_by(const Function& function, float* h, const float* gate, int64_t n) {
    if (gate)
        for (int64_t i = 0; i < n; i++)
            h[i] *= function(gate[i]);
    else
        for (int64_t i = 0; i < n; i++)
            h[i] = function(h[i]);
}

// h (n,) = the activation of h, or that of gate times h.
static void activate(int64_t form, float* h, const float* gate, int64_t n) {
    constexpr float root = 0.79788456f;  // sqrt(2 / pi)
    auto gelu = [](float x) { return 0.5f * x * (1.0f + erf_of(x * 0.70710678f)); };
    auto gelu_tanh = [](float x) { return 0.5f * x * (1.0f + tanh_of(root * (x + 0.044715f * x * x * x))); };
    auto relu2 = [](float x) { return x > 0.0f ? x * x : (x <= 0.0f ? 0.0f : x); };  // NaN stays NaN
    auto silu = [](float x) { return x / (1.0f + exp_of(-x)); };
    if (form == GELU)
        activate_by(gelu, h, gate, n);
    else if (form == RELU2)
        activate_by(relu2, h, gate, n);
    else if (form == SWIGLU)
        activate_by(silu, h, gate, n);
    else
        activate_by(gelu_tanh, h, gate, n);
}

struct Layer {
    Matrix q, k, v, proj, fc, gate, out;
    Norm before_attention, after_attention, before_mlp, after_mlp, q_norm, k_norm, q_norm_all, k_norm_all;
    const float *cos, *sin;  // (positions, rotated / 2) or null
    int64_t window;          // positions that a query sees; 0 = all before it
};

// The keys and values of a layer: (rows, G, slots, D), with D contiguous. Position p is in slot p % slots.
struct Stored {
    float *keys, *values;
    int64_t row_stride, head_stride, slot_stride, slots;
};

struct Model {
    const Layer* layers;
    Norm final_norm;
    Matrix head;
    const float* embedding;  // (vocabulary, width), or null if they are the weights of the head
    const float* positions;  // (positions, width) or null
    int64_t n_layer, width, n_head, n_kv_head, head_width, hidden, rotated, form, is_parallel, block_size;
    double embedding_scale, residual_scale, q_scale, attention_softcap, logit_scale, softcap;
};

static int64_t n_phases(const Model& m) {
    return m.n_layer * 9 + 2;
}

// Floats that each thread needs for `attend`: scores of all positions, and a query, a key and a sum.
static int64_t attend_size(const Model& m) {
    return round_up(m.block_size + 3 * m.head_width, 16);
}

// Where a step keeps what it computes: of each row, offsets in bytes from the start of the scratch memory.
struct Places {
    int64_t x, sum, q, k, v, y, h, input, input_of_mlp, scores, of_block, phases, bytes;

    Places(const Model& m, int64_t rows, int64_t n_threads) {
        const int64_t kind = m.head.kind;
        const int64_t q_width = m.n_head * m.head_width, kv_width = m.n_kv_head * m.head_width;
        const int64_t widest = std::max({m.width, q_width, m.hidden});
        bytes = 0;
        auto take = [&](int64_t size) {
            const int64_t place = bytes;
            bytes += round_up(size, 64);
            return place;
        };
        x = take(rows * m.width * 4);
        sum = take(rows * m.width * 4);
        q = take(rows * q_width * 4);
        k = take(rows * kv_width * 4);
        v = take(rows * kv_width * 4);
        y = take(rows * q_width * 4);
        h = take(rows * m.hidden * 4);
        input = take(rows * row_bytes(kind, widest));
        input_of_mlp = take(rows * row_bytes(kind, m.width));
        phases = take(n_phases(m) * sizeof(Phase));
        scores = take(n_threads * attend_size(m) * 4);
        of_block = take(n_threads * rows * COLUMNS * 4);
    }
};

static float dot(const float* a, const float* b, int64_t n) {
    float sum = 0.0f;
    for (int64_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

// Rotate pairs (i, i + R / 2) of the first R features, as kilogpt/layers/rope.py does.
static void rotate(float* x, const float* cos, const float* sin, int64_t R) {
    for (int64_t i = 0; i < R / 2; i++) {
        const float first = x[i], second = x[i + R / 2];
        x[i] = first * cos[i] - second * sin[i];
        x[i + R / 2] = second * cos[i] + first * sin[i];
    }
}

// A head of queries or keys, after its norms and its rotation: out (D,) of head `head` of row (heads * D,).
static void finish_head(const Model& m, const Layer& layer, const float* row, int64_t heads, int64_t head,
                        const Norm& over_all, const Norm& norm, int64_t position, float* out) {
    const int64_t D = m.head_width;
    const float* x = row + head * D;
    if (over_all.form) {
        const float mean = dot(row, row, heads * D) / (heads * D);
        const float factor = 1.0f / std::sqrt(mean + static_cast<float>(over_all.eps));
        for (int64_t i = 0; i < D; i++)
            out[i] = x[i] * factor * over_all.weight[head * D + i];
        x = out;
    }
    norm.apply(x, D, out);
    const int64_t place = position * (m.rotated / 2);
    if (layer.cos)
        rotate(out, layer.cos + place, layer.sin + place, m.rotated);
}

// y (D,) = what one head of one new token attends to. k, v: rows of the new token, which the cache gets too.
// first: the first position that the query sees. position: in its document. scratch: attend_size floats.
static void attend(const Model& m, const Layer& layer, const Stored& stored, int64_t head, int64_t cache_row,
                   int64_t newest, int64_t first, int64_t position, const float* q_row, const float* k_row,
                   const float* v_row, float* y, float* scratch) {
    const int64_t D = m.head_width, per_group = m.n_head / m.n_kv_head, group = head / per_group;
    float *scores = scratch, *q = scratch + m.block_size, *k = q + D, *sum = k + D;
    const float* v = v_row + group * D;
    finish_head(m, layer, q_row, m.n_head, head, layer.q_norm_all, layer.q_norm, position, q);
    finish_head(m, layer, k_row, m.n_kv_head, group, layer.k_norm_all, layer.k_norm, position, k);
    float* keys = stored.keys + cache_row * stored.row_stride + group * stored.head_stride;
    float* values = stored.values + cache_row * stored.row_stride + group * stored.head_stride;
    if (head % per_group == 0) {  // other heads of the group read the new key from their own copy
        const int64_t place = newest % stored.slots * stored.slot_stride;
        std::memcpy(keys + place, k, D * 4);
        std::memcpy(values + place, v, D * 4);
    }
    const float scale = static_cast<float>(m.q_scale / std::sqrt(static_cast<double>(D)));
    const float softcap = static_cast<float>(m.attention_softcap);
    const int64_t seen = newest - first;  // positions before the new one
    // A layer with a window keeps positions in a ring, which is read as two runs of slots.
    const int64_t begin = first % stored.slots, before_end = std::min(seen, stored.slots - begin);
    auto slot_of = [&](int64_t i) { return i < before_end ? begin + i : i - before_end; };
    auto value_at = [&](int64_t i) { return values + slot_of(i) * stored.slot_stride; };
    for (int64_t i = 0; i < seen; i++)
        scores[i] = dot(q, keys + slot_of(i) * stored.slot_stride, D) * scale;
    scores[seen] = dot(q, k, D) * scale;
    if (softcap > 0.0f)
        for (int64_t i = 0; i <= seen; i++)
            scores[i] = softcap * tanh_of(scores[i] / softcap);
    float largest = scores[0];
    for (int64_t i = 1; i <= seen; i++)
        largest = std::max(largest, scores[i]);
    float total = 0.0f;
    for (int64_t i = 0; i <= seen; i++) {
        scores[i] = exp_of(scores[i] - largest);
        total += scores[i];
    }
    for (int64_t d = 0; d < D; d++)
        sum[d] = scores[seen] * v[d];
    int64_t i = 0;
    for (; i + 4 <= seen; i += 4) {
        const float *v0 = value_at(i), *v1 = value_at(i + 1), *v2 = value_at(i + 2), *v3 = value_at(i + 3);
        const float p0 = scores[i], p1 = scores[i + 1], p2 = scores[i + 2], p3 = scores[i + 3];
        for (int64_t d = 0; d < D; d++)
            sum[d] += p0 * v0[d] + p1 * v1[d] + p2 * v2[d] + p3 * v3[d];
    }
    for (; i < seen; i++) {
        const float* value = value_at(i);
        for (int64_t d = 0; d < D; d++)
            sum[d] += scores[i] * value[d];
    }
    for (int64_t d = 0; d < D; d++)
        y[d] = sum[d] / total;
}

// Write n units of a column of a block: a number each, or two of fewer bits. value(i): the numbers, i < 32.
template <class Unit, class Value>
static void write_column(char* block, int64_t first, int64_t column, int64_t n, const Value& value) {
    using Number = decltype(value(0));
    alignas(64) Number numbers[32];
    for (int64_t i = 0; i < 32; i++)
        numbers[i] = value(i);
    const Unit* units = reinterpret_cast<const Unit*>(numbers);
    for (int64_t i = 0; i < n; i++)
        reinterpret_cast<Unit*>(block)[(first + i) * COLUMNS + column] = units[i];
}

// --- what Python calls -----------------------------------------------------------------------------------

extern "C" {

int64_t matrix_bytes(const Matrix* m) {
    return m->blocks() * m->block_bytes();
}

int64_t input_bytes(int64_t kind, int64_t inputs) {
    return row_bytes(kind, inputs);
}

// Fill m->weight, and for INT8 m->scale, from source (outputs, inputs) in float32. Rows are contiguous.
void pack_matrix(const Matrix* m, const float* source, int n_threads) {
    const int64_t inputs = m->inputs;
    Phase phases[1];
    in_threads(n_threads, phases, 1, [&](Worker worker) {
        worker.share(m->blocks(), [&](int64_t block) {
            char* out = const_cast<char*>(m->weight) + block * m->block_bytes();
            const float* first = source + block * COLUMNS * inputs;
            const int64_t columns = std::min(COLUMNS, m->outputs - block * COLUMNS);
            float factors[COLUMNS] = {};
            std::memset(out, 0, m->block_bytes());
            if (m->kind == INT8) {
                for (int64_t c = 0; c < columns; c++) {
                    float largest = 1e-12f;
                    for (int64_t i = 0; i < inputs; i++)
                        largest = std::max(largest, std::fabs(first[c * inputs + i]));
                    const_cast<float*>(m->scale)[block * COLUMNS + c] = largest / 127.0f;
                    factors[c] = 127.0f / largest;
                }
            }
            for (int64_t begin = 0; begin < inputs; begin += 32) {  // a part of `out` that stays in the cache
                const int64_t n = std::min<int64_t>(32, inputs - begin);
                for (int64_t c = 0; c < columns; c++) {
                    alignas(64) float row[32] = {};
                    std::memcpy(row, first + c * inputs + begin, n * 4);
                    if (m->kind == FLOAT32)
                        write_column<uint32_t>(out, begin, c, n, [&](int64_t i) { return row[i]; });
                    else if (m->kind == INT8)
                        write_column<uint16_t>(out, begin / 2, c, (n + 1) / 2, [&](int64_t i) {
                            return static_cast<int8_t>(std::lrint(row[i] * factors[c]));
                        });
                    else
                        write_column<uint32_t>(out, begin / 2, c, (n + 1) / 2,
                                               [&](int64_t i) { return bits_of(row[i]); });
                }
            }
        });
    });
}

// rows (n, inputs) = the weights of these outputs.
void unpack_outputs(const Matrix* m, const int64_t* outputs, int64_t n, float* rows) {
    for (int64_t i = 0; i < n; i++)
        unpack_output(*m, outputs[i], rows + i * m->inputs);
}

// y (rows, outputs) = x (rows, inputs) times the matrix, plus its bias. scratch: rows * input_bytes.
void multiply(const Matrix* m, const float* x, int64_t rows, float* y, char* scratch, int n_threads) {
    Phase phases[2];
    in_threads(n_threads, phases, 2, [&](Worker worker) {
        const int64_t stride = row_bytes(m->kind, m->inputs);
        worker.share(rows, [&](int64_t row) {
            convert_row(m->kind, x + row * m->inputs, m->inputs, scratch + row * stride);
        });
        worker.share(m->blocks(), [&](int64_t block) {
            multiply_block(*m, scratch, rows, block, store(y, m->outputs));
        });
    });
}

int64_t scratch_bytes(const Model* model, int64_t rows, int n_threads) {
    return Places(*model, rows, n_threads).bytes;
}

// logits (rows, vocab_size) of one new token of each of `rows` texts.
// cache_rows: the row of the cache of each text. newest: the position of the new token in its row. starts:
// the position at which its document begins there, from which RoPE and learned embeddings count positions.
void step(const Model* model, const Stored* cache, int64_t rows, const int64_t* tokens,
          const int64_t* cache_rows, const int64_t* newest, const int64_t* starts, float* logits,
          int64_t vocab_size, char* scratch, int n_threads) {
    const Model& m = *model;
    const Places places(m, rows, n_threads);
    auto floats = [&](int64_t place) { return reinterpret_cast<float*>(scratch + place); };
    float *x = floats(places.x), *sum = floats(places.sum), *q = floats(places.q), *k = floats(places.k);
    float *v = floats(places.v), *y = floats(places.y), *h = floats(places.h);
    char *input = scratch + places.input, *input_of_mlp = scratch + places.input_of_mlp;
    const int64_t C = m.width, D = m.head_width, q_width = m.n_head * D, kv_width = m.n_kv_head * D;
    const int64_t kind = m.head.kind;
    const float residual_scale = static_cast<float>(m.residual_scale);

    Phase* phases = reinterpret_cast<Phase*>(scratch + places.phases);
    in_threads(n_threads, phases, n_phases(m), [&](Worker worker) {
        float* scores = floats(places.scores) + omp_get_thread_num() * attend_size(m);
        float* of_block = floats(places.of_block) + omp_get_thread_num() * rows * COLUMNS;

        // Add what a part gives to the residual stream, or keep it in `sum` if a norm comes between.
        auto add = [&](const Matrix& matrix, const char* in, const Norm& norm) {
            worker.share(matrix.blocks(), [&](int64_t block) {
                if (norm.form)
                    return multiply_block(matrix, in, rows, block, store(sum, C));
                multiply_block(matrix, in, rows, block, add_scaled(x, C, residual_scale));
            });
        };
        auto add_after_norm = [&](int64_t row, const Norm& norm) {
            if (!norm.form)
                return;
            norm.apply(sum + row * C, C, sum + row * C);
            for (int64_t i = 0; i < C; i++)
                x[row * C + i] += residual_scale * sum[row * C + i];
        };
        auto convert_norm = [&](int64_t row, const Norm& norm, char* out) {
            if (norm.form) {
                norm.apply(x + row * C, C, sum + row * C);
                convert_row(kind, sum + row * C, C, out + row * row_bytes(kind, C));
            } else {
                convert_row(kind, x + row * C, C, out + row * row_bytes(kind, C));
            }
        };

        for (int64_t number = 0; number < m.n_layer; number++) {
            const Layer& layer = m.layers[number];
            worker.share(rows, [&](int64_t row) {
                float* x_row = x + row * C;
                if (number == 0) {
                    if (m.embedding)
                        std::memcpy(x_row, m.embedding + tokens[row] * C, C * 4);
                    else
                        unpack_output(m.head, tokens[row], x_row);
                    for (int64_t i = 0; i < C; i++)
                        x_row[i] *= static_cast<float>(m.embedding_scale);
                    if (m.positions)
                        for (int64_t i = 0; i < C; i++)
                            x_row[i] += m.positions[(newest[row] - starts[row]) * C + i];
                } else {
                    add_after_norm(row, m.layers[number - 1].after_mlp);
                }
                if (m.is_parallel)
                    convert_norm(row, layer.before_mlp, input_of_mlp);
                convert_norm(row, layer.before_attention, input);
            });
            const int64_t of_q = layer.q.blocks(), of_k = layer.k.blocks();
            worker.share(of_q + of_k + layer.v.blocks(), [&](int64_t block) {
                if (block < of_q)
                    multiply_block(layer.q, input, rows, block, store(q, q_width));
                else if (block < of_q + of_k)
                    multiply_block(layer.k, input, rows, block - of_q, store(k, kv_width));
                else
                    multiply_block(layer.v, input, rows, block - of_q - of_k, store(v, kv_width));
            });
            worker.share(rows * m.n_head, [&](int64_t task) {
                const int64_t row = task / m.n_head, head = task % m.n_head;
                const int64_t of_window = layer.window ? newest[row] - layer.window + 1 : 0;
                attend(m, layer, cache[number], head, cache_rows[row], newest[row],
                       std::max(starts[row], of_window), newest[row] - starts[row], q + row * q_width,
                       k + row * kv_width, v + row * kv_width, y + row * q_width + head * D, scores);
            });
            worker.share(rows, [&](int64_t row) {
                convert_row(kind, y + row * q_width, q_width, input + row * row_bytes(kind, q_width));
            });
            add(layer.proj, input, layer.after_attention);
            if (!m.is_parallel || layer.after_attention.form)
                worker.share(rows, [&](int64_t row) {
                    add_after_norm(row, layer.after_attention);
                    if (!m.is_parallel)
                        convert_norm(row, layer.before_mlp, input_of_mlp);
                });
            worker.share(layer.fc.blocks(), [&](int64_t block) {
                // Rows of a block lie together here. In h, many of them would take the same place of L1.
                auto keep = [&](int64_t row, int64_t column, const float* values, int64_t n) {
                    std::memcpy(of_block + row * COLUMNS, values, n * 4);
                };
                auto activate_row = [&](int64_t row, int64_t column, const float* gate, int64_t n) {
                    activate(m.form, of_block + row * COLUMNS, gate, n);
                    std::memcpy(h + row * m.hidden + column, of_block + row * COLUMNS, n * 4);
                };
                auto activate_alone = [&](int64_t row, int64_t column, float* values, int64_t n) {
                    activate(m.form, values, nullptr, n);
                    std::memcpy(h + row * m.hidden + column, values, n * 4);
                };
                if (!layer.gate.weight)
                    return multiply_block(layer.fc, input_of_mlp, rows, block, activate_alone);
                multiply_block(layer.fc, input_of_mlp, rows, block, keep);
                multiply_block(layer.gate, input_of_mlp, rows, block, activate_row);
            });
            worker.share(rows, [&](int64_t row) {
                convert_row(kind, h + row * m.hidden, m.hidden, input + row * row_bytes(kind, m.hidden));
            });
            add(layer.out, input, layer.after_mlp);
        }
        worker.share(rows, [&](int64_t row) {
            add_after_norm(row, m.layers[m.n_layer - 1].after_mlp);
            convert_norm(row, m.final_norm, input);
        });
        const float logit_scale = static_cast<float>(m.logit_scale), softcap = static_cast<float>(m.softcap);
        worker.share((vocab_size + COLUMNS - 1) / COLUMNS, [&](int64_t block) {
            auto cap = [&](int64_t row, int64_t column, float* values, int64_t n) {
                n = std::min(n, vocab_size - column);
                for (int64_t i = 0; i < n; i++) {
                    values[i] *= logit_scale;
                    if (softcap > 0.0f)
                        values[i] = softcap * tanh_of(values[i] / softcap);
                }
                std::memcpy(logits + row * vocab_size + column, values, n * 4);
            };
            multiply_block(m.head, input, rows, block, cap);
        });
    });
}
}
