// Many rows: panels become bf16 tiles in scratch once per call and serve all rows. AMX multiplies, or VDPBF16PS, or float32 does.
//
//     for each group of pairs of panels that a thread claims
//         for each strip of 32 rows
//             for each pair of the group
//                 for each block of K: four products on four loaded tiles, and a block of the next group is unpacked
//
// The tile unit and the vector units work at the same time. A strip's activations stay in the first-level cache while
// the tiles of the group pass by from the second, and each row gets its outputs in runs of several cache lines. With
// one or two strips it is the other way round: a group is a chunk of one pair, a few blocks of K, which stays there.

#pragma once

#include "unpack.h"

namespace {

constexpr int kStripTiles = 2, kStripRows = kStripTiles * kLanes;

// Where only a strip or two use unpacked tiles, these shall not leave the first-level cache: K comes in chunks then.
#ifdef __AMX_BF16__
constexpr int kChunkedStrips = 2, kChunkBlocks = 6;
#else
constexpr int kChunkedStrips = 0, kChunkBlocks = 0;
#endif

// A pair of panels against up to 32 rows, while up to two panels of the next group get unpacked.
struct Strip {
    const uint16_t* x[kStripTiles];  // sixteen rows each
    int first_row, pair;
    Range blocks;
    const __m512i *left, *right;  // tiles
    Panel next[2];
    int num_next;
    float* sums;  // where they wait for the next chunk; null: in the tile registers, no other strip needs these
};

// Fetches the output lines of a strip for writing, a few with each block: stores that miss would hold up the products.
class OutputPrefetch {
    const char* line_;
    int64_t row_bytes_;
    int rows_per_block_;
    bool two_lines_;

   public:
    INLINE OutputPrefetch(const Weight& w, const Job& job, const Strip& strip) : two_lines_(job.out_is_f32) {
        const int bytes = job.out_is_f32 ? 4 : 2, parts = job.gated ? 2 : 1;
        row_bytes_ = job.out_stride * bytes;
        const int64_t column = strip.pair * (2 * kLanes / parts);
        line_ = static_cast<const char*>(job.out) + strip.first_row * row_bytes_ + column * bytes;
        const int num_blocks = strip.blocks.end - strip.blocks.begin;
        rows_per_block_ = strip.blocks.end * kBlock == w.k ? (kStripRows + num_blocks - 1) / num_blocks : 0;
    }
    INLINE void block() {
        for (int i = 0; i < rows_per_block_; ++i, line_ += row_bytes_) {
            __builtin_prefetch(line_, 1);
            if (two_lines_) __builtin_prefetch(line_ + 64, 1);
        }
    }
};

// The unpacking of one panel, block by block.
template <int Kind>
class Unpacking {
    Unpacker<Kind> unpacker_;
    __m512i* tiles_;

