// Packed weights become bf16 tiles for many_rows.h, rounded to nearest, halves away from zero.
//
// With AVX512-FP16 on 32 values at a time, in float16: an exact integer times scale plus min, rounded towards zero,
// keeps three bits more than bf16 does, and those suffice to round as the exact value would (float32 scales are rounded
// to float16 first). What is left of bf16's conversion is to shift these bits out. The exponent keeps float16's bias:
// a tile holds weights times 2^(shift - 112), which `unit_of` undoes in the sums. `shift` puts the largest weight just
// below float16's limit, and only those 2^28 times smaller become zero. Elsewhere 16 values at a time, in float32.
//
// A mask, or a shift by eight and a mask, leave every other byte in sixteen-bit lanes: so weights are packed with the four
// bytes of a 32-bit lane in the order 0, 2, 1, 3, and pairs of neighbours come out.

#pragma once

#include "packed.h"

namespace {

// Makes the bf16 tile of a block in four parts, so that they can be strewn between tile products.
template <int Bits>
struct Unpacker;

#ifdef __AVX512FP16__

// What the sums of products with unpacked weights are to be multiplied by.
template <int Bits>
INLINE __m512 unit_of(const Weight& w) {
    return _mm512_castsi512_ps(_mm512_set1_epi32((127 + (Bits == 16 ? 0 : 112 - w.shift)) << 23));
}

// Scales or mins of sixteen outputs, times 2^shift, each in both halves of its 32-bit lane.
class Halves {
    const void* base_;
    bool wide_;
    __m512 up_;
    __m256h narrow_up_;

   public:
    INLINE Halves(const Weight& w, const void* base) : base_(base), wide_(w.wide_scales) {
        up_ = _mm512_castsi512_ps(_mm512_set1_epi32((127 + w.shift) << 23));
        narrow_up_ = _mm256_castsi256_ph(_mm512_cvtps_ph(up_, _MM_FROUND_TO_NEAREST_INT));
    }
    INLINE __m512h operator[](int64_t idx) const {
        if (!base_) return _mm512_setzero_ph();
        __m256i values;
        if (wide_) {
            const __m512 wide = _mm512_loadu_ps(static_cast<const float*>(base_) + idx);
            values = _mm512_cvtps_ph(_mm512_mul_ps(wide, up_), _MM_FROUND_TO_NEAREST_INT);
        } else {
            const __m256h narrow = _mm256_loadu_ph(static_cast<const _Float16*>(base_) + idx);
            values = _mm256_castph_si256(_mm256_mul_ph(narrow, narrow_up_));
        }
        const __m512i lanes = _mm512_cvtepu16_epi32(values);
        return _mm512_castsi512_ph(_mm512_or_si512(lanes, _mm512_slli_epi32(lanes, 16)));
    }
};

struct Affine {
    __m512h scale, min;

    INLINE __m512i to_bf16(__m512h q) const {
        const __m512h value = _mm512_fmadd_round_ph(q, scale, min, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
        // (bits + 4) >> 3 with the sign spread over the upper bits, of which all but one are cleared.
        const __m512i shifted = _mm512_mulhrs_epi16(_mm512_castph_si512(value), _mm512_set1_epi16(1 << 12));
        return _mm512_and_si512(shifted, _mm512_set1_epi16(int16_t(0x8fff)));
    }
};

template <>
class Unpacker<4> {
    const uint8_t* weights_;
    const Halves scales_, mins_;
    const __m512h offset0_, offset4_;
    const __m512i* data_;
    __m512i* tile_;
    Affine affine_;

    // q at bit `Bit` of the mantissa reads as 2^(10 - Bit) + q.
    template <int Bit>
    INLINE __m512i nibbles(__m512i v) const {
        const __m512i mask = _mm512_set1_epi16(15 << Bit), exponent = _mm512_set1_epi16((15 + 10 - Bit) << 10);
        const __m512h q = _mm512_castsi512_ph(_mm512_ternarylogic_epi32(v, mask, exponent, 0xea));
        return affine_.to_bf16(_mm512_sub_ph(q, Bit ? offset4_ : offset0_));
    }

