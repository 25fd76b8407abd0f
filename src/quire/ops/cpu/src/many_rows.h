// Many rows: panels become bf16 tiles in scratch once per call and serve all rows. AMX multiplies, or VDPBF16PS.
//
//     for each group of pairs of panels, of a thread's share
//         for each strip of 32 rows
//             for each pair of the group
//                 for each block of K: four products on four loaded tiles, and a block of the next group is unpacked
//
// The tile unit and the vector units work at the same time. A strip's activations stay in the first-level cache while
// the tiles of the group pass by from the second, and each row gets its outputs in runs of several cache lines.

#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "packed.h"

namespace {

inline __m512i pack_bf16(__m512 even, __m512 odd) {
    // Rounds half away from zero: VCVTNE2PS2BF16 costs as much as all of the rest of the unpacking.
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_add_epi32(_mm512_castps_si512(odd), half));
}

// Integers become floats by being put into a mantissa: (bits of q at `Bit`) | exponent reads as 2^(23 - Bit) + q.
template <int Bit, int Width>
inline __m512 in_mantissa(__m512i v) {
    const __m512i mask = _mm512_set1_epi32(((1 << Width) - 1) << Bit);
    const __m512i exponent = _mm512_set1_epi32((127 + 23 - Bit) << 23);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(v, mask, exponent, 0xea));  // (v & mask) | exponent
}

struct Affine {
    __m512 scale, min;
    // Takes back the 2^(23 - bit) of in_mantissa and the zero point.
    inline __m512 base(int bit, int zero) const {
        return _mm512_fnmadd_ps(scale, _mm512_set1_ps(float((1 << (23 - bit)) + zero)), min);
    }
};

inline Affine load_affine(const Weight& w, int64_t idx) {
    return {load_scales(w.scales, idx, w.wide_scales),
            w.mins ? load_scales(w.mins, idx, w.wide_scales) : _mm512_setzero_ps()};
}

// Makes the bf16 tile of a block in four parts, so that they can be strewn between tile products.
template <int Bits>
struct Unpacker;

template <>
struct Unpacker<4> {
    const __m512i* data;
    __m512i* tile;
    __m512 scale, base12, base16;

    inline void start(const Weight& w, int64_t block, __m512i* into) {
        data = reinterpret_cast<const __m512i*>(w.data + block * block_bytes(4)), tile = into;
        const Affine a = load_affine(w, block * kLanes);
        scale = a.scale, base12 = a.base(12, w.zero), base16 = a.base(16, w.zero);
    }
    inline __m512 at12(__m512i v) const { return _mm512_fmadd_ps(in_mantissa<12, 4>(v), scale, base12); }
    inline __m512 at16(__m512i v) const { return _mm512_fmadd_ps(in_mantissa<16, 4>(v), scale, base16); }
    inline void part(int j) const {
        const __m512i v = _mm512_loadu_si512(data + j);
        const __m512i up12 = _mm512_slli_epi32(v, 12), up4 = _mm512_slli_epi32(v, 4);
        const __m512i down8 = _mm512_srli_epi32(v, 8), down12 = _mm512_srli_epi32(v, 12);
        tile[2 * j] = pack_bf16(at12(up12), at12(up4));              // low nibbles of bytes 0, 1
        tile[2 * j + 1] = pack_bf16(at16(v), at16(down8));           // low nibbles of bytes 2, 3
        tile[8 + 2 * j] = pack_bf16(at16(up12), at12(v));            // high nibbles of bytes 0, 1
        tile[8 + 2 * j + 1] = pack_bf16(at12(down8), at16(down12));  // high nibbles of bytes 2, 3
    }
};

template <>
struct Unpacker<8> {
    const __m512i* data;
    __m512i* tile;
    __m512 scale[2], base[2];  // of the halves of the block: equal for groups of 32

    inline void start(const Weight& w, int64_t block, __m512i* into) {
        data = reinterpret_cast<const __m512i*>(w.data + block * block_bytes(8)), tile = into;
        const int groups_per_block = kBlock / w.group;
        for (int half = 0; half < 2; ++half) {
            const Affine a = load_affine(w, (block * groups_per_block + half * (groups_per_block - 1)) * kLanes);
            scale[half] = a.scale, base[half] = a.base(8, w.zero);
        }
    }
    inline void part(int quarter) const {
        const int half = quarter / 2;
        const auto value = [&](__m512i v) { return _mm512_fmadd_ps(in_mantissa<8, 8>(v), scale[half], base[half]); };
        for (int j = 2 * quarter; j < 2 * quarter + 2; ++j) {
            const __m512i v = _mm512_loadu_si512(data + j);
            tile[2 * j] = pack_bf16(value(_mm512_slli_epi32(v, 8)), value(v));
            tile[2 * j + 1] = pack_bf16(value(_mm512_srli_epi32(v, 8)), value(_mm512_srli_epi32(v, 16)));
        }
    }
};

