// Few rows: weights stay integers and so do activations, exact in all but the smallest of them.
//
// A row of x becomes, block by block, 16-bit integers with a power-of-two scale (bf16 values within 2^-7 of the block's
// largest are exact), split in two signed bytes for VPDPBUSD: 64 products each, two per cycle, where VDPBF16PS does 32
// in two cycles. Sums of a group are exact; scales apply in float32.

#pragma once

#include "packed.h"

namespace {

// One block of one row of x, in the order of the packed weights: x = scale * (256 * high + low).
struct alignas(64) RowBlock {
    int8_t high[kBlock], low[kBlock];
    float scale;
    int32_t sum[3];     // of the first half, the second, and the whole block
    float real_sum[3];  // the same of x itself
    int32_t pad[9];
};

void quantize_row(const uint16_t* x, int k, RowBlock* out) {
    for (int b = 0; b < k / kBlock; ++b) {
        const __m512i bits = _mm512_loadu_si512(x + b * kBlock);
        const uint16_t largest = [&] {
            const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff));
            __m256i m = _mm256_max_epu16(_mm512_castsi512_si256(magnitude), _mm512_extracti64x4_epi64(magnitude, 1));
            __m128i s = _mm_max_epu16(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
            s = _mm_xor_si128(s, _mm_set1_epi16(-1));  // the one horizontal 16-bit instruction finds minima
            return uint16_t(~_mm_extract_epi16(_mm_minpos_epu16(s), 0));
        }();
        const int exponent = largest >> 7;
        RowBlock& block = out[b];
        if (exponent < 16 || exponent == 255) {  // nothing there (below 2^-110), or infinities and NaN: these must show
            std::memset(&block, 0, sizeof block);
            if (exponent == 255) block.scale = __builtin_nanf("");
            continue;
        }
        const __m512 up = _mm512_castsi512_ps(_mm512_set1_epi32((127 + 14 - (exponent - 127)) << 23));
        const auto whole = [&](__m256i half) {
            const __m512 value = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
            // 32640 would need a high byte of 128.
            return _mm512_min_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(value, up)), _mm512_set1_epi32(32639));
        };
        const __m512i first = whole(_mm512_castsi512_si256(bits)), second = whole(_mm512_extracti64x4_epi64(bits, 1));
        const auto split = [&](__m512i value, int at) {
            const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(value, _mm512_set1_epi32(128)), 8);
            const auto store = [](int8_t* to, __m512i bytes) {
                const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
                _mm_store_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(bytes), order));
            };
            store(block.high + at, high);
            store(block.low + at, value);
        };
        split(first, 0);
        split(second, 16);
        const uint32_t down = uint32_t(127 - 14 + (exponent - 127)) << 23;
        std::memcpy(&block.scale, &down, 4);
        block.sum[0] = _mm512_reduce_add_epi32(first);
        block.sum[1] = _mm512_reduce_add_epi32(second);
        block.sum[2] = block.sum[0] + block.sum[1];
        for (int i = 0; i < 3; ++i) block.real_sum[i] = block.sum[i] * block.scale;
    }
}

inline __m512i broadcast4(const int8_t* bytes) {
    int32_t four;
    std::memcpy(&four, bytes, 4);
    return _mm512_set1_epi32(four);
}

template <int Rows>
struct Sums {
    __m512i high[Rows], low[Rows];

    inline void start(const Weight& w, const RowBlock* const* x, int b, int part) {
        for (int r = 0; r < Rows; ++r) {
            high[r] = _mm512_setzero_si512();
            low[r] = _mm512_set1_epi32(-w.zero * x[r][b].sum[part]);
        }
    }

    inline void add(__m512i weights, const RowBlock* const* x, int b, int first_k) {
        for (int r = 0; r < Rows; ++r) {
            high[r] = _mm512_dpbusd_epi32(high[r], weights, broadcast4(x[r][b].high + first_k));
            low[r] = _mm512_dpbusd_epi32(low[r], weights, broadcast4(x[r][b].low + first_k));
        }
    }

    inline void finish(const Weight& w, const RowBlock* const* x, int b, int part, const Affine& affine, __m512* total) {
        for (int r = 0; r < Rows; ++r) {
            const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high[r], 8), low[r]);
            const __m512 x_scale = _mm512_set1_ps(x[r][b].scale);
            total[r] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(whole), x_scale), affine.scale, total[r]);
        }
        if (!w.mins.values) return;
        for (int r = 0; r < Rows; ++r)
            total[r] = _mm512_fmadd_ps(affine.min, _mm512_set1_ps(x[r][b].real_sum[part]), total[r]);
    }
};