   public:
    INLINE explicit Unpacker(const Weight& w)
        : weights_(w.data), scales_(w, w.scales), mins_(w, w.mins),
          offset0_(_mm512_set1_ph(_Float16(1024 + w.zero))), offset4_(_mm512_set1_ph(_Float16(64 + w.zero))) {}
    INLINE void start(int64_t block, __m512i* tile) {
        data_ = reinterpret_cast<const __m512i*>(weights_ + block * block_bytes(4)), tile_ = tile;
        affine_ = {scales_[block * kLanes], mins_[block * kLanes]};
    }
    INLINE void part(int j) const {
        const __m512i v = _mm512_loadu_si512(data_ + j);
        const __m512i down8 = _mm512_srli_epi16(v, 8);
        tile_[2 * j] = nibbles<0>(v);              // low nibbles of bytes 0, 2
        tile_[8 + 2 * j] = nibbles<4>(v);          // high ones
        tile_[2 * j + 1] = nibbles<0>(down8);      // low nibbles of bytes 1, 3
        tile_[8 + 2 * j + 1] = nibbles<4>(down8);  // high ones
    }
};

template <>
class Unpacker<8> {
    const uint8_t* weights_;
    const Halves scales_, mins_;
    const int groups_per_block_;
    const __m512h offset_;
    const __m512i* data_;
    __m512i* tile_;
    Affine affine_[2];  // of the halves of the block: equal for groups of 32

   public:
    INLINE explicit Unpacker(const Weight& w)
        : weights_(w.data), scales_(w, w.scales), mins_(w, w.mins), groups_per_block_(kBlock / w.group),
          offset_(_mm512_set1_ph(_Float16(1024 + w.zero))) {}
    INLINE void start(int64_t block, __m512i* tile) {
        data_ = reinterpret_cast<const __m512i*>(weights_ + block * block_bytes(8)), tile_ = tile;
        const int64_t idx = block * groups_per_block_ * kLanes;
        affine_[0] = affine_[1] = {scales_[idx], mins_[idx]};
        if (groups_per_block_ == 2) affine_[1] = {scales_[idx + kLanes], mins_[idx + kLanes]};
    }
    INLINE void part(int quarter) const {
        const __m512i exponent = _mm512_set1_epi16(0x6400);  // with q in the mantissa: 1024 + q
        const auto value = [&](__m512i q) {
            return affine_[quarter / 2].to_bf16(_mm512_sub_ph(_mm512_castsi512_ph(q), offset_));
        };
        for (int j = 2 * quarter; j < 2 * quarter + 2; ++j) {
            const __m512i v = _mm512_loadu_si512(data_ + j);
            tile_[2 * j] = value(_mm512_ternarylogic_epi32(v, _mm512_set1_epi16(255), exponent, 0xea));  // bytes 0, 2
            tile_[2 * j + 1] = value(_mm512_or_si512(_mm512_srli_epi16(v, 8), exponent));                // bytes 1, 3
        }
    }
};

#else

template <int Bits>
INLINE __m512 unit_of(const Weight&) {
    return _mm512_set1_ps(1.0f);
}

INLINE __m512i pack_bf16(__m512 even, __m512 odd) {
    // Rounds half away from zero: VCVTNE2PS2BF16 costs as much as all of the rest of the unpacking.
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_add_epi32(_mm512_castps_si512(odd), half));
}

// Integers become floats by being put into a mantissa: (bits of q at `Bit`) | exponent reads as 2^(23 - Bit) + q.
template <int Bit, int Width>
INLINE __m512 in_mantissa(__m512i v) {
    const __m512i mask = _mm512_set1_epi32(((1 << Width) - 1) << Bit);
    const __m512i exponent = _mm512_set1_epi32((127 + 23 - Bit) << 23);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(v, mask, exponent, 0xea));  // (v & mask) | exponent
}

