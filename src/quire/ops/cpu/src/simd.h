// Sixteen floats as one value, in the compiler's vector extension: one AVX-512 register, or two of AVX2, or four of
// NEON. Included by the kernels beside it. bfloat16 travels as uint16_t, or as pairs in one uint32_t (low half first).
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic ignored "-Wuninitialized"  // gcc 12 sees one inside its own intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

constexpr int LANES = 16;
typedef float v16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef float v16_loose __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t u16x16_loose __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t u32x16_loose __attribute__((vector_size(64), aligned(2), may_alias));

static inline v16 splat(float x) { return x - v16{}; }

// One rounding, in whatever surroundings: results must not depend on which product the compiler chose to contract.
static inline v16 fma(v16 a, v16 b, v16 c) {
#if defined(__AVX512F__)
    return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    v16 r;
    for (int i = 0; i < LANES; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#endif
}

// lines[i][j] <-> lines[j][i]
static inline void transpose(u32x16 (&lines)[LANES]) {
#if defined(__AVX512F__)
    // Halves change places between lines a half apart, then quarters, and so on.
    const u32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (uint32_t width = LANES / 2; width; width /= 2) {
        const __m512i even = (__m512i)((lane & width) ? lane + (LANES - width) : lane), odd = (__m512i)((u32x16)even + width);
#pragma GCC unroll 16
        for (uint32_t i = 0; i < LANES; i++) {
            if (i & width) continue;
            const __m512i a = (__m512i)lines[i], b = (__m512i)lines[i + width];
            lines[i] = (u32x16)_mm512_permutex2var_epi32(a, even, b);
            lines[i + width] = (u32x16)_mm512_permutex2var_epi32(a, odd, b);
        }
    }
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            const uint32_t word = lines[i][j];
            lines[i][j] = lines[j][i];
            lines[j][i] = word;
        }
#endif
}

// The second operand wins where one is NaN.
static inline v16 max(v16 a, v16 b) {
#if defined(__AVX512F__)
    return (v16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

static inline v16 min(v16 a, v16 b) {
#if defined(__AVX512F__)
    return (v16)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return a < b ? a : b;
#endif
}

static inline float horizontal_max(v16 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
    return x[0];
#endif
}

static inline float horizontal_sum(v16 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);  // in the order below
#else
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
#endif
}

// 2^x within 2 ulp for -126 <= x <= 126, exactly 1 at 0; exactly 0 for -inf, NaN and from -127 down.
static inline v16 exp2(v16 x) {
    x = max(x, splat(-127.0f));
    const v16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
    v16 shifted = x + magic;
    v16 f = x - (shifted - magic);
    v16 p = splat(1.535336188e-4f);
    p = fma(p, f, splat(1.339887440e-3f));
    p = fma(p, f, splat(9.618437358e-3f));
    p = fma(p, f, splat(5.550332471e-2f));
    p = fma(p, f, splat(2.402264791e-1f));
    p = fma(p, f, splat(6.931472029e-1f));
    p = fma(p, f, splat(1.0f));
    return (v16)((u32x16)p + ((u32x16)shifted << 23));
}

// 1 / x within 2 ulp for normal x: a division takes three times as long.
static inline v16 reciprocal(v16 x) {
#if defined(__AVX512F__)
    v16 r = (v16)_mm512_rcp14_ps((__m512)x);
    return fma(r, fma(-x, r, splat(1.0f)), r);
#else
    return 1.0f / x;
#endif
}

static inline v16 tanh(v16 x) {
    v16 size = (v16)((u32x16)x & 0x7fffffffu), square = x * x;
    // Near zero 1 - 2 / (e^2x + 1) cancels: a polynomial there.
    v16 p = splat(-5.70498872745e-3f);
    p = fma(p, square, splat(2.06390887954e-2f));
    p = fma(p, square, splat(-5.37397155531e-2f));
    p = fma(p, square, splat(1.33314422036e-1f));
    p = fma(p, square, splat(-3.33332819422e-1f));
    v16 near = fma(p * square, x, x);
    v16 far = 1.0f - 2.0f / (exp2(min(size * 2.885390082f, splat(126.0f))) + 1.0f);
    far = (v16)((u32x16)far | ((u32x16)x & 0x80000000u));
    return size < 0.625f ? near : far;
}

static inline v16 widen(u16x16 x) {
#if defined(__AVX512F__)
    return (v16)((u32x16)_mm512_cvtepu16_epi32((__m256i)x) << 16);
#else
    return (v16)(__builtin_convertvector(x, u32x16) << 16);
#endif
}

static inline u16x16 round_to_bf16(v16 x) {
#if defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)x);
#else
    u32x16 u = (u32x16)x;
    return __builtin_convertvector((u + 0x7fffu + ((u >> 16) & 1u)) >> 16, u16x16);
#endif
}

static inline float widen(uint16_t x) {
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline uint16_t round_to_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if (x != x) return (uint16_t)(u >> 16) | 0x40;
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// Loading and storing by element type: `float` as it is, bfloat16 (`uint16_t`) widened and rounded.
static inline v16 load(const float* p) { return *(const v16_loose*)p; }
static inline v16 load(const uint16_t* p) { return widen((u16x16) * (const u16x16_loose*)p); }
static inline void store(float* p, v16 x) { *(v16_loose*)p = x; }
static inline void store(uint16_t* p, v16 x) { *(u16x16_loose*)p = round_to_bf16(x); }
// What storing and loading again would give, and both at once.
static inline v16 rounded(v16 x, const float*) { return x; }
static inline v16 rounded(v16 x, const uint16_t*) { return widen(round_to_bf16(x)); }
static inline v16 store_rounded(float* p, v16 x) { return *(v16_loose*)p = x; }
static inline v16 store_rounded(uint16_t* p, v16 x) {
    u16x16 y = round_to_bf16(x);
    *(u16x16_loose*)p = y;
    return widen(y);
}
static inline float load1(const float* p) { return *p; }
static inline float load1(const uint16_t* p) { return widen(*p); }
static inline void store1(float* p, float x) { *p = x; }
static inline void store1(uint16_t* p, float x) { *p = round_to_bf16(x); }
