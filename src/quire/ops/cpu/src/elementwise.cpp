// Fused elementwise kernels for float32 and bfloat16: norm with residual, gated SiLU, norm and rotation of heads with
// the write into the cache.
// Called through ctypes by ops/elementwise/cpu.py; the torch twins in ops/elementwise/reference.py say what each computes.
// Rows are contiguous and may be strided apart (strides in elements). Small inputs stay on the calling thread.
#include "kv_layout.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

namespace {

// Below this many elements, waking the other threads costs more than they save.
constexpr int64_t PARALLEL_ELEMENTS = 1 << 15;
// What a thread takes at a time.
constexpr int64_t CLAIMED_ELEMENTS = 1 << 12;

struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
};

// Calls f(row) for all rows of about n elements each, on all threads if that pays. Each has its share of the rows, the same
// in every call, so that it finds in its cache what it wrote there; as cores differ in speed, who is done helps the others.
template <class F>
void for_rows(int64_t rows, int64_t n, F f) {
    if (rows * n <= PARALLEL_ELEMENTS) {
        for (int64_t row = 0; row < rows; row++) f(row);
        return;
    }
    static thread_local std::vector<Share> kept;
    const int num_shares = omp_get_max_threads();
    if ((int)kept.size() < num_shares) kept = std::vector<Share>(num_shares);
    Share* const shares = kept.data();  // the caller's, in all threads
    for (int i = 0; i < num_shares; i++) {
        shares[i].next = rows * i / num_shares;
        shares[i].end = rows * (i + 1) / num_shares;
    }
    const int64_t at_once = std::max<int64_t>(1, CLAIMED_ELEMENTS / n);
#pragma omp parallel
    for (int i = 0, own = omp_get_thread_num(); i < num_shares; i++) {
        Share& share = shares[(own + i) % num_shares];
        for (int64_t row; (row = share.next.fetch_add(at_once)) < share.end;)
            for (const int64_t end = std::min(row + at_once, share.end); row < end; row++) f(row);
    }
}

// Sum of squares of x, or of x + residual, which goes to `sum`.
template <class T>
float sum_of_squares(T* sum, const T* x, const T* residual, int64_t n) {
    v16 squares[4] = {};
    int64_t i = 0;
    auto add = [&](v16& to, int64_t at) {
        v16 part = load(x + at);
        if (residual) part = store_rounded(sum + at, part + load(residual + at));
        to = fma(part, part, to);
    };
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int j = 0; j < 4; j++) add(squares[j], i + j * LANES);
    for (; i + LANES <= n; i += LANES) add(squares[0], i);
    float total = horizontal_sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (; i < n; i++) {
        float part = load1(x + i);
        if (residual) {
            store1(sum + i, part + load1(residual + i));
            part = load1(sum + i);
        }
        total += part * part;
    }
    return total;
}

template <class T>
void norm_row(T* out, const T* x, const T* weight, float inverse, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        // Rounded before the weight: see the twin.
        store(out + i, rounded(load(x + i) * inverse, x) * load(weight + i));
    }
    for (; i < n; i++) {
        store1(out + i, load1(x + i) * inverse);
        store1(out + i, load1(out + i) * load1(weight + i));
    }
}

template <class T>
void rms_norm(T* out, T* sum, const T* x, int64_t stride, const T* residual, const T* weight, int64_t rows, int64_t n,
              float eps) {
    for_rows(rows, n, [&](int64_t row) {
        const T* in = x + row * stride;
        float squares = sum_of_squares(sum + row * n, in, residual ? residual + row * n : nullptr, n);
        norm_row(out + row * n, residual ? sum + row * n : in, weight, 1.0f / std::sqrt(squares / (float)n + eps), n);
    });
}

template <class T>
void add(T* out, const T* x, const T* y, int64_t rows, int64_t n) {
    for_rows(rows, n, [&](int64_t row) {
        int64_t i = row * n;
        const int64_t end = i + n;
        for (; i + LANES <= end; i += LANES) store(out + i, load(x + i) + load(y + i));
        for (; i < end; i++) store1(out + i, load1(x + i) + load1(y + i));
    });
}

