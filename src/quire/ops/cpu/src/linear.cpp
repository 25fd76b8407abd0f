// Linear layers with packed weights: y = x W^T (+ bias), x in bf16, W in 4, 8 or 16 bits. Called by ops/cpu/linear.py.
//
// Weight layout (ops/ref/packed.py is its plain twin). Sixteen outputs form a panel, 32 values of K a block; blocks follow
// each other along K, panels follow each other. Inside a block the sixteen outputs lie side by side, one 32-bit lane each:
//    4 bits  256 B: vector j of 4 holds K 4j..4j+3 in the low nibbles and K 16+4j..16+4j+3 in the high ones
//    8 bits  512 B: vector j of 8 holds K 4j..4j+3
//   16 bits 1024 B: vector j of 16 holds K 2j, 2j+1                               (an AMX B tile as it is)
// with w = scale * (q - zero) + min, scale and min per output and group of 32 or 16 along K: [panel][group][16].
//
// Few rows: weights stay integers. A row of x becomes, block by block, 16-bit integers with a power-of-two scale (bf16 values
// within 2^-7 of the block's largest are exact), split in two signed bytes for VPDPBUSD: 64 products each, two per
// cycle, where VDPBF16PS does 32 in two cycles. Sums of a group are exact; scales apply in float32.
// Many rows: AMX. A panel becomes bf16 tiles in scratch once and serves all row tiles.
//
// A row's result never depends on the other rows of the call within one path, nor on the number of threads.

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

#include <immintrin.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kLanes = 16;  // outputs in a panel, rows in a row tile
constexpr int kBlock = 32;  // values of K in a block

inline int64_t block_bytes(int bits) { return kLanes * kBlock * bits / 8; }

// Mirrors `_Weight` in ops/cpu/linear.py.
struct Weight {
    const uint8_t* data;
    const void* scales;
    const void* mins;  // null: none
    int32_t n, k, bits, group, zero;
    int32_t wide_scales;  // 1: scales and mins are float32, 0: float16
};

struct Job {
    const uint16_t* x;  // [rows, k] bf16
    void* out;          // [rows, n] float32 or bf16
    const float* bias;  // [n] or null
    int32_t rows, out_is_f32;
};

inline __m512 load_scales(const void* base, int64_t idx, bool wide) {
    return wide ? _mm512_loadu_ps(static_cast<const float*>(base) + idx)
                : _mm512_cvtph_ps(_mm256_loadu_si256(
                      reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(base) + idx)));
}