template <>
struct Unpacker<16> {  // nothing to unpack: fetches the tile into the cache
    const uint8_t* data;
    inline void start(const Weight& w, int64_t block, __m512i*) { data = w.data + block * block_bytes(16); }
    inline void part(int j) const {
        for (int i = 0; i < 4; ++i) _mm_prefetch(reinterpret_cast<const char*>(data + 256 * j + 64 * i), _MM_HINT_T1);
    }
};

constexpr int kStripTiles = 2, kStripRows = kStripTiles * kLanes;

// Rows of x as AMX A tiles, [strip of up to 32 rows][block][row tile][16 rows][32], rows beyond the last zero: in the
// order the products read them. Each thread copies its share.
void tile_rows(const Job& job, int k, uint16_t* tiles) {
    const int num_blocks = k / kBlock, num_tiles = (job.rows + kLanes - 1) / kLanes;
    const Range mine = my_share(num_tiles * num_blocks);
    for (int unit = mine.begin; unit < mine.end; ++unit) {
        const int strip = unit / (num_blocks * kStripTiles);
        const int width = std::min(kStripTiles, num_tiles - strip * kStripTiles);
        const int inside = unit - strip * num_blocks * kStripTiles, block = inside / width;
        const int first = (strip * kStripTiles + inside % width) * kLanes;
        const uint16_t* from = job.x + int64_t(first) * k + block * kBlock;
        uint16_t* to = tiles + int64_t(unit) * kLanes * kBlock;
        for (int r = 0; r < kLanes; ++r)
            _mm512_store_si512(to + r * kBlock, first + r < job.rows ? _mm512_loadu_si512(from + int64_t(r) * k)
                                                                     : _mm512_setzero_si512());
    }
}

// A panel and where its bf16 tiles are (or will be).
struct Panel {
    int idx;
    __m512i* tiles;
};

// A pair of panels against up to 32 rows, while up to two panels of the next group get unpacked.
struct Strip {
    const uint16_t* x;
    int first_row;
    Panel left, right;  // the right one may lie beyond the last: then computed from the left tiles, not stored
    Panel next[2];
    int num_next;
};

// Fetches the output lines of a strip for writing, a few with each block: stores that miss would hold up the products.
class OutputPrefetch {
    const char* line_;
    int64_t row_bytes_;
    int rows_per_block_;

   public:
    OutputPrefetch(const Weight& w, const Job& job, const Strip& strip) {
        const int bytes = job.out_is_f32 ? 4 : 2;
        row_bytes_ = int64_t(w.n) * bytes;
        line_ = static_cast<const char*>(job.out) + strip.first_row * row_bytes_ + strip.left.idx * kLanes * bytes;
        rows_per_block_ = (kStripRows * kBlock + w.k - 1) / w.k;
    }
    inline void block() {
        for (int i = 0; i < rows_per_block_; ++i, line_ += row_bytes_) __builtin_prefetch(line_, 1);
    }
};

// The unpacking that goes with a strip, block by block.
template <int Bits, int Num>
struct Unpacking {
    Unpacker<Bits> panels[Num + 1];

    inline void start(const Weight& w, const Panel* next, int b) {
        for (int i = 0; i < Num; ++i)
            panels[i].start(w, int64_t(next[i].idx) * (w.k / kBlock) + b, next[i].tiles + b * kLanes);
    }
    inline void part(int j) const {
        for (int i = 0; i < Num; ++i) panels[i].part(j);
    }
};

template <int Bits>
void unpack_panel(const Weight& w, const Panel& panel) {
    Unpacking<Bits, 1> unpacking;
    for (int b = 0; b < w.k / kBlock; ++b) {
        unpacking.start(w, &panel, b);
        for (int j = 0; j < 4; ++j) unpacking.part(j);
    }
}

#ifdef __AMX_BF16__

bool amx_allowed() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return allowed;
}

// gcc's tile intrinsics do not say what memory they touch.
inline void compiler_fence() { asm volatile("" ::: "memory"); }

