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

// How the scales (or the mins) of a weight are stored: [panel][group][16].
enum ScaleKind : int32_t {
    kFloat16,
    kFloat32,
    kCodes,      // int8, to be multiplied by `outer`
    kExponents,  // uint8: 2^(value - 128)
    kNibbles,    // as kCodes, but of four bits: [panel][group / 2][16], the even group's in the low ones
    kZeros,      // int8, of mins only: a min is minus this times the scale
};

// Mirrors `_Scales` in ops/packed_linear/cpu.py.
struct Scales {
    const void* values;     // null: none
    const uint16_t* outer;  // float16 [panel][num_outer][16]; null: none
    int32_t kind, num_outer;
};

// Mirrors `_Weight` in ops/packed_linear/cpu.py.
struct Weight {
    const uint8_t* data;
    Scales scales, mins;
    const void* table;  // sixteen values of 4-bit codes: bytes (what is multiplied is byte - zero), or floats; null: none
    int32_t n, k, bits;
    int32_t group, num_groups;  // inputs that share a scale: 16, or a multiple of 32; how many groups a row has
    int32_t zero;
    int32_t float_table;
    int32_t few_rows;  // up to this many rows take the path for few rows
    int32_t shift;     // weights times 2^shift suit float16: see unpack.h
};

struct Job {
    const uint16_t* x;  // [rows, k] bf16
    void* out;          // [rows, n] float32 or bf16; gated: [rows, n / 2] bf16
    int64_t out_stride;  // values from one row of out to the next
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

// What a code is, as a template argument: its bits, or 4 bits that stand for one of sixteen values.
constexpr int kByteTable = 104, kFloatTable = 204;
constexpr int bits_of(int kind) { return kind % 100; }

// (v >> right & mask) in each byte; `right` may be negative.
template <int Right>
INLINE __m512i field(__m512i v, int mask) {
    if constexpr (Right > 0) v = _mm512_srli_epi16(v, Right);
    if constexpr (Right < 0) v = _mm512_slli_epi16(v, -Right);
    return _mm512_and_si512(v, _mm512_set1_epi8(char(mask)));
}

// Vector J of the eight of a block, as bytes: the codes of K 4J..4J+3 (or their values in the table) of sixteen outputs.
template <int Kind, int J>
INLINE __m512i codes_of(const uint8_t* block, __m512i table) {
    const auto vector = [&](int i) { return _mm512_loadu_si512(block + 64 * i); };
    if constexpr (Kind == 8) {
        return vector(J);
    } else if constexpr (Kind == 2) {
        return field<2 * (J % 4)>(vector(J / 4), 3);
    } else if constexpr (Kind == 3) {
        return _mm512_or_si512(codes_of<2, J>(block, table), field<J - 2>(vector(2), 4));
    } else {
        const __m512i low = field<J / 4 * 4>(vector(J % 4), 15);
        if constexpr (Kind == kByteTable) return _mm512_shuffle_epi8(table, low);
        if constexpr (Kind == 5) return _mm512_or_si512(low, field<J - 4>(vector(4), 16));
        if constexpr (Kind == 6) return _mm512_or_si512(low, field<2 * (J % 4) - 4>(vector(4 + J / 4), 48));
        return low;
    }
}

INLINE __m512i byte_table(const Weight& w) {
    if (!w.table || w.float_table) return _mm512_setzero_si512();
    return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(w.table)));
}

INLINE __m512 load_halves(const uint16_t* halves) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
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
thread_local Scratch rows_scratch, panel_scratch, scale_scratch[2];

struct Range {
    int begin, end;
    bool empty() const { return begin >= end; }
};

// What turns codes into weights: scale * (code - zero) + min.
struct Affine {
    __m512 scale, min;
};

// Those of a panel, one for each step: a step is a block, or with groups of 16 half of one.
struct Affines {
    __m512 *scales, *mins;  // mins null: none

    INLINE Affine operator[](int step) const { return {scales[step], mins ? mins[step] : _mm512_setzero_ps()}; }
};

inline int steps_per_block(const Weight& w) { return w.group == 16 ? 2 : 1; }