   public:
    INLINE Unpacking(const Weight& w, const Panel& panel, int scratch_idx = 0)
        : unpacker_(w, panel, scale_scratch[scratch_idx]), tiles_(panel.tiles) {}
    INLINE void start(int b) { unpacker_.start(b, tiles_ + b * kLanes); }
    INLINE void part(int j) const { unpacker_.part(j); }
};

template <int Kind>
void unpack_panel(const Weight& w, const Panel& panel) {
    Unpacking<Kind> unpacking(w, panel);
    for (int b = 0; b < panel.blocks.end - panel.blocks.begin; ++b) {
        unpacking.start(b);
        for (int j = 0; j < 4; ++j) unpacking.part(j);
    }
}

#ifdef __AMX_BF16__

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

// Loads come first: as fast on a quiet core, a tenth faster on one that others keep busy. What shall not take the room
// of the rest in the first-level cache takes streaming loads: weights, or, where these come in chunks, activations.
template <int Kind, int Tiles, int NumNext, bool Chunked>
void multiply(const Weight& w, const Job& job, const Strip& strip) {
    Unpacking<Kind> first(w, strip.next[0], 0), second(w, strip.next[1], 1);
    const auto unpack = [&](int j) __attribute__((always_inline)) {
        if constexpr (NumNext > 0) first.part(j);
        if constexpr (NumNext > 1) second.part(j);
    };
    OutputPrefetch outputs(w, job, strip);
    constexpr int kStride = 2 * kLanes * sizeof(float);
    if (strip.blocks.begin == 0) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else if (strip.sums) {
        _tile_loadd(0, strip.sums, kStride);
        _tile_loadd(1, strip.sums + kLanes, kStride);
        if constexpr (Tiles == 2) {
            _tile_loadd(2, strip.sums + 2 * kLanes * kLanes, kStride);
            _tile_loadd(3, strip.sums + 2 * kLanes * kLanes + kLanes, kStride);
        }
    }
    const int row_bytes = w.k * 2;
    const uint16_t *x0 = strip.x[0] + strip.blocks.begin * kBlock, *x1 = strip.x[1] + strip.blocks.begin * kBlock;
    for (int b = 0, num_blocks = strip.blocks.end - strip.blocks.begin; b < num_blocks; ++b, x0 += kBlock, x1 += kBlock) {
        if constexpr (NumNext > 0) first.start(b);
        if constexpr (NumNext > 1) second.start(b);
        compiler_fence();
        const __m512i *left = strip.left + b * kLanes, *right = strip.right + b * kLanes;
        if constexpr (Chunked) {
            _tile_loadd(6, left, 64);
            _tile_stream_loadd(4, x0, row_bytes);
            _tile_loadd(7, right, 64);
            if constexpr (Tiles == 2) _tile_stream_loadd(5, x1, row_bytes);
        } else {
            _tile_stream_loadd(6, left, 64);
            _tile_loadd(4, x0, row_bytes);
            _tile_stream_loadd(7, right, 64);
            if constexpr (Tiles == 2) _tile_loadd(5, x1, row_bytes);
        }
        _tile_dpbf16ps(0, 4, 6);
        unpack(0);
        _tile_dpbf16ps(1, 4, 7);
        unpack(1);
        if constexpr (Tiles == 2) _tile_dpbf16ps(2, 5, 6);
        unpack(2);
        if constexpr (Tiles == 2) _tile_dpbf16ps(3, 5, 7);
        unpack(3);
        outputs.block();
    }
    alignas(64) float last_sums[2 * Tiles * kLanes * kLanes];
    const bool last = strip.blocks.end == w.k / kBlock;
    float* sums = last ? last_sums : strip.sums;
    if (!sums) return;
    _tile_stored(0, sums, kStride);
    _tile_stored(1, sums + kLanes, kStride);
    if constexpr (Tiles == 2) {
        _tile_stored(2, sums + 2 * kLanes * kLanes, kStride);
        _tile_stored(3, sums + 2 * kLanes * kLanes + kLanes, kStride);
    }
    compiler_fence();
    if (!last) return;
    const int num_rows = std::min(Tiles * kLanes, job.rows - strip.first_row);
    const __m512 unit = unit_of<Kind>(w);
    for (int r = 0; r < num_rows; ++r, sums += 2 * kLanes)
        store_pair(w, job, strip.first_row + r, strip.pair, unit * _mm512_load_ps(sums),
                   unit * _mm512_load_ps(sums + kLanes));
}

#else

struct TileConfig {
    TileConfig() {}
};

// Pairs of bf16 in 32-bit lanes. Without instructions for these, both are widened to float32.
#ifdef __AVX512BF16__
struct Pairs {
    __m512bh both;
    INLINE explicit Pairs(__m512i pairs) : both((__m512bh)pairs) {}
};

INLINE __m512 add_products(__m512 sum, const Pairs& a, const Pairs& b) {
    return _mm512_dpbf16_ps(sum, a.both, b.both);
}
#else
struct Pairs {
    __m512 even, odd;
    INLINE explicit Pairs(__m512i pairs)
        : even(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))),
          odd(_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)))) {}
};

INLINE __m512 add_products(__m512 sum, const Pairs& a, const Pairs& b) {
    return _mm512_fmadd_ps(a.odd, b.odd, _mm512_fmadd_ps(a.even, b.even, sum));
}
#endif