// Eight tiles of 16 x 64 bytes for this thread while it lives. What was configured before comes back: oneDNN runs on
// the same threads, remembers what it configured last and does not do it again.
class TileConfig {
    struct alignas(64) Config {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } before_;

   public:
    TileConfig() {
        _tile_storeconfig(&before_);
        Config config = {};
        config.palette = 1;
        for (int tile = 0; tile < 8; ++tile) config.row_bytes[tile] = 64, config.rows[tile] = 16;
        asm volatile("" ::"r"(&config), "r"(&before_) : "memory");
        _tile_loadconfig(&config);
    }
    ~TileConfig() {
        asm volatile("" ::"r"(&before_) : "memory");
        if (before_.palette)
            _tile_loadconfig(&before_);
        else
            _tile_release();
    }
};

// Loads come first: as fast on a quiet core, a tenth faster on one that others keep busy. Weights take streaming loads,
// so that the activations stay in the first-level cache.
template <int Bits, int Tiles, int NumNext>
void multiply(const Weight& w, const Job& job, const Strip& strip) {
    constexpr int kTile = kLanes * kBlock;
    Unpacking<Bits, NumNext> unpacking;
    OutputPrefetch outputs(w, job, strip);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int b = 0; b < w.k / kBlock; ++b) {
        const uint16_t* x = strip.x + int64_t(b) * Tiles * kTile;
        unpacking.start(w, strip.next, b);
        compiler_fence();
        _tile_stream_loadd(6, strip.left.tiles + b * kLanes, 64);
        _tile_loadd(4, x, 64);
        _tile_stream_loadd(7, strip.right.tiles + b * kLanes, 64);
        if constexpr (Tiles == 2) _tile_loadd(5, x + kTile, 64);
        _tile_dpbf16ps(0, 4, 6);
        unpacking.part(0);
        _tile_dpbf16ps(1, 4, 7);
        unpacking.part(1);
        if constexpr (Tiles == 2) _tile_dpbf16ps(2, 5, 6);
        unpacking.part(2);
        if constexpr (Tiles == 2) _tile_dpbf16ps(3, 5, 7);
        unpacking.part(3);
        outputs.block();
    }
    alignas(64) float sums[Tiles * kLanes][2][kLanes];
    constexpr int kStride = sizeof sums[0];
    _tile_stored(0, sums[0][0], kStride);
    _tile_stored(1, sums[0][1], kStride);
    if constexpr (Tiles == 2) {
        _tile_stored(2, sums[kLanes][0], kStride);
        _tile_stored(3, sums[kLanes][1], kStride);
    }
    compiler_fence();
    const int num_rows = std::min(Tiles * kLanes, job.rows - strip.first_row);
    for (int r = 0; r < num_rows; ++r)
        store_pair(w, job, strip.first_row + r, strip.left.idx, _mm512_load_ps(sums[r][0]), _mm512_load_ps(sums[r][1]));
}

#else

bool amx_allowed() { return true; }

struct TileConfig {
    TileConfig() {}
};

template <int Bits, int Tiles, int NumNext>
void multiply(const Weight& w, const Job& job, const Strip& strip) {
    const int num_rows = std::min(Tiles * kLanes, job.rows - strip.first_row);
    constexpr int kAtOnce = 8;
    for (int first = 0; first < num_rows; first += kAtOnce) {
        __m512 left[kAtOnce] = {}, right[kAtOnce] = {};
        for (int pair = 0; pair < w.k / 2; ++pair) {
            const auto left_weights = (__m512bh)strip.left.tiles[pair];
            const auto right_weights = (__m512bh)strip.right.tiles[pair];
            const uint16_t* x = strip.x + (int64_t(pair / 16) * Tiles * kLanes + first) * kBlock + pair % 16 * 2;
            for (int r = 0; r < kAtOnce; ++r) {
                int32_t two;
                std::memcpy(&two, x + r * kBlock, 4);
                const auto values = (__m512bh)_mm512_set1_epi32(two);
                left[r] = _mm512_dpbf16_ps(left[r], left_weights, values);
                right[r] = _mm512_dpbf16_ps(right[r], right_weights, values);
            }
        }
        for (int r = 0; r < kAtOnce && first + r < num_rows; ++r)
            store_pair(w, job, strip.first_row + first + r, strip.left.idx, left[r], right[r]);
    }
    for (int i = 0; i < NumNext; ++i) unpack_panel<Bits>(w, strip.next[i]);
}