inline void store_outputs(const Weight& w, const Job& job, int row, int panel, __m512 values) {
    const int64_t first = int64_t(panel) * kLanes;
    const int num = std::min<int64_t>(kLanes, w.n - first);
    const __mmask16 mask = num == kLanes ? 0xffff : (1u << num) - 1;
    if (job.bias) values = _mm512_add_ps(values, _mm512_maskz_loadu_ps(mask, job.bias + first));
    const int64_t at = row * int64_t(w.n) + first;
    if (job.out_is_f32)
        _mm512_mask_storeu_ps(static_cast<float*>(job.out) + at, mask, values);
    else
        _mm256_mask_storeu_epi16(static_cast<uint16_t*>(job.out) + at, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

// Per-thread memory that only grows: kernels run thousands of times per second and must not allocate.
struct Scratch {
    void* memory = nullptr;
    size_t size = 0;
    ~Scratch() { std::free(memory); }
    void* get(size_t bytes) {
        if (bytes > size) {
            std::free(memory);
            size = (bytes + 4095) / 4096 * 4096;
            memory = std::aligned_alloc(4096, size);
        }
        return memory;
    }
};
thread_local Scratch rows_scratch, panel_scratch;

struct Range {
    int begin, end;
};

inline Range my_share(int total) {
    const int threads = omp_get_num_threads(), me = omp_get_thread_num();
    return {int(int64_t(total) * me / threads), int(int64_t(total) * (me + 1) / threads)};
}

// ---------------------------------------------------------------------------------------------- few rows: integer products

// One block of one row of x: x = scale * (256 * high + low). Sums are over halves of the block for groups of 16.
struct alignas(64) RowBlock {
    int8_t high[kBlock], low[kBlock];
    float scale;
    int32_t sum[2];
    int32_t pad[13];
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
            _mm_store_si128(reinterpret_cast<__m128i*>(block.high + at), _mm512_cvtepi32_epi8(high));
            _mm_store_si128(reinterpret_cast<__m128i*>(block.low + at), _mm512_cvtepi32_epi8(value));
        };
        split(first, 0);
        split(second, 16);
        const uint32_t down = uint32_t(127 - 14 + (exponent - 127)) << 23;
        std::memcpy(&block.scale, &down, 4);
        block.sum[0] = _mm512_reduce_add_epi32(first);
        block.sum[1] = _mm512_reduce_add_epi32(second);
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

    inline void start(const Weight& w, const RowBlock* const* x, int b, int half) {
        for (int r = 0; r < Rows; ++r) {
            const int32_t* sum = x[r][b].sum;
            high[r] = _mm512_setzero_si512();
            low[r] = _mm512_set1_epi32(-w.zero * (w.group == 16 ? sum[half] : sum[0] + sum[1]));
        }
    }

    inline void add(__m512i weights, const RowBlock* const* x, int b, int first_k) {
        for (int r = 0; r < Rows; ++r) {
            high[r] = _mm512_dpbusd_epi32(high[r], weights, broadcast4(x[r][b].high + first_k));
            low[r] = _mm512_dpbusd_epi32(low[r], weights, broadcast4(x[r][b].low + first_k));
        }
    }

    inline void finish(const Weight& w, const RowBlock* const* x, int b, int half, int64_t scale_idx, __m512* total) {
        const __m512 scale = load_scales(w.scales, scale_idx, w.wide_scales);
        for (int r = 0; r < Rows; ++r) {
            const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high[r], 8), low[r]);
            const __m512 x_scale = _mm512_set1_ps(x[r][b].scale);
            total[r] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(whole), x_scale), scale, total[r]);
        }
        if (!w.mins) return;
        const __m512 min = load_scales(w.mins, scale_idx, w.wide_scales);
        for (int r = 0; r < Rows; ++r) {
            const RowBlock& block = x[r][b];
            const float sum = w.group == 16 ? block.sum[half] : block.sum[0] + block.sum[1];
            total[r] = _mm512_fmadd_ps(min, _mm512_set1_ps(sum * block.scale), total[r]);
        }
    }
};

constexpr int kPrefetchBytes = 2048;

template <int Bits, int Rows>
void few_rows_panel(const Weight& w, const Job& job, const RowBlock* quantized, int first_row, int panel) {
    const int num_blocks = w.k / kBlock, groups_per_block = kBlock / w.group;
    const RowBlock* x[Rows];
    __m512 total[Rows];
    for (int r = 0; r < Rows; ++r) {
        x[r] = quantized + int64_t(first_row + r) * num_blocks;
        total[r] = _mm512_setzero_ps();
    }
    const int64_t first_block = int64_t(panel) * num_blocks;
    const uint8_t* data = w.data + first_block * block_bytes(Bits);
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int b = 0; b < num_blocks; ++b, data += block_bytes(Bits)) {
        for (int i = 0; i < block_bytes(Bits); i += 64)
            _mm_prefetch(reinterpret_cast<const char*>(data + kPrefetchBytes + i), _MM_HINT_T0);
        const int64_t scale_idx = (first_block + b) * groups_per_block * kLanes;
        Sums<Rows> sums;
        sums.start(w, x, b, 0);
        for (int j = 0; j < 4; ++j) {
            const __m512i bytes = _mm512_loadu_si512(data + 64 * j);
            if constexpr (Bits == 4) {
                sums.add(_mm512_and_si512(bytes, nibble), x, b, 4 * j);
                sums.add(_mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble), x, b, 16 + 4 * j);
            } else {
                sums.add(bytes, x, b, 4 * j);
            }
        }
        if constexpr (Bits == 8) {
            if (w.group == 16) {
                sums.finish(w, x, b, 0, scale_idx, total);
                sums.start(w, x, b, 1);
            }
            for (int j = 4; j < 8; ++j) sums.add(_mm512_loadu_si512(data + 64 * j), x, b, 4 * j);
        }
        const int last = Bits == 8 ? groups_per_block - 1 : 0;
        sums.finish(w, x, b, last, scale_idx + last * kLanes, total);
    }
    for (int r = 0; r < Rows; ++r) store_outputs(w, job, first_row + r, panel, total[r]);
}

