// Packing: GGUF blocks, or bf16 rows, into panels. Each format says how to decode 32 of its weights.

#pragma once

#include "packed.h"

namespace {

inline float half_to_float(const uint8_t* bytes) {
    uint16_t h;
    std::memcpy(&h, bytes, 2);
    return _cvtsh_ss(h);
}

// Thirty-two weights of one output, decoded: what is written to a block's lane. Groups of 16 have two scales and mins.
struct Decoded {
    uint8_t q[kBlock];
    float scale[2], min[2];  // where scales are codes or exponents: these, as whole numbers
    float outer_scale, outer_min;
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
    out.scale[0] = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    out.min[0] = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4;
    out.outer_scale = half_to_float(block), out.outer_min = -half_to_float(block + 2);
}

inline void k_nibbles(const uint8_t* qs, int j, uint8_t* q) {
    for (int i = 0; i < kBlock; ++i) q[i] = qs[j / 2 * 32 + i] >> (j % 2 * 4) & 15;
}

// Each format: bytes and weights of its block, and how to decode the j-th 32 of them. Twin: ops/dequantize/gguf.py.
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
    static constexpr int kBytes = 22, kWeights = 32, kBits = 5;
    static void decode(const uint8_t* p, int, Decoded& out) {
        out.scale[0] = half_to_float(p), nibbles(p + 6, out.q), fifth_bits(p + 2, out.q);
    }
};
struct Q5_1 {
    static constexpr int kBytes = 24, kWeights = 32, kBits = 5;
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
    static constexpr int kBytes = 176, kWeights = 256, kBits = 5;
    static void decode(const uint8_t* p, int j, Decoded& out) {
        k_scale(p, j, out), k_nibbles(p + 48, j, out.q);
        for (int i = 0; i < kBlock; ++i) out.q[i] |= (p[16 + i] >> j & 1) << 4;
    }
};
struct Q6_K {
    static constexpr int kBytes = 210, kWeights = 256, kBits = 6;
    static void decode(const uint8_t* p, int j, Decoded& out) {
        const int half = j / 4, part = j % 4;
        const uint8_t *low = p + 64 * half + 32 * (part % 2), *high = p + 128 + 32 * half;
        for (int i = 0; i < kBlock; ++i) out.q[i] = (low[i] >> (part / 2 * 4) & 15) | (high[i] >> (2 * part) & 3) << 4;
        for (int g = 0; g < 2; ++g) out.scale[g] = int8_t(p[192 + 2 * j + g]);
        out.outer_scale = half_to_float(p + 208);
    }
};
struct Q2_K {
    static constexpr int kBytes = 84, kWeights = 256, kBits = 2;
    static void decode(const uint8_t* p, int j, Decoded& out) {
        for (int i = 0; i < kBlock; ++i) out.q[i] = p[16 + j / 4 * 32 + i] >> (j % 4 * 2) & 3;
        for (int g = 0; g < 2; ++g) out.scale[g] = p[2 * j + g] & 15, out.min[g] = p[2 * j + g] >> 4;
        out.outer_scale = half_to_float(p + 80), out.outer_min = -half_to_float(p + 82);
    }
};
struct Q3_K {
    static constexpr int kBytes = 110, kWeights = 256, kBits = 3;
    static void decode(const uint8_t* p, int j, Decoded& out) {
        const uint8_t *low = p + 32 + j / 4 * 32, *scales = p + 96;
        for (int i = 0; i < kBlock; ++i) out.q[i] = (low[i] >> (j % 4 * 2) & 3) | (p[i] >> j & 1) << 2;
        for (int g = 0; g < 2; ++g) {
            const int idx = 2 * j + g;
            out.scale[g] = ((scales[idx % 8] >> (idx / 8 * 4) & 15) | (scales[8 + idx % 4] >> (idx / 4 * 2) & 3) << 4) - 32;
        }
        out.outer_scale = half_to_float(p + 108);
    }
};
struct IQ4_NL {
    static constexpr int kBytes = 18, kWeights = 32, kBits = 4;
    static void decode(const uint8_t* p, int, Decoded& out) { out.scale[0] = half_to_float(p), nibbles(p + 2, out.q); }
};
struct IQ4_XS {
    static constexpr int kBytes = 136, kWeights = 256, kBits = 4;
    static void decode(const uint8_t* p, int j, Decoded& out) {
        const int high = p[2] | p[3] << 8;
        nibbles(p + 8 + 16 * j, out.q);
        out.scale[0] = ((p[4 + j / 2] >> (j % 2 * 4) & 15) | (high >> (2 * j) & 3) << 4) - 32;
        out.outer_scale = half_to_float(p);
    }
};
struct MXFP4 {
    static constexpr int kBytes = 17, kWeights = 32, kBits = 4;
    static void decode(const uint8_t* p, int, Decoded& out) { out.scale[0] = p[0], nibbles(p + 1, out.q); }
};

