// What the kernels for packed weights share: the weight, the job, stores, scratch memory, a thread's share.
// The layout is drawn in linear.cpp. Included by few_rows.h, many_rows.h and pack.h.

#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kLanes = 16;  // outputs in a panel, rows in a row tile
constexpr int kBlock = 32;  // values of K in a block

inline int64_t block_bytes(int bits) { return kLanes * kBlock * bits / 8; }

// Mirrors `_Weight` in ops/cpu/linear.py.
struct Weight {
    const uint8_t* data;
    const void* scales;
    const void* mins;  // null: none
    int32_t n, k, bits, group, zero;
    int32_t wide_scales;  // 1: scales and mins are float32, 0: float16
    int32_t few_rows;     // up to this many rows take the path for few rows
};

struct Job {
    const uint16_t* x;  // [rows, k] bf16
    void* out;          // [rows, n] float32 or bf16
    const float* bias;  // [n] or null
    int32_t rows, out_is_f32;
};

inline __m512 load_scales(const void* base, int64_t idx, bool wide) {
    return wide ? _mm512_loadu_ps(static_cast<const float*>(base) + idx)
                : _mm512_cvtph_ps(_mm256_loadu_si256(
                      reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(base) + idx)));
}

inline __m512 add_bias(const Job& job, int64_t first, __mmask16 mask, __m512 values) {
    return job.bias ? _mm512_add_ps(values, _mm512_maskz_loadu_ps(mask, job.bias + first)) : values;
}

inline void store_outputs(const Weight& w, const Job& job, int row, int panel, __m512 values) {
    const int64_t first = int64_t(panel) * kLanes, at = row * int64_t(w.n) + first;
    const int num = std::min<int64_t>(kLanes, w.n - first);
    const __mmask16 mask = (1u << num) - 1;
    values = add_bias(job, first, mask, values);
    if (job.out_is_f32)
        _mm512_mask_storeu_ps(static_cast<float*>(job.out) + at, mask, values);
    else
        _mm256_mask_storeu_epi16(static_cast<uint16_t*>(job.out) + at, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

// Two panels side by side: whole cache lines of bf16.
inline void store_pair(const Weight& w, const Job& job, int row, int panel, __m512 left, __m512 right) {
    const int64_t first = int64_t(panel) * kLanes;
    if (job.out_is_f32 || first + 2 * kLanes > w.n) {
        store_outputs(w, job, row, panel, left);
        if (first + kLanes < w.n) store_outputs(w, job, row, panel + 1, right);
        return;
    }
    left = add_bias(job, first, 0xffff, left), right = add_bias(job, first + kLanes, 0xffff, right);
    _mm512_storeu_si512(static_cast<uint16_t*>(job.out) + row * int64_t(w.n) + first,
                        (__m512i)_mm512_cvtne2ps_pbh(right, left));
}

// Per-thread memory that only grows: kernels run thousands of times per second and must not allocate.
struct Scratch {
    void* memory = nullptr;
    size_t size = 0;
    ~Scratch() { std::free(memory); }
    void* get(size_t bytes) {
        if (bytes > size) {
            std::free(memory);
            size = (bytes + 4095) / 4096 * 4096;
            memory = std::aligned_alloc(4096, size);
        }
        return memory;
    }
};
thread_local Scratch rows_scratch, panel_scratch;

struct Range {
    int begin, end;
};

inline Range my_share(int total) {
    const int threads = omp_get_num_threads(), me = omp_get_thread_num();
    return {int(int64_t(total) * me / threads), int(int64_t(total) * (me + 1) / threads)};
}

}  // namespace
