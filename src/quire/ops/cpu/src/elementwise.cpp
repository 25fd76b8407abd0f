// Fused elementwise kernels for float32 and bfloat16: norm with residual, gated SiLU, rotary embedding and cache write.
// Called through ctypes by ops/cpu/elementwise.py; the torch twins in ops/ref/elementwise.py say what each computes.
// Rows are contiguous and may be strided apart (strides in elements). Small inputs stay on the calling thread.
#include <cstring>
#include "kv_layout.h"

#include <cmath>

namespace {

// Below this many elements, waking the other threads costs more than they save.
constexpr int64_t PARALLEL_ELEMENTS = 1 << 15;

template <class T>
float sum_of_squares(const T* x, int64_t n) {
    v16 sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int j = 0; j < 4; j++) {
            v16 part = load(x + i + j * LANES);
            sums[j] = fma(part, part, sums[j]);
        }
    for (; i + LANES <= n; i += LANES) {
        v16 part = load(x + i);
        sums[0] = fma(part, part, sums[0]);
    }
    float sum = horizontal_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < n; i++) sum += load1(x + i) * load1(x + i);
    return sum;
}

template <class T>
void add(T* out, const T* a, const T* b, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, load(a + i) + load(b + i));
    for (; i < n; i++) store1(out + i, load1(a + i) + load1(b + i));
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
#pragma omp parallel for schedule(static) if (rows * n > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        const T* in = x + row * stride;
        if (residual) {
            add(sum + row * n, in, residual + row * n, n);
            in = sum + row * n;
        }
        norm_row(out + row * n, in, weight, 1.0f / std::sqrt(sum_of_squares(in, n) / (float)n + eps), n);
    }
}

template <class T>
void silu_mul(T* out, const T* x, int64_t rows, int64_t n) {
#pragma omp parallel for schedule(static) if (rows * n > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
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
    }
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
    const void* v;
    const float* cos_sin;
    const int64_t *positions, *slots;
    char* cache;  // null: rotate only
    int64_t num_tokens, num_heads, num_kv_heads, head_size, rot_dim, q_stride, k_stride, v_stride, block_size;
    bool interleaved;
};

template <class E>
void rope_and_write(const RopeArgs& a) {
    using Elem = typename E::Elem;
    const KvLayout<E> layout{a.num_kv_heads, a.head_size, a.block_size};
    const int64_t work = a.num_tokens * (a.num_heads + a.num_kv_heads) * a.head_size;
#pragma omp parallel for schedule(static) if (work > PARALLEL_ELEMENTS)
    for (int64_t t = 0; t < a.num_tokens; t++) {
        const float* cos = a.cos_sin + a.positions[t] * a.rot_dim;
        Elem *q = (Elem*)a.q + t * a.q_stride, *k = (Elem*)a.k + t * a.k_stride;
        const Elem* v = (const Elem*)a.v + t * a.v_stride;
        for (int64_t h = 0; h < a.num_heads; h++) rotate(q + h * a.head_size, cos, a.rot_dim, a.interleaved);
        for (int64_t h = 0; h < a.num_kv_heads; h++) {
            rotate(k + h * a.head_size, cos, a.rot_dim, a.interleaved);
            if (a.cache && a.slots[t] >= 0)
                layout.store_token(a.cache, a.slots[t], h, k + h * a.head_size, v + h * a.head_size);
        }
    }
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

void quire_silu_mul(int bf16, void* out, const void* x, int64_t rows, int64_t n) {
    if (bf16)
        silu_mul((uint16_t*)out, (const uint16_t*)x, rows, n);
    else
        silu_mul((float*)out, (const float*)x, rows, n);
}

void quire_embed(char* out, const char* table, const int32_t* ids, int64_t rows, int64_t row_bytes) {
    for (int64_t r = 0; r < rows; r++) std::memcpy(out + r * row_bytes, table + ids[r] * row_bytes, row_bytes);
}

void quire_rope_and_write(int bf16, void* q, void* k, const void* v, const float* cos_sin, const int64_t* positions,
                          const int64_t* slots, char* cache, int64_t num_tokens, int64_t num_heads,
                          int64_t num_kv_heads, int64_t head_size, int64_t rot_dim, int64_t q_stride, int64_t k_stride,
                          int64_t v_stride, int64_t block_size, int64_t interleaved) {
    RopeArgs args{q, k, v, cos_sin, positions, slots, cache, num_tokens, num_heads, num_kv_heads, head_size, rot_dim,
                  q_stride, k_stride, v_stride, block_size, interleaved != 0};
    if (bf16)
        rope_and_write<BF16>(args);
    else
        rope_and_write<F32>(args);
}
}