template <class T>
void silu_mul(T* out, const T* x, int64_t rows, int64_t n) {
    for_rows(rows, n, [&](int64_t row) {
        const T *gate = x + row * 2 * n, *up = gate + n;
        T* to = out + row * n;
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES) {
            v16 g = load(gate + i);
            v16 silu = g * reciprocal(1.0f + exp2(min(g * -1.442695041f, splat(126.0f))));
            store(to + i, rounded(silu, gate) * load(up + i));
        }
        for (; i < n; i++) {
            float g = load1(gate + i);
            store1(to + i, g / (1.0f + std::exp(-g)));
            store1(to + i, load1(to + i) * load1(up + i));
        }
    });
}

template <class T>
void rotate(T* head, const float* cos, int64_t rot_dim, bool interleaved) {
    const int64_t half = rot_dim / 2;
    const float* sin = cos + half;
    const int64_t apart = interleaved ? 1 : half, step = interleaved ? 2 : 1;
    int64_t i = 0;
    for (; !interleaved && i + LANES <= half; i += LANES) {
        v16 x1 = load(head + i), x2 = load(head + half + i), c = load(cos + i), s = load(sin + i);
        store(head + i, fma(x1, c, -(x2 * s)));
        store(head + half + i, fma(x2, c, x1 * s));
    }
    for (; i < half; i++) {
        float x1 = load1(head + i * step), x2 = load1(head + i * step + apart);
        store1(head + i * step, x1 * cos[i] - x2 * sin[i]);
        store1(head + i * step + apart, x2 * cos[i] + x1 * sin[i]);
    }
}

struct RopeArgs {
    void *q, *k;
    const void *v, *q_norm, *k_norm;  // norms: weights over a head, or null
    const float* cos_sin;
    const int64_t *positions, *slots;
    char* cache;
    float* scales;            // of a cache of codes
    const float* key_center;  // is subtracted from keys before they are rounded; or null
    int64_t num_tokens, num_heads, num_kv_heads, head_size, rot_dim, q_stride, k_stride, v_stride;
    int64_t block_size, block_stride, scales_stride;
    bool interleaved;
    float eps;
    float fixed_scales[2];
};

// All heads of one token: normed if there is a weight, then rotated.
template <class T>
void turn_heads(T* head, int64_t num_heads, const T* norm, const float* cos, const RopeArgs& a) {
    for (const T* end = head + num_heads * a.head_size; head < end; head += a.head_size) {
        if (norm) {
            float squares = sum_of_squares<T>(nullptr, head, nullptr, a.head_size);
            norm_row(head, head, norm, 1.0f / std::sqrt(squares / (float)a.head_size + a.eps), a.head_size);
        }
        rotate(head, cos, a.rot_dim, a.interleaved);
    }
}

// Moves all heads of one token.
template <class T>
void subtract(T* x, const float* center, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) store(x + i, load(x + i) - load(center + i));
}

// Where runs of tokens begin: a whole chunk of the cache, or one token.
void find_runs(std::vector<int64_t>& starts, const RopeArgs& a) {
    starts.clear();
    for (int64_t t = 0; t < a.num_tokens; t++) {
        starts.push_back(t);
        if (a.slots[t] % CHUNK || t + CHUNK > a.num_tokens) continue;
        int64_t n = 1;
        while (n < CHUNK && a.slots[t + n] == a.slots[t] + n) n++;
        if (n == CHUNK) t += CHUNK - 1;
    }
    starts.push_back(a.num_tokens);
}

