// Intel AMX for one shape only: 16 x 16 float products of 16 x 32 and 32 x 16 bfloat16. Included by attention.cpp.
// Empty (AMX_BUILT = false) where the compiler's target has no AMX; `amx::allowed()` asks the kernel at run time.
#pragma once
#include "simd.h"
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
constexpr bool AMX_BUILT = true;
#else
constexpr bool AMX_BUILT = false;
#endif

namespace amx {

#if defined(__AMX_BF16__) && defined(__linux__)

inline bool allowed() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return granted;
}

// gcc's intrinsics do not tell it what memory they read (of a configuration, only the first 8 bytes): without a fence
// it moves or drops the stores before them, and the next tile instruction is illegal.
static inline void fence() { asm volatile("" ::: "memory"); }
static inline void fence(const void* escaped) { asm volatile("" ::"r"(escaped) : "memory"); }

// Configures this thread's tiles for its lifetime. The old configuration comes back: oneDNN, which runs on the same
// threads, remembers what it last configured and would not do it again.
class Tiles {
    struct alignas(64) Config {
        uint8_t palette = 0, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } before_;
    const bool active_;

   public:
    explicit Tiles(bool active) : active_(active) {
        if (!active) return;
        fence(&before_);
        _tile_storeconfig(&before_);
        fence(&before_);
        Config config;
        config.palette = 1;
        for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
        fence(&config);
        _tile_loadconfig(&config);
    }
    ~Tiles() {
        if (!active_) return;
        fence(&before_);
        if (before_.palette)
            _tile_loadconfig(&before_);
        else
            _tile_release();
    }
};

// c[16 * MT][32] (+)= a[16 * MT][32 * depth] * (b0 | b1): tiles of b lie `depth` times 1024 bytes in a row each.
// Strides in bytes.
template <int MT, bool ADD>
static inline void product(float* c, int64_t c_stride, const void* a, int64_t a_stride, const void* b0, const void* b1,
                           int64_t depth) {
    char *c0 = (char*)c, *c1 = c0 + 16 * c_stride;
    const char *a0 = (const char*)a, *a1 = a0 + 16 * a_stride;
    if (ADD) {
        _tile_loadd(0, c0, c_stride);
        _tile_loadd(1, c0 + 64, c_stride);
        if (MT == 2) {
            _tile_loadd(2, c1, c_stride);
            _tile_loadd(3, c1 + 64, c_stride);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if (MT == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    for (int64_t i = 0; i < depth; i++) {
        _tile_loadd(6, (const char*)b0 + i * 1024, 64);
        _tile_loadd(4, a0 + i * 64, a_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, (const char*)b1 + i * 1024, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (MT == 2) {
            _tile_loadd(5, a1 + i * 64, a_stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c0, c_stride);
    _tile_stored(1, c0 + 64, c_stride);
    if (MT == 2) {
        _tile_stored(2, c1, c_stride);
        _tile_stored(3, c1 + 64, c_stride);
    }
}

#else

inline bool allowed() { return false; }
struct Tiles {
    explicit Tiles(bool) {}
};
static inline void fence() {}
template <int MT, bool ADD>
static inline void product(float*, int64_t, const void*, int64_t, const void*, const void*, int64_t) {}

#endif

}  // namespace amx