template <int Bits>
void few_rows(const Weight& w, const Job& job) {
    const int num_panels = (w.n + kLanes - 1) / kLanes, num_blocks = w.k / kBlock;
#pragma omp parallel
    {
        // Every thread converts all rows for itself: cheaper than a barrier.
        auto* x = static_cast<RowBlock*>(rows_scratch.get(sizeof(RowBlock) * num_blocks * job.rows));
        for (int r = 0; r < job.rows; ++r) quantize_row(job.x + int64_t(r) * w.k, w.k, x + int64_t(r) * num_blocks);
        const Range mine = my_share(num_panels);
        for (int panel = mine.begin; panel < mine.end; ++panel) {
            int r = 0;  // a panel stays in the first-level cache for all its rows
            for (; r + 4 <= job.rows; r += 4) few_rows_panel<Bits, 4>(w, job, x, r, panel);
            for (; r + 2 <= job.rows; r += 2) few_rows_panel<Bits, 2>(w, job, x, r, panel);
            for (; r < job.rows; ++r) few_rows_panel<Bits, 1>(w, job, x, r, panel);
        }
    }
}

// ------------------------------------------------------------------------------------ many rows: bf16 tiles of a panel

inline __m512i pack_bf16(__m512 even, __m512 odd) {
    // Rounds half away from zero: VCVTNE2PS2BF16 costs as much as all of the rest of the unpacking.
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_add_epi32(_mm512_castps_si512(odd), half));
}