template <class E>
void rope_and_write(const RopeArgs& a) {
    using Elem = typename E::Elem;
    const KvLayout<E> layout{a.num_kv_heads, a.head_size, a.block_size, a.block_stride};
    static thread_local std::vector<int64_t> kept;
    std::vector<int64_t>& starts = kept;  // the caller's, in all threads
    find_runs(starts, a);
    const int64_t num_runs = starts.size() - 1, work = a.num_tokens * (a.num_heads + a.num_kv_heads) * a.head_size;
    for_rows(num_runs, work / std::max<int64_t>(1, num_runs), [&](int64_t run) {
        const int64_t first = starts[run], end = starts[run + 1];
        Elem *q = (Elem*)a.q + first * a.q_stride, *k = (Elem*)a.k + first * a.k_stride;
        const Elem* v = (const Elem*)a.v + first * a.v_stride;
        const bool write = a.slots[first] >= 0;
        for (int64_t t = 0; t < end - first; t++) {
            const float* cos = a.cos_sin + a.positions[first + t] * a.rot_dim;
            turn_heads(q + t * a.q_stride, a.num_heads, (const Elem*)a.q_norm, cos, a);
            turn_heads(k + t * a.k_stride, a.num_kv_heads, (const Elem*)a.k_norm, cos, a);
            if (a.key_center) subtract(k + t * a.k_stride, a.key_center, a.num_kv_heads * a.head_size);
        }
        for (int64_t h = 0; write && h < a.num_kv_heads; h++, k += a.head_size, v += a.head_size)
            if constexpr (E::IS_CODED) {
                for (int64_t t = first; t < end; t++) {
                    const int64_t block = a.slots[t] / a.block_size, offset = a.slots[t] % a.block_size;
                    layout.store_codes(a.cache, a.slots[t], h, k + (t - first) * a.k_stride, v + (t - first) * a.v_stride,
                                       a.fixed_scales, a.scales + layout.scales_at(block, a.scales_stride, h, offset));
                }
            } else if (end - first == CHUNK)
                layout.store_chunk(a.cache, a.slots[first], h, k, a.k_stride, v, a.v_stride);
            else
                layout.store_token(a.cache, a.slots[first], h, k, v);
    });
}

}  // namespace

extern "C" {

void quire_rms_norm(int bf16, void* out, void* sum, const void* x, int64_t stride, const void* residual,
                    const void* weight, int64_t rows, int64_t n, float eps) {
    if (bf16)
        rms_norm((uint16_t*)out, (uint16_t*)sum, (const uint16_t*)x, stride, (const uint16_t*)residual,
                 (const uint16_t*)weight, rows, n, eps);
    else
        rms_norm((float*)out, (float*)sum, (const float*)x, stride, (const float*)residual, (const float*)weight, rows,
                 n, eps);
}

void quire_add(int bf16, void* out, const void* x, const void* y, int64_t rows, int64_t n) {
    if (bf16)
        add((uint16_t*)out, (const uint16_t*)x, (const uint16_t*)y, rows, n);
    else
        add((float*)out, (const float*)x, (const float*)y, rows, n);
}

void quire_silu_mul(int bf16, void* out, const void* x, int64_t rows, int64_t n) {
    if (bf16)
        silu_mul((uint16_t*)out, (const uint16_t*)x, rows, n);
    else
        silu_mul((float*)out, (const float*)x, rows, n);
}

// The table's first row is that of id `first`. Rows that it does not have are zero.
void quire_embed(char* out, const char* table, const int32_t* ids, int64_t rows, int64_t row_bytes, int64_t first,
                 int64_t table_rows) {
    for (int64_t r = 0; r < rows; r++) {
        const int64_t row = ids[r] - first;
        const bool is_here = row >= 0 && row < table_rows;
        if (is_here) std::memcpy(out + r * row_bytes, table + row * row_bytes, row_bytes);
        else std::memset(out + r * row_bytes, 0, row_bytes);
    }
}

// `codes`: what the cache holds, 0 the same numbers as q, 1 int8, 2 float8.
void quire_rope_and_write(int bf16, int codes, void* q, void* k, const void* v, const float* cos_sin,
                          const int64_t* positions, const int64_t* slots, char* cache, float* scales,
                          int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_size,
                          int64_t rot_dim, int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t block_size,
                          int64_t block_stride, int64_t scales_stride, int64_t interleaved, const void* q_norm,
                          const void* k_norm, const float* key_center, float eps, float fixed_k_scale, float fixed_v_scale) {
    const RopeArgs args{q, k, v, q_norm, k_norm, cos_sin, positions, slots, cache, scales, key_center, num_tokens, num_heads,
                        num_kv_heads, head_size, rot_dim, q_stride, k_stride, v_stride, block_size, block_stride,
                        scales_stride, interleaved != 0, eps, {fixed_k_scale, fixed_v_scale}};
    constexpr void (*KERNELS[3][2])(const RopeArgs&) = {
        {rope_and_write<F32>, rope_and_write<BF16>},
        {rope_and_write<Coded<float, Int8>>, rope_and_write<Coded<uint16_t, Int8>>},
        {rope_and_write<Coded<float, Float8>>, rope_and_write<Coded<uint16_t, Float8>>},
    };
    KERNELS[codes][bf16](args);
}
}
