// How keys and values lie inside a block of the native cache. Included by the kernel that reads it (attention.cpp) and
// the one that writes it (elementwise.cpp). A line is 16 lanes of one word; a word is one float, a pair of bfloat16 or an
// 8-bit code.
//
//   block = K half, V half;  half = [kv head][block_size / 16] chunks of 16 tokens
//   blocks may lie further apart than they are long, by any number of elements
//   K chunk: line d holds dim (or pair of dims) d of its 16 tokens: 16 scores accumulate without a horizontal sum
//   V chunk: [D / 16][16 tokens (or 8 pairs of tokens)] lines of 16 dims: the same for a probability and 16 outputs
//   codes have float scales, which lie apart: [block][2 (K, V)][kv head][block_size]
//
// In bfloat16, both are B tiles of AMX's product as they lie.
#pragma once
#include <algorithm>

#include "simd.h"

constexpr int CHUNK = 16;  // tokens

struct F32 {
    using Elem = float;
    using Line = v16_loose;
    static constexpr int PACK = 1;  // elements per word
    static inline v16 mac(v16 acc, Line x, const float* w) { return fma(x, splat(*w), acc); }
    // 16 dims of the token(s) of a line of values.
    static inline u32x16 v_line(const float* v, int64_t) { return (u32x16)load(v); }
    static inline void put_token(u32x16_loose* line, const float* v, int64_t) { *line = (u32x16)load(v); }
    static constexpr bool IS_CODED = false;
};

struct BF16 {
    using Elem = uint16_t;
    using Line = u32x16_loose;
    static constexpr int PACK = 2;
    static inline v16 mac(v16 acc, Line x, const float* w) {
        v16 low = (v16)(x << 16), high = (v16)(x & 0xffff0000u);
        return fma(high, splat(w[1]), fma(low, splat(w[0]), acc));
    }
    static inline u32x16 v_line(const uint16_t* v, int64_t stride) {
        return (u32x16)load(v) >> 16 | (u32x16)load(v + stride);
    }
    // Touches its own halves of the words only: another thread may be writing the other token of the pair.
    static inline void put_token(u32x16_loose* line, const uint16_t* v, int64_t place) {
#if defined(__AVX512BW__)
        const u32x16 token = (u32x16)load(v);
        _mm512_mask_storeu_epi16(line, place ? 0xaaaaaaaa : 0x55555555, (__m512i)(place ? token : token >> 16));
#else
        uint16_t* out = (uint16_t*)line + place;
        for (int i = 0; i < LANES; i++) out[2 * i] = v[i];
#endif
    }
    static constexpr bool IS_CODED = false;
};

typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int8_t i8x16_loose __attribute__((vector_size(16), aligned(1), may_alias));
typedef int32_t i32x16 __attribute__((vector_size(64)));

// Whole numbers from -127 to 127.
struct Int8 {
    static constexpr float LARGEST = 127.0f, OF_LARGEST = LARGEST, UNIT = 1.0f;
    static inline v16 widen(i8x16 x) {
#if defined(__AVX512F__)
        return (v16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)x));
#else
        return __builtin_convertvector(x, v16);
#endif
    }
    // Of numbers up to LARGEST, halves to even.
    static inline i8x16 codes(v16 x) {
        const v16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
        return __builtin_convertvector((i32x16)(x + magic), i8x16);
    }
};

// E4M3. What `widen` gives are UNITs.
struct Float8 {
    static constexpr float LARGEST = 448.0f, OF_LARGEST = 256.0f;
#if defined(__AVX512BW__)
    static constexpr float UNIT = 256.0f;  // float16 with the same digits has an exponent that begins 8 earlier
    static inline v16 widen(i8x16 x) {
        const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16((__m128i)x), 7);
        return (v16)_mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((short)0xbf80)));
    }
#else
    static constexpr float UNIT = 1.0f;
    static inline v16 widen(i8x16 x) {
        const u32x16 bits = __builtin_convertvector((u8x16)x, u32x16), size = bits & 127;
        const v16 normal = (v16)((size << 20) + (120u << 23)), small = __builtin_convertvector(size, v16) * 0.001953125f;
        return (v16)((u32x16)(size < 8 ? small : normal) | (bits & 128) << 24);
    }
#endif
    static inline i8x16 codes(v16 x) {
        const u32x16 bits = (u32x16)x, size = bits & 0x7fffffffu;
        // Three digits remain, and exponents begin 120 later. Below 2^-6 the unit is 2^-9: see `magic` above.
        const u32x16 normal = ((size + 0x7ffffu + (bits >> 20 & 1)) >> 20) - (120u << 3);
        const u32x16 small = (u32x16)((v16)size + splat(24576.0f)) & 15;
        return (i8x16)__builtin_convertvector(((v16)size < 0.015625f ? small : normal) | (bits >> 24 & 128), u8x16);
    }
};

// A cache of codes, for queries and outputs of type T.
template <class T, class Code>
struct Coded {
    using Elem = T;
    using Line = i8x16_loose;
    using CodeType = Code;
    static constexpr int PACK = 1;
    static constexpr bool IS_CODED = true;
    static inline v16 mac(v16 acc, Line x, const float* w) { return fma(Code::widen(x), splat(*w), acc); }
};

