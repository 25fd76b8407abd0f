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

// Makes the bf16 tiles of a panel, block by block, each in four parts, so that they can be strewn between tile products.
template <int Kind>
class Unpacker;

INLINE __m512i pack_bf16(__m512 even, __m512 odd) {
    // Rounds half away from zero: VCVTNE2PS2BF16 costs as much as all of the rest of the unpacking.
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_add_epi32(_mm512_castps_si512(odd), half));
}

// Where the bf16 tiles of (some blocks of) a panel are, or will be.
struct Panel {
    int idx;
    Range blocks;
    __m512i* tiles;
};

INLINE const uint8_t* panel_data(const Weight& w, int bits, const Panel& panel) {
    return w.data + (int64_t(panel.idx) * (w.k / kBlock) + panel.blocks.begin) * block_bytes(bits);
}

#ifdef __AVX512FP16__

// What the sums of products with unpacked weights are to be multiplied by.
template <int Kind>
INLINE __m512 unit_of(const Weight& w) {
    return _mm512_castsi512_ps(_mm512_set1_epi32((127 + (Kind == 16 || Kind == kFloatTable ? 0 : 112 - w.shift)) << 23));
}

// The same in float16, times 2^shift, each in both halves of its 32-bit lane.
struct HalfAffine {
    __m512h scale, min;

    INLINE __m512i to_bf16(__m512h q) const {
        const __m512h value = _mm512_fmadd_round_ph(q, scale, min, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
        // (bits + 4) >> 3 with the sign spread over the upper bits, of which all but one are cleared.
        const __m512i shifted = _mm512_mulhrs_epi16(_mm512_castph_si512(value), _mm512_set1_epi16(1 << 12));
        return _mm512_and_si512(shifted, _mm512_set1_epi16(int16_t(0x8fff)));
    }
};

class HalfAffines {
    const __m512 *scales_, *mins_;

   public:
    HalfAffines(const Weight& w, const Panel& panel, Scratch& scratch) {
        const Affines wide = expand(w, panel.idx, panel.blocks, scratch);
        const int num_steps = (panel.blocks.end - panel.blocks.begin) * steps_per_block(w);
        const __m512 up = _mm512_castsi512_ps(_mm512_set1_epi32((127 + w.shift) << 23));
        for (__m512* values : {wide.scales, wide.mins}) {
            for (int i = 0; values && i < num_steps; ++i) {
                const __m256i halves = _mm512_cvtps_ph(_mm512_mul_ps(values[i], up), _MM_FROUND_TO_NEAREST_INT);
                const __m512i lanes = _mm512_cvtepu16_epi32(halves);
                values[i] = _mm512_castsi512_ps(_mm512_or_si512(lanes, _mm512_slli_epi32(lanes, 16)));
            }
        }
        scales_ = wide.scales, mins_ = wide.mins;
    }
    INLINE HalfAffine operator[](int step) const {
        return {_mm512_castps_ph(scales_[step]), mins_ ? _mm512_castps_ph(mins_[step]) : _mm512_setzero_ph()};
    }
};

template <>
class Unpacker<4> {
    const uint8_t* data_;
    const HalfAffines affines_;
    const __m512h offset0_, offset4_;
    const int per_block_;
    const __m512i* block_;
    __m512i* tile_;
    HalfAffine affine_[2];  // of the halves of the block: low and high nibbles

    // q at bit `Bit` of the mantissa reads as 2^(10 - Bit) + q.
    template <int Bit>
    INLINE __m512i nibbles(__m512i v) const {
        const __m512i mask = _mm512_set1_epi16(15 << Bit), exponent = _mm512_set1_epi16((15 + 10 - Bit) << 10);
        const __m512h q = _mm512_castsi512_ph(_mm512_ternarylogic_epi32(v, mask, exponent, 0xea));
        return affine_[Bit / 4].to_bf16(_mm512_sub_ph(q, Bit ? offset4_ : offset0_));
    }

   public:
    INLINE Unpacker(const Weight& w, const Panel& panel, Scratch& scratch)
        : data_(panel_data(w, 4, panel)), affines_(w, panel, scratch),
          offset0_(_mm512_set1_ph(_Float16(1024 + w.zero))), offset4_(_mm512_set1_ph(_Float16(64 + w.zero))),
          per_block_(steps_per_block(w)) {}
    INLINE void start(int b, __m512i* tile) {
        block_ = reinterpret_cast<const __m512i*>(data_ + b * block_bytes(4)), tile_ = tile;
        affine_[0] = affines_[b * per_block_], affine_[1] = affines_[(b + 1) * per_block_ - 1];
    }
    INLINE void part(int j) const {
        const __m512i v = _mm512_loadu_si512(block_ + j);
        const __m512i down8 = _mm512_srli_epi16(v, 8);
        tile_[2 * j] = nibbles<0>(v);              // low nibbles of bytes 0, 2
        tile_[8 + 2 * j] = nibbles<4>(v);          // high ones
        tile_[2 * j + 1] = nibbles<0>(down8);      // low nibbles of bytes 1, 3
        tile_[8 + 2 * j + 1] = nibbles<4>(down8);  // high ones
    }
};

// Bytes in 32-bit lanes become bf16: bytes 0, 2 of each, then 1, 3.
class Bytes {
    const __m512h offset_;