#endif

template <int Bits, int Tiles>
void multiply(const Weight& w, const Job& job, const Strip& strip) {
    switch (strip.num_next) {
        case 0: return multiply<Bits, Tiles, 0>(w, job, strip);
        case 1: return multiply<Bits, Tiles, 1>(w, job, strip);
        default: return multiply<Bits, Tiles, 2>(w, job, strip);
    }
}

// Panels that are unpacked together, next to each other in `tiles`.
struct Group {
    int begin, end;
    __m512i* tiles;
};

// How many pairs make a group: two groups' tiles may take 5/8 of a second-level cache of 2 MiB. The first group is
// unpacked while nothing is multiplied, so few rows get small ones.
inline int pairs_at_once(int k, int num_strips) {
    constexpr int kGroupBytes = 640 << 10;
    return std::max(1, std::min(kGroupBytes / (2 * kLanes * 2 * k), num_strips / 2));
}

// The panels of a group against all rows, while those of the next one get unpacked: one with each strip and pair,
// or two where there is only one strip.
template <int Bits>
void multiply_group(const Weight& w, const Job& job, const uint16_t* x, const Group& group, const Group& next) {
    const int num_tiles = (job.rows + kLanes - 1) / kLanes, per_strip = num_tiles <= kStripTiles ? 2 : 1;
    const int64_t panel_vectors = w.k / 2;
    const auto panel_of = [&](const Group& g, int idx) -> Panel {
        return {idx, g.tiles + (std::min(idx, g.end - 1) - g.begin) * panel_vectors};
    };
    int unpacked = next.begin;
    for (int tile = 0; tile < num_tiles; tile += kStripTiles) {
        for (int idx = group.begin; idx < group.end; idx += 2) {
            Strip strip = {};
            strip.x = x + int64_t(tile) * kLanes * w.k, strip.first_row = tile * kLanes;
            strip.left = panel_of(group, idx), strip.right = panel_of(group, idx + 1);
            while (strip.num_next < per_strip && unpacked < next.end)
                strip.next[strip.num_next++] = panel_of(next, unpacked++);
            if (num_tiles - tile == 1)
                multiply<Bits, 1>(w, job, strip);
            else
                multiply<Bits, 2>(w, job, strip);
        }
    }
}

// A thread's share of the pairs, group by group.
template <int Bits>
void multiply_pairs(const Weight& w, const Job& job, const uint16_t* x, Range pairs, int at_once) {
    const int num_panels = (w.n + kLanes - 1) / kLanes;
    const int64_t panel_vectors = w.k / 2, group_vectors = 2 * at_once * panel_vectors;
    auto* weights = reinterpret_cast<__m512i*>(const_cast<uint8_t*>(w.data));
    auto* scratch = static_cast<__m512i*>(Bits == 16 ? nullptr : panel_scratch.get(2 * group_vectors * 64));
    const auto group_at = [&](int pair, int parity) -> Group {
        const int begin = 2 * pair, end = std::min(2 * std::min(pair + at_once, pairs.end), num_panels);
        return {begin, end, Bits == 16 ? weights + begin * panel_vectors : scratch + parity * group_vectors};
    };
    Group group = group_at(pairs.begin, 0);
    for (int idx = group.begin; idx < group.end; ++idx)
        unpack_panel<Bits>(w, {idx, group.tiles + (idx - group.begin) * panel_vectors});
    for (int pair = pairs.begin, parity = 1; pair < pairs.end; pair += at_once, parity ^= 1) {
        const Group next = group_at(pair + at_once, parity);
        multiply_group<Bits>(w, job, x, group, next);
        group = next;
    }
}

template <int Bits>
void many_rows(const Weight& w, const Job& job) {
    const int num_pairs = (w.n + 2 * kLanes - 1) / (2 * kLanes), num_strips = (job.rows + kStripRows - 1) / kStripRows;
    auto* x = static_cast<uint16_t*>(rows_scratch.get(size_t(num_strips) * kStripRows * w.k * 2));
#pragma omp parallel
    {
        tile_rows(job, w.k, x);
#pragma omp barrier
        const Range pairs = my_share(num_pairs);
        if (pairs.begin < pairs.end) {
            const TileConfig configured;
            multiply_pairs<Bits>(w, job, x, pairs, pairs_at_once(w.k, num_strips));
        }
    }
}

}  // namespace