// Integers become floats by being put into a mantissa: (bits of q at `Bit`) | exponent reads as 2^(23 - Bit) + q.
template <int Bit, int Width>
inline __m512 in_mantissa(__m512i v) {
    const __m512i mask = _mm512_set1_epi32(((1 << Width) - 1) << Bit), exponent = _mm512_set1_epi32((127 + 23 - Bit) << 23);
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

inline void unpack_block4(const Weight& w, int64_t block, __m512i* tile) {
    const auto* data = reinterpret_cast<const __m512i*>(w.data + block * block_bytes(4));
    const Affine a = load_affine(w, block * kLanes);
    const __m512 base12 = a.base(12, w.zero), base16 = a.base(16, w.zero);
    const auto at12 = [&](__m512i v) { return _mm512_fmadd_ps(in_mantissa<12, 4>(v), a.scale, base12); };
    const auto at16 = [&](__m512i v) { return _mm512_fmadd_ps(in_mantissa<16, 4>(v), a.scale, base16); };
    for (int j = 0; j < 4; ++j) {
        const __m512i v = _mm512_loadu_si512(data + j);
        const __m512i up12 = _mm512_slli_epi32(v, 12), up4 = _mm512_slli_epi32(v, 4);
        const __m512i down8 = _mm512_srli_epi32(v, 8), down12 = _mm512_srli_epi32(v, 12);
        tile[2 * j] = pack_bf16(at12(up12), at12(up4));            // low nibbles of bytes 0, 1
        tile[2 * j + 1] = pack_bf16(at16(v), at16(down8));         // low nibbles of bytes 2, 3
        tile[8 + 2 * j] = pack_bf16(at16(up12), at12(v));          // high nibbles of bytes 0, 1
        tile[8 + 2 * j + 1] = pack_bf16(at12(down8), at16(down12));  // high nibbles of bytes 2, 3
    }
}

inline void unpack_block8(const Weight& w, int64_t block, __m512i* tile) {
    const auto* data = reinterpret_cast<const __m512i*>(w.data + block * block_bytes(8));
    const int groups_per_block = kBlock / w.group;
    for (int half = 0; half < 2; ++half) {
        const Affine a = load_affine(w, (block * groups_per_block + half * (groups_per_block - 1)) * kLanes);
        const __m512 base = a.base(8, w.zero);
        const auto value = [&](__m512i v) { return _mm512_fmadd_ps(in_mantissa<8, 8>(v), a.scale, base); };
        for (int j = 4 * half; j < 4 * half + 4; ++j) {
            const __m512i v = _mm512_loadu_si512(data + j);
            tile[2 * j] = pack_bf16(value(_mm512_slli_epi32(v, 8)), value(v));
            tile[2 * j + 1] = pack_bf16(value(_mm512_srli_epi32(v, 8)), value(_mm512_srli_epi32(v, 16)));
        }
    }
}

// The bf16 tile of a block: made in scratch, or where it lies for weights of 16 bits.
template <int Bits>
inline const void* unpack(const Weight& w, int64_t block, __m512i* tile) {
    if constexpr (Bits == 16) return w.data + block * block_bytes(16);
    if constexpr (Bits == 4) unpack_block4(w, block, tile);
    if constexpr (Bits == 8) unpack_block8(w, block, tile);
    return tile;
}

// Rows of x as AMX A tiles, [row tile][block][16 rows][32], rows beyond the last zero. Each thread copies its share.
void tile_rows(const Job& job, int k, uint16_t* tiles) {
    const int num_blocks = k / kBlock;
    const Range mine = my_share((job.rows + kLanes - 1) / kLanes * num_blocks);
    for (int unit = mine.begin; unit < mine.end; ++unit) {
        const int first = unit / num_blocks * kLanes;
        const uint16_t* from = job.x + int64_t(first) * k + unit % num_blocks * kBlock;
        uint16_t* to = tiles + int64_t(unit) * kLanes * kBlock;
        for (int r = 0; r < kLanes; ++r)
            _mm512_store_si512(to + r * kBlock, first + r < job.rows ? _mm512_loadu_si512(from + int64_t(r) * k)
                                                                     : _mm512_setzero_si512());
    }
}

// One panel against up to four row tiles.
struct Strip {
    const uint16_t* x;  // the first row tile
    int first_row, panel;
    __m512i* tiles;  // the panel in bf16
    bool fresh;      // not there yet
};

#ifdef __AMX_BF16__

bool amx_allowed() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return allowed;
}

void configure_tiles() {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) config.row_bytes[tile] = 64, config.rows[tile] = 16;
    asm volatile("" ::"r"(&config) : "memory");  // the intrinsic tells the compiler about 8 of its 64 bytes only
    _tile_loadconfig(&config);
}

void release_tiles() { _tile_release(); }

inline void compiler_fence() { asm volatile("" ::: "memory"); }  // tile loads do not tell the compiler that they read