   public:
    using Factors = HalfAffine;
    using AllFactors = HalfAffines;
    INLINE explicit Bytes(const Weight& w) : offset_(_mm512_set1_ph(_Float16(1024 + w.zero))) {}
    INLINE void convert(__m512i v, const Factors& factors, __m512i* out) const {
        const __m512i exponent = _mm512_set1_epi16(0x6400);  // with q in the mantissa: 1024 + q
        const auto value = [&](__m512i q) { return factors.to_bf16(_mm512_sub_ph(_mm512_castsi512_ph(q), offset_)); };
        out[0] = value(_mm512_ternarylogic_epi32(v, _mm512_set1_epi16(255), exponent, 0xea));
        out[1] = value(_mm512_or_si512(_mm512_srli_epi16(v, 8), exponent));
    }
};

#else

template <int Kind>
INLINE __m512 unit_of(const Weight&) {
    return _mm512_set1_ps(1.0f);
}

// Integers become floats by being put into a mantissa: (bits of q at `Bit`) | exponent reads as 2^(23 - Bit) + q.
template <int Bit, int Width>
INLINE __m512 in_mantissa(__m512i v) {
    const __m512i mask = _mm512_set1_epi32(((1 << Width) - 1) << Bit);
    const __m512i exponent = _mm512_set1_epi32((127 + 23 - Bit) << 23);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(v, mask, exponent, 0xea));  // (v & mask) | exponent
}

// The weight whose code is at `Bit`. What in_mantissa adds goes first, exactly.
template <int Bit, int Width>
INLINE __m512 weight_at(__m512i v, const Affine& affine, int zero) {
    const __m512 code = _mm512_sub_ps(in_mantissa<Bit, Width>(v), _mm512_set1_ps(float((1 << (23 - Bit)) + zero)));
    return _mm512_fmadd_ps(code, affine.scale, affine.min);
}

template <>
class Unpacker<4> {
    const uint8_t* data_;
    const int zero_, per_block_;
    const Affines affines_;
    const __m512i* block_;
    __m512i* tile_;
    Affine affine_[2];  // of the halves of the block: low and high nibbles

    INLINE __m512 at12(__m512i v, int half) const { return weight_at<12, 4>(v, affine_[half], zero_); }
    INLINE __m512 at16(__m512i v, int half) const { return weight_at<16, 4>(v, affine_[half], zero_); }

   public:
    INLINE Unpacker(const Weight& w, const Panel& panel, Scratch& scratch)
        : data_(panel_data(w, 4, panel)), zero_(w.zero), per_block_(steps_per_block(w)),
          affines_(expand(w, panel.idx, panel.blocks, scratch)) {}
    INLINE void start(int b, __m512i* tile) {
        block_ = reinterpret_cast<const __m512i*>(data_ + b * block_bytes(4)), tile_ = tile;
        affine_[0] = affines_[b * per_block_], affine_[1] = affines_[(b + 1) * per_block_ - 1];
    }
    INLINE void part(int j) const {
        const __m512i v = _mm512_loadu_si512(block_ + j);
        const __m512i up12 = _mm512_slli_epi32(v, 12), up4 = _mm512_slli_epi32(v, 4);
        const __m512i down8 = _mm512_srli_epi32(v, 8), down12 = _mm512_srli_epi32(v, 12);
        tile_[2 * j] = pack_bf16(at12(up12, 0), at16(v, 0));            // low nibbles of bytes 0, 2
        tile_[2 * j + 1] = pack_bf16(at12(up4, 0), at16(down8, 0));     // low nibbles of bytes 1, 3
        tile_[8 + 2 * j] = pack_bf16(at16(up12, 1), at12(down8, 1));    // high nibbles of bytes 0, 2
        tile_[8 + 2 * j + 1] = pack_bf16(at12(v, 1), at16(down12, 1));  // high nibbles of bytes 1, 3
    }
};

// Bytes in 32-bit lanes become bf16: bytes 0, 2 of each, then 1, 3.
class Bytes {
    const int zero_;

   public:
    using Factors = Affine;
    class AllFactors {
        const Affines affines_;