struct Affine {
    __m512 scale, min;
    // Takes back the 2^(23 - bit) of in_mantissa and the zero point.
    INLINE __m512 base(int bit, int zero) const {
        return _mm512_fnmadd_ps(scale, _mm512_set1_ps(float((1 << (23 - bit)) + zero)), min);
    }
};

INLINE Affine load_affine(const Weight& w, int64_t idx) {
    return {load_scales(w.scales, idx, w.wide_scales),
            w.mins ? load_scales(w.mins, idx, w.wide_scales) : _mm512_setzero_ps()};
}

template <>
struct Unpacker<4> {
    const Weight w;
    const __m512i* data;
    __m512i* tile;
    __m512 scale, base12, base16;

    INLINE explicit Unpacker(const Weight& weight) : w(weight) {}
    INLINE void start(int64_t block, __m512i* into) {
        data = reinterpret_cast<const __m512i*>(w.data + block * block_bytes(4)), tile = into;
        const Affine a = load_affine(w, block * kLanes);
        scale = a.scale, base12 = a.base(12, w.zero), base16 = a.base(16, w.zero);
    }
    INLINE __m512 at12(__m512i v) const { return _mm512_fmadd_ps(in_mantissa<12, 4>(v), scale, base12); }
    INLINE __m512 at16(__m512i v) const { return _mm512_fmadd_ps(in_mantissa<16, 4>(v), scale, base16); }
    INLINE void part(int j) const {
        const __m512i v = _mm512_loadu_si512(data + j);
        const __m512i up12 = _mm512_slli_epi32(v, 12), up4 = _mm512_slli_epi32(v, 4);
        const __m512i down8 = _mm512_srli_epi32(v, 8), down12 = _mm512_srli_epi32(v, 12);
        tile[2 * j] = pack_bf16(at12(up12), at16(v));                // low nibbles of bytes 0, 2
        tile[2 * j + 1] = pack_bf16(at12(up4), at16(down8));         // low nibbles of bytes 1, 3
        tile[8 + 2 * j] = pack_bf16(at16(up12), at12(down8));        // high nibbles of bytes 0, 2
        tile[8 + 2 * j + 1] = pack_bf16(at12(v), at16(down12));      // high nibbles of bytes 1, 3
    }
};

template <>
struct Unpacker<8> {
    const Weight w;
    const __m512i* data;
    __m512i* tile;
    __m512 scale[2], base[2];  // of the halves of the block: equal for groups of 32

    INLINE explicit Unpacker(const Weight& weight) : w(weight) {}
    INLINE void start(int64_t block, __m512i* into) {
        data = reinterpret_cast<const __m512i*>(w.data + block * block_bytes(8)), tile = into;
        const int groups_per_block = kBlock / w.group;
        for (int half = 0; half < 2; ++half) {
            const Affine a = load_affine(w, (block * groups_per_block + half * (groups_per_block - 1)) * kLanes);
            scale[half] = a.scale, base[half] = a.base(8, w.zero);
        }
    }
    INLINE void part(int quarter) const {
        const int half = quarter / 2;
        const auto value = [&](__m512i v) { return _mm512_fmadd_ps(in_mantissa<8, 8>(v), scale[half], base[half]); };
        for (int j = 2 * quarter; j < 2 * quarter + 2; ++j) {
            const __m512i v = _mm512_loadu_si512(data + j);
            tile[2 * j] = pack_bf16(value(_mm512_slli_epi32(v, 8)), value(_mm512_srli_epi32(v, 8)));
            tile[2 * j + 1] = pack_bf16(value(v), value(_mm512_srli_epi32(v, 16)));
        }
    }
};

#endif

template <>
struct Unpacker<16> {  // nothing to unpack: fetches the tile into the cache
    const uint8_t *weights, *data;
    INLINE explicit Unpacker(const Weight& w) : weights(w.data) {}
    INLINE void start(int64_t block, __m512i*) { data = weights + block * block_bytes(16); }
    INLINE void part(int j) const {
        for (int i = 0; i < 4; ++i) _mm_prefetch(reinterpret_cast<const char*>(data + 256 * j + 64 * i), _MM_HINT_T1);
    }
};

}  // namespace