template <int Bits, int Tiles>
void multiply(const Weight& w, const Job& job, const Strip& strip) {
    const int num_blocks = w.k / kBlock;
    const int64_t first_block = int64_t(strip.panel) * num_blocks, tile_stride = int64_t(w.k) * kLanes;
    const auto make = [&](int b) -> const void* {
        if (strip.fresh || Bits == 16) return unpack<Bits>(w, first_block + b, strip.tiles + b * kLanes);
        return strip.tiles + b * kLanes;
    };
    _tile_zero(0);
    if constexpr (Tiles > 1) _tile_zero(1);
    if constexpr (Tiles > 2) _tile_zero(2);
    if constexpr (Tiles > 3) _tile_zero(3);
    const void* next = make(0);
    for (int b = 0; b < num_blocks; ++b) {
        const uint16_t* x = strip.x + b * kLanes * kBlock;
        compiler_fence();
        _tile_loadd(6, next, 64);
        _tile_loadd(4, x, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (Tiles > 1) {
            _tile_loadd(5, x + tile_stride, 64);
            _tile_dpbf16ps(1, 5, 6);
        }
        if constexpr (Tiles > 2) {
            _tile_loadd(4, x + 2 * tile_stride, 64);
            _tile_dpbf16ps(2, 4, 6);
        }
        if constexpr (Tiles > 3) {
            _tile_loadd(5, x + 3 * tile_stride, 64);
            _tile_dpbf16ps(3, 5, 6);
        }
        if (b + 1 < num_blocks) next = make(b + 1);  // runs beside the tile products
    }
    alignas(64) float sums[Tiles * kLanes][kLanes];
    _tile_stored(0, sums[0], 64);
    if constexpr (Tiles > 1) _tile_stored(1, sums[kLanes], 64);
    if constexpr (Tiles > 2) _tile_stored(2, sums[2 * kLanes], 64);
    if constexpr (Tiles > 3) _tile_stored(3, sums[3 * kLanes], 64);
    compiler_fence();
    const int num_rows = std::min(Tiles * kLanes, job.rows - strip.first_row);
    for (int r = 0; r < num_rows; ++r)
        store_outputs(w, job, strip.first_row + r, strip.panel, _mm512_load_ps(sums[r]));
}

#else

bool amx_allowed() { return true; }
void configure_tiles() {}
void release_tiles() {}

// Without AMX: the same walk with VDPBF16PS.
template <int Bits, int Tiles>
void multiply(const Weight& w, const Job& job, const Strip& strip) {
    const int num_blocks = w.k / kBlock, num_rows = std::min(Tiles * kLanes, job.rows - strip.first_row);
    const int64_t first_block = int64_t(strip.panel) * num_blocks;
    if (strip.fresh && Bits != 16)
        for (int b = 0; b < num_blocks; ++b) unpack<Bits>(w, first_block + b, strip.tiles + b * kLanes);
    const auto* panel = Bits == 16 ? reinterpret_cast<const __m512i*>(w.data) + first_block * kLanes : strip.tiles;
    constexpr int kAtOnce = 8;
    for (int first = 0; first < num_rows; first += kAtOnce) {
        __m512 sums[kAtOnce] = {};
        const uint16_t* x = strip.x + first / kLanes * int64_t(w.k) * kLanes + first % kLanes * kBlock;
        for (int pair = 0; pair < w.k / 2; ++pair) {
            const __m512i weights = _mm512_loadu_si512(panel + pair);
            const uint16_t* values = x + pair / kLanes * kLanes * kBlock + pair % kLanes * 2;
            for (int r = 0; r < kAtOnce; ++r) {
                int32_t two;
                std::memcpy(&two, values + r * kBlock, 4);
                sums[r] = _mm512_dpbf16_ps(sums[r], (__m512bh)weights, (__m512bh)_mm512_set1_epi32(two));
            }
        }
        for (int r = 0; r < kAtOnce && first + r < num_rows; ++r)
            store_outputs(w, job, strip.first_row + first + r, strip.panel, sums[r]);
    }
}

#endif

// Rows whose activations stay in the second-level cache (half of 2 MiB) while panel after panel passes.
inline int rows_at_once(int k) { return std::max<int>(64, (1 << 20) / (2 * k) / 64 * 64); }

template <int Bits>
void many_rows(const Weight& w, const Job& job) {
    const int num_panels = (w.n + kLanes - 1) / kLanes, num_tiles = (job.rows + kLanes - 1) / kLanes;
    const int tiles_at_once = rows_at_once(w.k) / kLanes;
    auto* x = static_cast<uint16_t*>(rows_scratch.get(size_t(num_tiles) * kLanes * w.k * 2));
#pragma omp parallel
    {
        tile_rows(job, w.k, x);
#pragma omp barrier
        configure_tiles();
        const Range mine = my_share(num_panels);
        auto* tiles = static_cast<__m512i*>(panel_scratch.get(size_t(w.k) * kLanes * 2));
        for (int first = 0; first < num_tiles; first += tiles_at_once) {
            const int last = std::min(num_tiles, first + tiles_at_once);
            for (int panel = mine.begin; panel < mine.end; ++panel) {
                for (int tile = first; tile < last; tile += 4) {
                    const Strip strip = {x + int64_t(tile) * kLanes * w.k, tile * kLanes, panel, tiles, tile == first};
                    switch (last - tile) {
                        case 1: multiply<Bits, 1>(w, job, strip); break;
                        case 2: multiply<Bits, 2>(w, job, strip); break;
                        case 3: multiply<Bits, 3>(w, job, strip); break;
                        default: multiply<Bits, 4>(w, job, strip);
                    }
                }
            }
        }
        release_tiles();
    }
}

// ------------------------------------------------------------------------------------------------- packing from GGUF blocks

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

// Each format: bytes and weights of its block, and how to decode the j-th 32 weights of it. Mirrors FORMATS in packed.py.
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
        out.scale[0] = half_to_float(p), out.min[0] = half_to_float(p + 2), nibbles(p + 8, out.q), fifth_bits(p + 4, out.q);
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
    if (w.bits == 4)
        for (int i = 0; i < 16; ++i) data[i / 4 * 64 + i % 4] = d.q[i] | d.q[16 + i] << 4;
    else
        for (int j = 0; j < 8; ++j) std::memcpy(data + 64 * j, d.q + 4 * j, 4);
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

template <int Bits>
void run(const Weight& w, const Job& job, int few) {
    if constexpr (Bits != 16) {
        if (job.rows <= few) return few_rows<Bits>(w, job);
    }
    many_rows<Bits>(w, job);
}

}  // namespace