// Calls `put` with the scales (or mins) of one group of a panel after the other, from group `first` up to `end`.
template <class Put>
INLINE void each_group(const Weight& w, const Scales& scales, int64_t panel, int first, int end, Put put) {
    const int64_t start = (panel * w.num_groups + first) * kLanes;
    const int count = end - first;
    const auto* bytes = static_cast<const uint8_t*>(scales.values) + start;
    const auto load16 = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + i * kLanes)); };
    switch (scales.kind) {
        case kFloat16: {
            const auto* halves = static_cast<const uint16_t*>(scales.values) + start;
            for (int i = 0; i < count; ++i) put(load_halves(halves + i * kLanes));
            return;
        }
        case kFloat32: {
            const auto* floats = static_cast<const float*>(scales.values) + start;
            for (int i = 0; i < count; ++i) put(_mm512_loadu_ps(floats + i * kLanes));
            return;
        }
        case kCodes:
        case kNibbles: {
            const auto* pairs = static_cast<const uint8_t*>(scales.values) + panel * w.num_groups / 2 * kLanes;
            const auto code = [&](int i) {
                if (scales.kind == kCodes) return _mm512_cvtepi8_epi32(load16(i));
                const int group = first + i;
                const auto* pair = reinterpret_cast<const __m128i*>(pairs + group / 2 * kLanes);
                const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(pair));
                return group % 2 ? _mm512_srli_epi32(both, 4) : _mm512_and_si512(both, _mm512_set1_epi32(15));
            };
            const int per_outer = w.num_groups / scales.num_outer;
            const uint16_t* outer = scales.outer + (panel * scales.num_outer + first / per_outer) * kLanes;
            for (int i = 0, left = per_outer - first % per_outer; i < count; left = per_outer, outer += kLanes) {
                const __m512 factor = load_halves(outer);
                for (; left > 0 && i < count; --left, ++i)
                    put(_mm512_mul_ps(_mm512_cvtepi32_ps(code(i)), factor));
            }
            return;
        }
        case kZeros:
            for (int i = 0; i < count; ++i) put(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load16(i))));
            return;
        default:
            for (int i = 0; i < count; ++i) {
                const __m512i exponents = _mm512_cvtepu8_epi32(load16(i));
                const __mmask16 denormal = _mm512_cmplt_epu32_mask(exponents, _mm512_set1_epi32(2));
                const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(exponents, _mm512_set1_epi32(1)), 23);
                const __m512i small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), exponents);
                put(_mm512_castsi512_ps(_mm512_mask_mov_epi32(normal, denormal, small)));
            }
    }
}

// Brings the scales and mins of some blocks of a panel into one simple form, in scratch memory.
__attribute__((noinline)) Affines expand(const Weight& w, int panel, Range blocks, Scratch& scratch) {
    const int per_block = steps_per_block(w), group_steps = w.group <= kBlock ? 1 : w.group / kBlock;
    const int begin = blocks.begin * per_block, end = blocks.end * per_block;
    const int first = begin / group_steps, last = (end + group_steps - 1) / group_steps;
    auto* memory = static_cast<__m512*>(scratch.get((2 * (end - begin) + 1) * sizeof(__m512)));
    const auto fill = [&](const Scales& values, __m512* to) {
        int step = begin, next = (first + 1) * group_steps;  // where the next group begins
        each_group(w, values, panel, first, last, [&](__m512 value) __attribute__((always_inline)) {
            if (values.kind == kZeros) value = _mm512_fnmadd_ps(value, memory[step - begin], _mm512_setzero_ps());
            for (const int stop = std::min(next, end); step < stop; ++step) *to++ = value;
            next += group_steps;
        });
    };
    fill(w.scales, memory);
    if (!w.mins.values) return {memory, nullptr};
    fill(w.mins, memory + (end - begin));
    return {memory, memory + (end - begin)};
}

INLINE __m512 add_bias(const Job& job, int64_t first, __mmask16 mask, __m512 values) {
    return job.bias ? _mm512_add_ps(values, _mm512_maskz_loadu_ps(mask, job.bias + first)) : values;
}

INLINE void store_outputs(const Weight& w, const Job& job, int row, int panel, __m512 values) {
    const int64_t first = int64_t(panel) * kLanes, at = row * job.out_stride + first;
    const int num = std::min<int64_t>(kLanes, w.n - first);
    const __mmask16 mask = (1u << num) - 1;
    values = add_bias(job, first, mask, values);
    if (job.out_is_f32)
        _mm512_mask_storeu_ps(static_cast<float*>(job.out) + at, mask, values);
    else
        _mm256_mask_storeu_epi16(static_cast<uint16_t*>(job.out) + at, mask, (__m256i)round_to_bf16((v16)values));
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
        auto* out = static_cast<uint16_t*>(job.out) + row * job.out_stride + pair * kLanes;
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
    auto* out = static_cast<uint16_t*>(job.out) + row * job.out_stride + first;
#ifdef __AVX512BF16__
    _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(right, left));
#else
    store(out, (v16)left), store(out + kLanes, (v16)right);
#endif
}

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