inline void store_scale(const Scales& scales, int64_t idx, float value) {
    void* values = const_cast<void*>(scales.values);
    switch (scales.kind) {
        case kFloat16: static_cast<uint16_t*>(values)[idx] = _cvtss_sh(value, 0); break;
        case kFloat32: static_cast<float*>(values)[idx] = value; break;
        case kCodes: static_cast<int8_t*>(values)[idx] = int8_t(value); break;
        case kExponents: static_cast<uint8_t*>(values)[idx] = uint8_t(value); break;
        case kNibbles: {  // groups come in order, the even one of a pair first
            const int64_t group = idx / kLanes, at = group / 2 * kLanes + idx % kLanes;
            auto& pair = static_cast<uint8_t*>(values)[at];
            pair = group % 2 ? pair | uint8_t(value) << 4 : uint8_t(value);
            break;
        }
    }
}

// The codes of one lane in the planes drawn in linear.cpp.
template <int Bits>
inline void store_codes(const Weight& w, int64_t block, int lane, const uint8_t* q) {
    constexpr int kPlace[4] = {0, 2, 1, 3};
    uint8_t bytes[8][4] = {};  // of each stored vector
#pragma GCC unroll 32
    for (int i = 0; i < kBlock; ++i) {
        const int j = i / 4, place = kPlace[i % 4], code = q[i];
        if constexpr (Bits == 8) {
            bytes[j][place] = code;
        } else if constexpr (Bits < 4) {
            bytes[j / 4][place] |= (code & 3) << (j % 4 * 2);
            if constexpr (Bits == 3) bytes[2][place] |= (code >> 2) << j;
        } else {
            bytes[j % 4][place] |= (code & 15) << (j / 4 * 4);
            if constexpr (Bits == 5) bytes[4][place] |= (code >> 4) << j;
            if constexpr (Bits == 6) bytes[4 + j / 4][place] |= (code >> 4) << (j % 4 * 2);
        }
    }
    uint8_t* data = const_cast<uint8_t*>(w.data) + block * block_bytes(Bits) + lane * 4;
    for (int i = 0; i < Bits; ++i) std::memcpy(data + i * 64, bytes[i], 4);
}

// Scales or mins of 32 inputs of one output.
inline void store_scales(const Weight& w, const Scales& scales, int panel, int b, int lane, const float* values, float outer) {
    if (!scales.values) return;
    const int groups = kBlock / w.group;
    for (int g = 0; g < groups; ++g)
        store_scale(scales, (int64_t(panel) * w.num_groups + b * groups + g) * kLanes + lane, values[g]);
    if (!scales.outer) return;
    const int64_t idx = int64_t(panel) * scales.num_outer + b * groups / (w.num_groups / scales.num_outer);
    const_cast<uint16_t*>(scales.outer)[idx * kLanes + lane] = _cvtss_sh(outer, 0);
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
                store_codes<Format::kBits>(w, int64_t(panel) * num_blocks + b, lane, d.q);
                store_scales(w, w.scales, panel, b, lane, d.scale, d.outer_scale);
                store_scales(w, w.mins, panel, b, lane, d.min, d.outer_min);
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