template <class E>
struct KvLayout {
    using Elem = typename E::Elem;
    static constexpr int64_t CELL = sizeof(typename E::Line) / (LANES * E::PACK);  // bytes of a number in the cache
    int64_t num_kv_heads, head_size, block_size;
    int64_t block_stride;  // cells from a block's first to the next block's

    int64_t chunk_bytes() const { return CHUNK * head_size * CELL; }
    int64_t head_bytes() const { return block_size * head_size * CELL; }
    int64_t half_bytes() const { return num_kv_heads * head_bytes(); }
    // Byte offset of the K chunk that holds `offset` of a block; its V chunk lies half_bytes() further.
    int64_t chunk_at(int64_t block, int64_t head, int64_t offset) const {
        return block * block_stride * CELL + head * head_bytes() + offset / CHUNK * chunk_bytes();
    }
    // Where the scales of keys begin in a cache of codes; those of values lie num_kv_heads * block_size further.
    int64_t scales_at(int64_t block, int64_t scales_stride, int64_t head, int64_t offset) const {
        return block * scales_stride + head * block_size + offset;
    }

    void store_token(char* cache, int64_t slot, int64_t head, const Elem* k, const Elem* v) const {
        const int64_t offset = slot % block_size, lane = offset % CHUNK;
        char* chunk = cache + chunk_at(slot / block_size, head, offset);
        auto* k_out = (Elem*)chunk + lane * E::PACK;
        for (int64_t d = 0; d < head_size; d += E::PACK, k_out += LANES * E::PACK)
            memcpy(k_out, k + d, sizeof(uint32_t));
        u32x16_loose* v_out = (u32x16_loose*)(chunk + half_bytes()) + lane / E::PACK;
        for (int64_t d = 0; d < head_size; d += LANES, v_out += CHUNK / E::PACK)
            E::put_token(v_out, v + d, lane % E::PACK);
    }

    // A whole chunk of tokens, `slot` being the first's: lines are written once, not a lane at a time.
    void store_chunk(char* cache, int64_t slot, int64_t head, const Elem* k, int64_t k_stride, const Elem* v,
                     int64_t v_stride) const {
        char* chunk = cache + chunk_at(slot / block_size, head, slot % block_size);
        constexpr int64_t WORDS = LANES * E::PACK;  // elements of a line
        u32x16_loose* k_out = (u32x16_loose*)chunk;  // not `auto`: that would forget the alignment
        for (int64_t d = 0; d < head_size; d += WORDS, k_out += LANES) {
            u32x16 lines[CHUNK] = {};
            const int64_t n = head_size - d < WORDS ? head_size - d : WORDS;
            for (int t = 0; t < CHUNK; t++)
                if (n == WORDS)
                    memcpy(&lines[t], k + t * k_stride + d, sizeof(u32x16));
                else
                    memcpy(&lines[t], k + t * k_stride + d, n * sizeof(Elem));
            transpose(lines);
            for (int i = 0; i < n / E::PACK; i++) k_out[i] = lines[i];
        }
        u32x16_loose* v_out = (u32x16_loose*)(chunk + half_bytes());
        for (int64_t d = 0; d < head_size; d += LANES)
            for (int t = 0; t < CHUNK; t += E::PACK) *v_out++ = E::v_line(v + t * v_stride + d, v_stride);
    }

    // The same in codes, of one token. Its scales go to `k_scale` and the place of values behind. A fixed scale of 0 means
    // none.
    void store_codes(char* cache, int64_t slot, int64_t head, const Elem* k, const Elem* v, const float* fixed,
                     float* k_scale) const {
        const int64_t offset = slot % block_size, lane = offset % CHUNK;
        int8_t* k_out = (int8_t*)cache + chunk_at(slot / block_size, head, offset) + lane;
        int8_t* v_out = k_out - lane + half_bytes() + lane * LANES;
        k_scale[0] = rounded_head(k, fixed[0], [&](int64_t d, i8x16 codes) {
            for (int i = 0; i < LANES; i++) k_out[(d + i) * CHUNK] = codes[i];
        });
        k_scale[num_kv_heads * block_size] = rounded_head(v, fixed[1], [&](int64_t d, i8x16 codes) {
            *(i8x16_loose*)(v_out + d * CHUNK) = codes;
        });
    }

   private:
    // As `round_vectors` of ops/rounding/reference.py: gives `put` the codes, sixteen at a time, and returns the scale.
    template <class Put>
    float rounded_head(const Elem* x, float fixed, Put put) const {
        using Code = typename E::CodeType;
        float largest = fixed * Code::OF_LARGEST;
        if (fixed == 0) {
            v16 most = {};
            for (int64_t d = 0; d < head_size; d += LANES) most = max((v16)((u32x16)load(x + d) & 0x7fffffffu), most);
            largest = std::max(horizontal_max(most), 1e-30f);
        }
        const v16 inverse = splat(Code::OF_LARGEST / largest), limit = splat(Code::LARGEST);
        for (int64_t d = 0; d < head_size; d += LANES)
            put(d, Code::codes(max(min(load(x + d) * inverse, limit), -limit)));
        return largest / Code::OF_LARGEST;
    }
};