       public:
        INLINE AllFactors(const Weight& w, const Panel& panel, Scratch& scratch)
            : affines_(expand(w, panel.idx, panel.blocks, scratch)) {}
        INLINE Factors operator[](int step) const { return affines_[step]; }
    };
    INLINE explicit Bytes(const Weight& w) : zero_(w.zero) {}
    INLINE void convert(__m512i v, const Factors& affine, __m512i* out) const {
        const auto value = [&](__m512i v) { return weight_at<8, 8>(v, affine, zero_); };
        out[0] = pack_bf16(value(_mm512_slli_epi32(v, 8)), value(_mm512_srli_epi32(v, 8)));
        out[1] = pack_bf16(value(v), value(_mm512_srli_epi32(v, 16)));
    }
};

#endif

// Codes that become bytes first: all whole numbers but those of 4 bits, and 4 bits that stand for one of sixteen bytes.
template <int Kind>
class Unpacker {
    const uint8_t* data_;
    const Bytes bytes_;
    const Bytes::AllFactors all_factors_;
    const int per_block_;
    const __m512i table_;
    const uint8_t* block_;
    __m512i* tile_;
    Bytes::Factors factors_[2];  // of the halves of the block

    template <int J>
    INLINE void vector() const {
        bytes_.convert(codes_of<Kind, J>(block_, table_), factors_[J / 4], tile_ + 2 * J);
    }

   public:
    INLINE Unpacker(const Weight& w, const Panel& panel, Scratch& scratch)
        : data_(panel_data(w, bits_of(Kind), panel)), bytes_(w), all_factors_(w, panel, scratch),
          per_block_(steps_per_block(w)), table_(byte_table(w)) {}
    INLINE void start(int b, __m512i* tile) {
        block_ = data_ + b * block_bytes(bits_of(Kind)), tile_ = tile;
        factors_[0] = all_factors_[b * per_block_], factors_[1] = all_factors_[(b + 1) * per_block_ - 1];
    }
    INLINE void part(int quarter) const {
        switch (quarter) {
            case 0: return vector<0>(), vector<1>();
            case 1: return vector<2>(), vector<3>();
            case 2: return vector<4>(), vector<5>();
            default: return vector<6>(), vector<7>();
        }
    }
};

// 4 bits that stand for one of sixteen floats.
template <>
class Unpacker<kFloatTable> {
    const uint8_t* data_;
    const Affines affines_;
    const int per_block_;
    const __m512 table_;
    const __m512i* block_;
    __m512i* tile_;
    __m512 scales_[2];  // of the halves of the block

    // The values of the nibbles at two places of each lane, times the scale.
    INLINE __m512i values(__m512i even, __m512i odd, int half) const {
        const auto value = [&](__m512i v) { return _mm512_mul_ps(_mm512_permutexvar_ps(v, table_), scales_[half]); };
        return pack_bf16(value(even), value(odd));
    }

   public:
    INLINE Unpacker(const Weight& w, const Panel& panel, Scratch& scratch)
        : data_(panel_data(w, 4, panel)), affines_(expand(w, panel.idx, panel.blocks, scratch)),
          per_block_(steps_per_block(w)), table_(_mm512_loadu_ps(w.table)) {}
    INLINE void start(int b, __m512i* tile) {
        block_ = reinterpret_cast<const __m512i*>(data_ + b * block_bytes(4)), tile_ = tile;
        scales_[0] = affines_[b * per_block_].scale, scales_[1] = affines_[(b + 1) * per_block_ - 1].scale;
    }
    INLINE void part(int j) const {
        const __m512i v = _mm512_loadu_si512(block_ + j);
        tile_[2 * j] = values(v, _mm512_srli_epi32(v, 16), 0);                                  // low, bytes 0, 2
        tile_[2 * j + 1] = values(_mm512_srli_epi32(v, 8), _mm512_srli_epi32(v, 24), 0);        // low, bytes 1, 3
        tile_[8 + 2 * j] = values(_mm512_srli_epi32(v, 4), _mm512_srli_epi32(v, 20), 1);        // high, bytes 0, 2
        tile_[8 + 2 * j + 1] = values(_mm512_srli_epi32(v, 12), _mm512_srli_epi32(v, 28), 1);   // high, bytes 1, 3
    }
};

template <>
class Unpacker<16> {  // nothing to unpack: fetches the tile into the cache
    const uint8_t *data_, *block_;

   public:
    INLINE Unpacker(const Weight& w, const Panel& panel, Scratch&) : data_(panel_data(w, 16, panel)) {}
    INLINE void start(int b, __m512i*) { block_ = data_ + b * block_bytes(16); }
    INLINE void part(int j) const {
        for (int i = 0; i < 4; ++i) _mm_prefetch(reinterpret_cast<const char*>(block_ + 256 * j + 64 * i), _MM_HINT_T1);
    }
};

}  // namespace