constexpr int kPrefetchBytes = 4096;  // a page ahead: the hardware prefetcher stops at its end

template <int Kind, int Rows>
void panel_sums(const Weight& w, const RowBlock* quantized, int first_row, int panel, __m512* out) {
    constexpr int kBlockBytes = kLanes * kBlock * bits_of(Kind) / 8;
    const int num_blocks = w.k / kBlock;
    const bool halves = w.group == 16;
    const RowBlock* x[Rows];
    __m512 total[Rows];
    for (int r = 0; r < Rows; ++r) {
        x[r] = quantized + int64_t(first_row + r) * num_blocks;
        total[r] = _mm512_setzero_ps();
    }
    const uint8_t* data = w.data + int64_t(panel) * num_blocks * kBlockBytes;
    const __m512i table = byte_table(w);
    const Affines affines = expand(w, panel, {0, num_blocks}, scale_scratch[0]);
    int step = 0;
    for (int b = 0; b < num_blocks; ++b, data += kBlockBytes) {
        for (int i = 0; i < kBlockBytes; i += 64)
            _mm_prefetch(reinterpret_cast<const char*>(data + kPrefetchBytes + i), _MM_HINT_T0);
        Sums<Rows> sums;
        sums.start(w, x, b, halves ? 0 : 2);
        sums.add(codes_of<Kind, 0>(data, table), x, b, 0);
        sums.add(codes_of<Kind, 1>(data, table), x, b, 4);
        sums.add(codes_of<Kind, 2>(data, table), x, b, 8);
        sums.add(codes_of<Kind, 3>(data, table), x, b, 12);
        if (halves) {
            sums.finish(w, x, b, 0, affines[step++], total);
            sums.start(w, x, b, 1);
        }
        sums.add(codes_of<Kind, 4>(data, table), x, b, 16);
        sums.add(codes_of<Kind, 5>(data, table), x, b, 20);
        sums.add(codes_of<Kind, 6>(data, table), x, b, 24);
        sums.add(codes_of<Kind, 7>(data, table), x, b, 28);
        sums.finish(w, x, b, halves ? 1 : 2, affines[step++], total);
    }
    std::copy(total, total + Rows, out);
}

template <int Kind, int Rows>
void few_rows_pair(const Weight& w, const Job& job, const RowBlock* x, int first_row, int pair) {
    __m512 left[Rows], right[Rows] = {};
    panel_sums<Kind, Rows>(w, x, first_row, panel_of(w, job, pair, 0), left);
    const int beside = panel_of(w, job, pair, 1);
    if (beside < num_panels(w)) panel_sums<Kind, Rows>(w, x, first_row, beside, right);
    for (int r = 0; r < Rows; ++r) store_pair(w, job, first_row + r, pair, left[r], right[r]);
}

template <int Kind>
void few_rows(const Weight& w, const Job& job) {
    const int num_blocks = w.k / kBlock;
#pragma omp parallel
    {
        // Every thread converts all rows for itself: cheaper than a barrier.
        auto* x = static_cast<RowBlock*>(rows_scratch.get(sizeof(RowBlock) * num_blocks * job.rows));
        for (int r = 0; r < job.rows; ++r) quantize_row(job.x + int64_t(r) * w.k, w.k, x + int64_t(r) * num_blocks);
        // Halves, not claims: memory is the limit, and each piece of a stream of weights begins with misses.
        const Range mine = my_share(num_pairs(w));
        for (int pair = mine.begin; pair < mine.end; ++pair) {
            int r = 0;  // a pair stays in the first-level cache for all its rows
            for (; r + 8 <= job.rows; r += 8) few_rows_pair<Kind, 8>(w, job, x, r, pair);
            for (; r + 4 <= job.rows; r += 4) few_rows_pair<Kind, 4>(w, job, x, r, pair);
            if (job.rows - r == 3) few_rows_pair<Kind, 3>(w, job, x, r, pair);
            if (job.rows - r == 2) few_rows_pair<Kind, 2>(w, job, x, r, pair);
            if (job.rows - r == 1) few_rows_pair<Kind, 1>(w, job, x, r, pair);
        }
    }
}

}  // namespace