template <int Kind, int Tiles, int NumNext, bool Chunked>
void multiply(const Weight& w, const Job& job, const Strip& strip) {
    const int num_rows = std::min(Tiles * kLanes, job.rows - strip.first_row);
    const __m512 unit = unit_of<Kind>(w);
    constexpr int kAtOnce = 8;
    for (int first = 0; first < num_rows; first += kAtOnce) {
        __m512 left[kAtOnce] = {}, right[kAtOnce] = {};
        for (int pair = 0; pair < w.k / 2; ++pair) {
            const Pairs left_weights(strip.left[pair]), right_weights(strip.right[pair]);
            const uint16_t* x = strip.x[first / kLanes] + int64_t(first % kLanes) * w.k + pair * 2;
            for (int r = 0; r < kAtOnce; ++r) {
                int32_t two;
                std::memcpy(&two, x + int64_t(r) * w.k, 4);
                const Pairs values(_mm512_set1_epi32(two));
                left[r] = add_products(left[r], left_weights, values);
                right[r] = add_products(right[r], right_weights, values);
            }
        }
        for (int r = 0; r < kAtOnce && first + r < num_rows; ++r)
            store_pair(w, job, strip.first_row + first + r, strip.pair, unit * left[r], unit * right[r]);
    }
    for (int i = 0; i < NumNext; ++i) unpack_panel<Kind>(w, strip.next[i]);
}

#endif

template <int Kind, int Tiles, bool Chunked>
void multiply(const Weight& w, const Job& job, const Strip& strip) {
    switch (strip.num_next) {
        case 0: return multiply<Kind, Tiles, 0, Chunked>(w, job, strip);
        case 1: return multiply<Kind, Tiles, 1, Chunked>(w, job, strip);
        default: return multiply<Kind, Tiles, 2, Chunked>(w, job, strip);
    }
}

template <int Kind>
void multiply(const Weight& w, const Job& job, const Strip& strip) {
    const bool one_tile = job.rows - strip.first_row <= kLanes;
    const bool chunked = strip.blocks.end - strip.blocks.begin < w.k / kBlock;
    if constexpr (Kind != 16)
        if (chunked) return one_tile ? multiply<Kind, 1, true>(w, job, strip) : multiply<Kind, 2, true>(w, job, strip);
    return one_tile ? multiply<Kind, 1, false>(w, job, strip) : multiply<Kind, 2, false>(w, job, strip);
}

// Pairs (some blocks of them) that are unpacked together, their panels next to each other in `tiles`.
struct Group {
    Range pairs, blocks;
    __m512i* tiles;
};

// The product of one call: what its threads share.
template <int Kind>
class ManyRows {
    const Weight& w_;
    const Job& job_;
    const int num_blocks_ = w_.k / kBlock;
    const int num_tiles_ = (job_.rows + kLanes - 1) / kLanes;
    const int num_strips_ = (num_tiles_ + kStripTiles - 1) / kStripTiles;
    const int chunk_ = blocks_at_once(), at_once_ = pairs_at_once();
    Claims pair_claims_{num_pairs(w_)};

    // Chunks are of equal size, because one is unpacked while the one before is multiplied.
    int blocks_at_once() const {
        if (Kind != 16 && num_strips_ <= kChunkedStrips)
            for (int size = kChunkBlocks; size > 2; --size)
                if (num_blocks_ % size == 0) return size;
        return num_blocks_;
    }

    // How many pairs make a group: two groups' tiles fill most of a second-level cache of 2 MiB. The first group is
    // unpacked while nothing is multiplied, so few rows get small ones.
    int pairs_at_once() const {
        constexpr int kGroupBytes = 900 << 10;
        if (chunk_ < num_blocks_) return 1;
        return std::max(1, std::min(kGroupBytes / (2 * kLanes * 2 * w_.k), num_strips_ / 2));
    }

    Group first_group(__m512i* tiles) { return {pair_claims_.take(at_once_), {0, chunk_}, tiles}; }
    Group group_after(const Group& group, __m512i* tiles) {
        if (group.blocks.end == num_blocks_) return first_group(tiles);
        return {group.pairs, {group.blocks.end, group.blocks.end + chunk_}, tiles};
    }

