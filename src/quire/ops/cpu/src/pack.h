// Packing: GGUF blocks, or bf16 rows, into panels. Each format says how to decode 32 of its weights.

#pragma once

#include "packed.h"

namespace {

inline float half_to_float(const uint8_t* bytes) {
    uint16_t h;
    std::memcpy(&h, bytes, 2);
    return _cvtsh_ss(h);
}

// Thirty-two weights of one output, decoded: what is written to a block's lane.
struct Decoded {
    uint8_t q[kBlock];
    float scale[2], min[2];
};

inline void nibbles(const uint8_t* qs, uint8_t* q) {
    for (int i = 0; i < 16; ++i) q[i] = qs[i] & 15, q[16 + i] = qs[i] >> 4;
}

inline void fifth_bits(const uint8_t* bytes, uint8_t* q) {
    uint32_t bits;
    std::memcpy(&bits, bytes, 4);
    for (int i = 0; i < kBlock; ++i) q[i] |= (bits >> i & 1) << 4;
}

// The 6-bit scale and min of sub-block j of a Q4_K or Q5_K block of 256.
inline void k_scale(const uint8_t* block, int j, Decoded& out) {
    const uint8_t* s = block + 4;
    const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    const int min = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4;
    out.scale[0] = half_to_float(block) * scale;
    out.min[0] = -(half_to_float(block + 2) * min);
}

inline void k_nibbles(const uint8_t* qs, int j, uint8_t* q) {
    for (int i = 0; i < kBlock; ++i) q[i] = qs[j / 2 * 32 + i] >> (j % 2 * 4) & 15;
}

// Each format: bytes and weights of its block, and how to decode the j-th 32 of them. Mirrors FORMATS in ops/packed_linear/reference.py.
struct Q4_0 {
    static constexpr int kBytes = 18, kWeights = 32, kBits = 4;
    static void decode(const uint8_t* p, int, Decoded& out) { out.scale[0] = half_to_float(p), nibbles(p + 2, out.q); }
};
struct Q4_1 {
    static constexpr int kBytes = 20, kWeights = 32, kBits = 4;
    static void decode(const uint8_t* p, int, Decoded& out) {
        out.scale[0] = half_to_float(p), out.min[0] = half_to_float(p + 2), nibbles(p + 4, out.q);
    }
};
struct Q5_0 {
    static constexpr int kBytes = 22, kWeights = 32, kBits = 8;
    static void decode(const uint8_t* p, int, Decoded& out) {
        out.scale[0] = half_to_float(p), nibbles(p + 6, out.q), fifth_bits(p + 2, out.q);
    }
};
struct Q5_1 {
    static constexpr int kBytes = 24, kWeights = 32, kBits = 8;
    static void decode(const uint8_t* p, int, Decoded& out) {
        out.scale[0] = half_to_float(p), out.min[0] = half_to_float(p + 2);
        nibbles(p + 8, out.q), fifth_bits(p + 4, out.q);
    }
};
struct Q8_0 {
    static constexpr int kBytes = 34, kWeights = 32, kBits = 8;
    static void decode(const uint8_t* p, int, Decoded& out) {
        out.scale[0] = half_to_float(p);
        for (int i = 0; i < kBlock; ++i) out.q[i] = p[2 + i] ^ 0x80;  // signed to unsigned with zero point 128
    }
};
struct Q4_K {
    static constexpr int kBytes = 144, kWeights = 256, kBits = 4;
    static void decode(const uint8_t* p, int j, Decoded& out) { k_scale(p, j, out), k_nibbles(p + 16, j, out.q); }
};
struct Q5_K {
    static constexpr int kBytes = 176, kWeights = 256, kBits = 8;
    static void decode(const uint8_t* p, int j, Decoded& out) {
        k_scale(p, j, out), k_nibbles(p + 48, j, out.q);
        for (int i = 0; i < kBlock; ++i) out.q[i] |= (p[16 + i] >> j & 1) << 4;
    }
};
struct Q6_K {
    static constexpr int kBytes = 210, kWeights = 256, kBits = 8;
    static void decode(const uint8_t* p, int j, Decoded& out) {
        const int half = j / 4, part = j % 4;
        const uint8_t *low = p + 64 * half + 32 * (part % 2), *high = p + 128 + 32 * half;
        for (int i = 0; i < kBlock; ++i) out.q[i] = (low[i] >> (part / 2 * 4) & 15) | (high[i] >> (2 * part) & 3) << 4;
        for (int g = 0; g < 2; ++g) out.scale[g] = half_to_float(p + 208) * int8_t(p[192 + 2 * j + g]);
    }
};

inline void store_scale(const void* base, int64_t idx, float value, bool wide) {
    if (wide)
        static_cast<float*>(const_cast<void*>(base))[idx] = value;
    else
        static_cast<uint16_t*>(const_cast<void*>(base))[idx] = _cvtss_sh(value, 0);
}

inline void store_lane(const Weight& w, int64_t block, int lane, const Decoded& d) {
    uint8_t* data = const_cast<uint8_t*>(w.data) + block * block_bytes(w.bits) + lane * 4;
    constexpr int kPlace[4] = {0, 2, 1, 3};
    if (w.bits == 4)
        for (int i = 0; i < 16; ++i) data[i / 4 * 64 + kPlace[i % 4]] = d.q[i] | d.q[16 + i] << 4;
    else
        for (int i = 0; i < kBlock; ++i) data[i / 4 * 64 + kPlace[i % 4]] = d.q[i];
    const int groups_per_block = kBlock / w.group;
    for (int g = 0; g < groups_per_block; ++g) {
        const int64_t idx = (block * groups_per_block + g) * kLanes + lane;
        store_scale(w.scales, idx, d.scale[g], w.wide_scales);
        if (w.mins) store_scale(w.mins, idx, d.min[g], w.wide_scales);
    }
}

template <class Format>
void pack(const Weight& w, const uint8_t* raw) {
    const int num_panels = (w.n + kLanes - 1) / kLanes, num_blocks = w.k / kBlock;
    const int64_t row_bytes = int64_t(w.k) / Format::kWeights * Format::kBytes;
    constexpr int kParts = Format::kWeights / kBlock;
#pragma omp parallel for schedule(static)
    for (int panel = 0; panel < num_panels; ++panel) {
        for (int lane = 0; lane < kLanes; ++lane) {
            const int64_t row = int64_t(panel) * kLanes + lane;
            for (int b = 0; b < num_blocks; ++b) {
                Decoded d = {};  // outputs beyond n are zeros
                if (row < w.n) Format::decode(raw + row * row_bytes + b / kParts * Format::kBytes, b % kParts, d);
                store_lane(w, int64_t(panel) * num_blocks + b, lane, d);
            }
        }
    }
}

// `weight` is [n, k] in bf16.
inline void pack_dense(const Weight& w, const uint32_t* weight) {
    const int num_panels = (w.n + kLanes - 1) / kLanes, pairs = w.k / 2;
    auto* data = reinterpret_cast<uint32_t*>(const_cast<uint8_t*>(w.data));
#pragma omp parallel for schedule(static)
    for (int panel = 0; panel < num_panels; ++panel) {
        for (int lane = 0; lane < kLanes; ++lane) {
            const int64_t row = int64_t(panel) * kLanes + lane;
            uint32_t* to = data + int64_t(panel) * pairs * kLanes + lane;
            for (int i = 0; i < pairs; ++i) to[int64_t(i) * kLanes] = row < w.n ? weight[row * pairs + i] : 0;
        }
    }
}

}  // namespace
