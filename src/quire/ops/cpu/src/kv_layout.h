// How keys and values lie inside a block of the native cache. Included by the kernel that reads it (attention.cpp) and
// by those that write it. Lines are 64 bytes: 16 lanes of one word; a word is one float or a pair of bfloat16.
//
//   block = K half, V half;  half = [kv head][block_size / 16] chunks of 16 tokens
//   K chunk: line d holds dim (or pair of dims) d of its 16 tokens: 16 scores accumulate without a horizontal sum
//   V chunk: [D / 16][16 tokens (or 8 pairs of tokens)] lines of 16 dims: the same for a probability and 16 outputs
//
// Both are B tiles of AMX's bfloat16 product as they lie.
#pragma once
#include "simd.h"

constexpr int CHUNK = 16;  // tokens

struct F32 {
    using Elem = float;
    using Word = float;
    using Line = v16;
    static constexpr int PACK = 1;  // elements per word
    static inline v16 mac(v16 acc, Line x, Word w) { return fma(x, splat(w), acc); }
};

struct BF16 {
    using Elem = uint16_t;
    using Word = uint32_t;
    using Line = u32x16;
    static constexpr int PACK = 2;
    static inline v16 mac(v16 acc, Line x, Word w) {
#if defined(__AVX512BF16__)
        return (v16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)_mm512_set1_epi32((int)w));
#else
        v16 low = (v16)(x << 16), high = (v16)(x & 0xffff0000u);
        return fma(high, splat(widen((uint16_t)(w >> 16))), fma(low, splat(widen((uint16_t)w)), acc));
#endif
    }
};

template <class E>
struct KvLayout {
    int64_t num_kv_heads, head_size, block_size;

    int64_t chunk_bytes() const { return CHUNK * head_size * (int64_t)sizeof(typename E::Elem); }
    int64_t half_bytes() const { return num_kv_heads * block_size * head_size * (int64_t)sizeof(typename E::Elem); }
    // Byte offset of the K chunk that holds `offset` of a block; its V chunk lies half_bytes() further.
    int64_t chunk_at(int64_t block, int64_t head, int64_t offset) const {
        return block * 2 * half_bytes() + (head * (block_size / CHUNK) + offset / CHUNK) * chunk_bytes();
    }

    using Elem = typename E::Elem;
    void store_token(char* cache, int64_t slot, int64_t head, const Elem* k, const Elem* v) const {
        int64_t offset = slot % block_size, lane = offset % CHUNK;
        char* chunk = cache + chunk_at(slot / block_size, head, offset);
        auto* k_out = (Elem*)chunk + lane * E::PACK;
        for (int64_t d = 0; d < head_size; d += E::PACK, k_out += LANES * E::PACK)
            for (int i = 0; i < E::PACK; i++) k_out[i] = k[d + i];
        auto* v_out = (Elem*)(chunk + half_bytes()) + lane / E::PACK * LANES * E::PACK + lane % E::PACK;
        for (int64_t d = 0; d < head_size; d += LANES, v_out += CHUNK * LANES)
            for (int i = 0; i < LANES; i++) v_out[i * E::PACK] = v[d + i];
    }
};