    int num_panels_of(const Group& group) const {
        return std::min(2 * group.pairs.end, num_panels(w_)) - 2 * group.pairs.begin;
    }

    Panel panel(const Group& group, int i) const {
        const int idx = panel_of(w_, job_, group.pairs.begin + i / 2, i % 2);
        auto* tiles = group.tiles + i * chunk_ * kLanes;
        if constexpr (Kind == 16) {
            auto* packed = reinterpret_cast<__m512i*>(const_cast<uint8_t*>(w_.data));
            tiles = packed + (int64_t(idx) * num_blocks_ + group.blocks.begin) * kLanes;
        }
        return {idx, group.blocks, tiles};
    }

    // The panels of a group against all rows, while those of the next one get unpacked: one with each strip and pair,
    // or two where there is only one strip.
    void multiply_group(const uint16_t* last_tile, float* sums, const Group& group, const Group& next) const {
        const int last = num_panels_of(group) - 1, num_next = num_panels_of(next), per_strip = num_strips_ == 1 ? 2 : 1;
        int unpacked = 0;
        for (int tile = 0; tile < num_tiles_; tile += kStripTiles) {
            for (int i = 0; i <= last; i += 2) {
                Strip strip = {};
                strip.first_row = tile * kLanes;
                for (int t = 0; t < kStripTiles; ++t)
                    strip.x[t] = tile + t < num_tiles_ - 1 ? job_.x + int64_t(tile + t) * kLanes * w_.k : last_tile;
                strip.pair = group.pairs.begin + i / 2, strip.blocks = group.blocks;
                strip.left = panel(group, i).tiles, strip.right = panel(group, std::min(i + 1, last)).tiles;
                strip.sums = num_strips_ == 1 ? nullptr : sums + tile * 2 * kLanes * kLanes;
                while (strip.num_next < per_strip && unpacked < num_next)
                    strip.next[strip.num_next++] = panel(next, unpacked++);
                multiply<Kind>(w_, job_, strip);
            }
        }
    }

    // The last sixteen rows, where there are fewer filled up with zeros.
    const uint16_t* whole_last_tile() const {
        const int first = (num_tiles_ - 1) * kLanes, there = job_.rows - first;
        const uint16_t* rows = job_.x + int64_t(first) * w_.k;
        if (there == kLanes) return rows;
        auto* copy = static_cast<uint16_t*>(rows_scratch.get(size_t(kLanes) * w_.k * 2));
        std::memcpy(copy, rows, size_t(there) * w_.k * 2);
        std::memset(copy + int64_t(there) * w_.k, 0, size_t(kLanes - there) * w_.k * 2);
        return copy;
    }

   public:
    ManyRows(const Weight& w, const Job& job) : w_(w), job_(job) {}

    // What each thread runs.
    void run() {
        const uint16_t* last_tile = whole_last_tile();
        const int64_t group_vectors = Kind == 16 ? 0 : 2 * at_once_ * chunk_ * kLanes;
        constexpr int kSumVectors = kChunkedStrips * kStripRows * 2;
        auto* scratch = static_cast<__m512i*>(panel_scratch.get((kSumVectors + 2 * group_vectors) * 64));
        auto* sums = reinterpret_cast<float*>(scratch);
        scratch += kSumVectors;
        Group group = first_group(scratch);
        for (int i = 0; i < num_panels_of(group); ++i) unpack_panel<Kind>(w_, panel(group, i));
        if (group.pairs.empty()) return;
        const TileConfig configured;
        for (int parity = 1; !group.pairs.empty(); parity ^= 1) {
            const Group next = group_after(group, scratch + parity * group_vectors);
            multiply_group(last_tile, sums, group, next);
            group = next;
        }
    }
};

template <int Kind>
void many_rows(const Weight& w, const Job& job) {
    ManyRows<Kind> product(w, job);
#pragma omp parallel
    product.run();
}

}  // namespace