extern "C" {

// 1 where these kernels may run. Must come before any other call: it asks the system for the use of AMX.
int quire_linear_supported() {
    return amx_allowed();
}

int quire_linear(const Weight* w, const void* x, int rows, void* out, int out_is_f32, const void* bias, int few) {
    const Job job = {static_cast<const uint16_t*>(x), out, static_cast<const float*>(bias), rows, out_is_f32};
    if (w->bits == 4) run<4>(*w, job, few);
    if (w->bits == 8) run<8>(*w, job, few);
    if (w->bits == 16) run<16>(*w, job, few);
    return 0;
}

// Fills the buffers of `w`; -1 for an unknown format.
int quire_pack_gguf(const Weight* w, const char* format, const void* raw) {
    const auto* bytes = static_cast<const uint8_t*>(raw);
    const auto is = [&](const char* name) { return std::strcmp(format, name) == 0; };
    if (is("Q4_0")) return pack<Q4_0>(*w, bytes), 0;
    if (is("Q4_1")) return pack<Q4_1>(*w, bytes), 0;
    if (is("Q4_K")) return pack<Q4_K>(*w, bytes), 0;
    if (is("Q5_0")) return pack<Q5_0>(*w, bytes), 0;
    if (is("Q5_1")) return pack<Q5_1>(*w, bytes), 0;
    if (is("Q5_K")) return pack<Q5_K>(*w, bytes), 0;
    if (is("Q6_K")) return pack<Q6_K>(*w, bytes), 0;
    if (is("Q8_0")) return pack<Q8_0>(*w, bytes), 0;
    return -1;
}

// `weight` is [n, k] in bf16.
void quire_pack_dense(const Weight* w, const void* weight) {
    const int num_panels = (w->n + kLanes - 1) / kLanes, pairs = w->k / 2;
    auto* data = reinterpret_cast<uint32_t*>(const_cast<uint8_t*>(w->data));
#pragma omp parallel for schedule(static)
    for (int panel = 0; panel < num_panels; ++panel) {
        for (int lane = 0; lane < kLanes; ++lane) {
            const int64_t row = int64_t(panel) * kLanes + lane;
            const auto* from = static_cast<const uint32_t*>(weight) + row * pairs;
            uint32_t* to = data + int64_t(panel) * pairs * kLanes + lane;
            for (int i = 0; i < pairs; ++i) to[int64_t(i) * kLanes] = row < w->n ? from[i] : 0;
        }
    }
}
}

#else

extern "C" int quire_linear_supported() { return 0; }

#endif
