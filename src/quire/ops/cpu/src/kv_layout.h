// How keys and values lie inside a block of the native cache. Included by the kernel that reads it (attention.cpp) and
// the one that writes it (elementwise.cpp). Lines are 64 bytes: 16 lanes of one word; a word is one float or a pair of
// bfloat16.
//
//   block = K half, V half;  half = [kv head][block_size / 16] chunks of 16 tokens
//   blocks may lie further apart than they are long, by any number of elements
//   K chunk: line d holds dim (or pair of dims) d of its 16 tokens: 16 scores accumulate without a horizontal sum
//   V chunk: [D / 16][16 tokens (or 8 pairs of tokens)] lines of 16 dims: the same for a probability and 16 outputs
//
// Both are B tiles of AMX's bfloat16 product as they lie.
#pragma once
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
};

template <class E>
struct KvLayout {
    using Elem = typename E::Elem;
    int64_t num_kv_heads, head_size, block_size;
    int64_t block_stride;  // elements from a block's first to the next block's

    int64_t chunk_bytes() const { return CHUNK * head_size * (int64_t)sizeof(Elem); }
    int64_t head_bytes() const { return block_size * head_size * (int64_t)sizeof(Elem); }
    int64_t half_bytes() const { return num_kv_heads * head_bytes(); }
    // Byte offset of the K chunk that holds `offset` of a block; its V chunk lies half_bytes() further.
    int64_t chunk_at(int64_t block, int64_t head, int64_t offset) const {
        return block * block_stride * (int64_t)sizeof(Elem) + head * head_bytes() + offset / CHUNK * chunk_bytes();
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
};
