// What the kernels for packed weights share: the weight, the job, stores, scratch memory, claims of work.
// The layout is drawn in linear.cpp. Included by few_rows.h, many_rows.h and pack.h.

#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "simd.h"

namespace {

// For what a loop of tile products is made of: gcc stops inlining where a template has many instances.
#define INLINE inline __attribute__((always_inline))

constexpr int kLanes = 16;  // outputs in a panel, rows in a row tile
constexpr int kBlock = 32;  // values of K in a block

inline int64_t block_bytes(int bits) { return kLanes * kBlock * bits / 8; }

// Mirrors `_Weight` in ops/packed_linear/cpu.py.
struct Weight {
    const uint8_t* data;
    const void* scales;
    const void* mins;  // null: none
    int32_t n, k, bits, group, zero;
    int32_t wide_scales;  // 1: scales and mins are float32, 0: float16
    int32_t few_rows;     // up to this many rows take the path for few rows
    int32_t shift;        // weights times 2^shift suit float16: see unpack.h
};

struct Job {
    const uint16_t* x;  // [rows, k] bf16
    void* out;          // [rows, n] float32 or bf16; gated: [rows, n / 2] bf16
    const float* bias;  // [n] or null
    int32_t rows;
    bool out_is_f32;
    bool gated;  // silu of the first half of the outputs times the second half: whole panels each, no bias
};

// Panels are computed in pairs: neighbours, or a panel of gate and its counterpart of up.
inline int num_panels(const Weight& w) { return (w.n + kLanes - 1) / kLanes; }
inline int num_pairs(const Weight& w) { return (num_panels(w) + 1) / 2; }
inline int panel_of(const Weight& w, const Job& job, int pair, int side) {
    return job.gated ? pair + side * num_pairs(w) : 2 * pair + side;
}

inline __m512 load_scales(const void* base, int64_t idx, bool wide) {
    return wide ? _mm512_loadu_ps(static_cast<const float*>(base) + idx)
                : _mm512_cvtph_ps(_mm256_loadu_si256(
                      reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(base) + idx)));
}

INLINE __m512 add_bias(const Job& job, int64_t first, __mmask16 mask, __m512 values) {
    return job.bias ? _mm512_add_ps(values, _mm512_maskz_loadu_ps(mask, job.bias + first)) : values;
}

INLINE void store_outputs(const Weight& w, const Job& job, int row, int panel, __m512 values) {
    const int64_t first = int64_t(panel) * kLanes, at = row * int64_t(w.n) + first;
    const int num = std::min<int64_t>(kLanes, w.n - first);
    const __mmask16 mask = (1u << num) - 1;
    values = add_bias(job, first, mask, values);
    if (job.out_is_f32)
        _mm512_mask_storeu_ps(static_cast<float*>(job.out) + at, mask, values);
    else
        _mm256_mask_storeu_epi16(static_cast<uint16_t*>(job.out) + at, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

// silu(gate) * up with all the roundings of separate steps (elementwise.cpp): the results are the same bits.
INLINE u16x16 silu_mul(__m512 gate, __m512 up) {
    const v16 g = widen(round_to_bf16((v16)gate)), u = widen(round_to_bf16((v16)up));
    const v16 silu = g * reciprocal(1.0f + exp2(min(g * -1.442695041f, splat(126.0f))));
    return round_to_bf16(widen(round_to_bf16(silu)) * u);
}

// A pair side by side makes whole cache lines of bf16. The right panel may lie beyond the last: not stored then.
INLINE void store_pair(const Weight& w, const Job& job, int row, int pair, __m512 left, __m512 right) {
    if (job.gated) {
        auto* out = static_cast<uint16_t*>(job.out) + row * int64_t(w.n / 2) + pair * kLanes;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)silu_mul(left, right));
        return;
    }
    const int64_t first = int64_t(pair) * 2 * kLanes;
    if (job.out_is_f32 || first + 2 * kLanes > w.n) {
        store_outputs(w, job, row, 2 * pair, left);
        if (first + kLanes < w.n) store_outputs(w, job, row, 2 * pair + 1, right);
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
    bool empty() const { return begin >= end; }
};

inline Range my_share(int total) {
    const int threads = omp_get_num_threads(), me = omp_get_thread_num();
    return {int(int64_t(total) * me / threads), int(int64_t(total) * (me + 1) / threads)};
}

// Work that threads claim piece by piece: cores are not equally fast, and halves would wait for the slower one. Each
// begins with a share of its own, so that neighbouring outputs, and the claims, stay in one core's cache. Then it helps
// others, from the end of their shares. Pieces get smaller towards the end, so that threads end together.
class Claims {
    static constexpr int kShares = 64;
    struct alignas(64) Share {
        std::atomic<uint64_t> rest;  // begin, and end in the upper half
    } shares_[kShares];
    const int num_ = std::min(omp_get_max_threads(), kShares);  // OpenMP may give fewer threads: these help with all

    static uint64_t packed(int64_t begin, int64_t end) { return uint64_t(begin) | uint64_t(end) << 32; }

   public:
    explicit Claims(int64_t total) {
        for (int i = 0; i < num_; ++i) shares_[i].rest = packed(total * i / num_, total * (i + 1) / num_);
    }
    Range take(int most) {
        for (int i = 0, me = omp_get_thread_num(); i < num_; ++i) {
            auto& share = shares_[(me + i) % num_].rest;
            uint64_t rest = share.load(std::memory_order_relaxed);
            for (;;) {
                const int begin = int(rest & 0xffffffff), end = int(rest >> 32), left = end - begin;
                if (left == 0) break;
                const int size = std::min(most, num_ == 1 ? left : left - left / 3);
                const bool mine = i == 0;
                if (share.compare_exchange_weak(rest, mine ? packed(begin + size, end) : packed(begin, end - size),
                                                std::memory_order_relaxed))
                    return mine ? Range{begin, begin + size} : Range{end - size, end};
            }
        }
        return {0, 0};
    }
};

}  // namespace
