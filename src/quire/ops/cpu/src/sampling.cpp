// Choosing tokens from rows of float32 logits: argmax, the k largest, a draw with Gumbel noise. Called through ctypes by
// ops/vocab/cpu.py; the torch twins in ops/vocab/reference.py and ops/sampling/gumbel.py say what each computes, and ids are
// theirs, bit for bit. A row is read once, by one thread.
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

namespace {

constexpr int64_t PARALLEL_ELEMENTS = 1 << 15;  // below, waking the other threads costs more than they save
constexpr int64_t BLOCK = 16 * LANES;           // entries between two looks at what was found
constexpr float INF = std::numeric_limits<float>::infinity();
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16_loose __attribute__((vector_size(64), aligned(4), may_alias));

// Threads take rows one by one: cores differ in speed.
template <class F>
void for_rows(int64_t rows, int64_t n, F f) {
#pragma omp parallel for schedule(dynamic, 1) if (rows > 1 && rows * n > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) f(row);
}

// A bit per lane in which the comparison holds.
uint32_t bits(i32x16 mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#else
    uint32_t all = 0;
    for (int i = 0; i < LANES; i++) all |= (mask[i] & 1u) << i;
    return all;
#endif
}

struct Found {
    float value;
    int64_t id;
};

// The block with the largest entry is remembered and searched afterwards. A NaN counts as the largest.
Found argmax(const float* x, int64_t n) {
    Found best{-INF, 0};
    int64_t best_block = 0, i = 0;
    for (; i + BLOCK <= n; i += BLOCK) {
        v16 top[4] = {splat(-INF), splat(-INF), splat(-INF), splat(-INF)};
        i32x16 nan = {};
        for (int j = 0; j < BLOCK; j += LANES) {
            v16 part = load(x + i + j);
            top[j / LANES % 4] = max(top[j / LANES % 4], part);
            nan |= part != part;
        }
        if (bits(nan)) return {NAN, std::find_if(x + i, x + n, [](float y) { return y != y; }) - x};
        float largest = horizontal_max(max(max(top[0], top[1]), max(top[2], top[3])));
        if (largest > best.value) best = {largest, best_block = i};
    }
    for (; i < n; i++) {
        if (x[i] != x[i]) return {x[i], i};
        if (x[i] > best.value) best = {x[i], best_block = i};
    }
    best.id = std::find(x + best_block, x + n, best.value) - x;
    return best;
}

// The twin's hash, as a float: v * 2^31 without the half.
v16 noise(u32x16 words, uint32_t low, uint32_t high) {
    u32x16 h = (words ^ low) * high;
    h = (h ^ (u32x16)((i32x16)h >> 15)) * 0x846CA68Bu;
    return (v16)((u32x16)__builtin_convertvector((i32x16)h, v16) & 0x7fffffffu);
}

// The token of the largest logit / temperature - log(E), or -1 where the twin must decide: no finite logit, or two scores
// so close that its float32 logarithms may order them either way.
//
// Few tokens need a logarithm. E >= v, and a float's bits read as a fixed-point number give at most its log2, so that a
// score is at most logit / temperature - ln2 * (bits(v) * 2^-23 - 127).
int64_t gumbel_argmax(const float* logits, float temperature, const uint32_t* words, int64_t key, int64_t n) {
    constexpr float LN_2 = 0.693147181f, SCALE = -LN_2 / (1 << 23), SHIFT = (127 + 31) * LN_2;
    constexpr float V_SCALE = 0x1p-31 - 0x1p-55;
    const uint32_t low = (uint32_t)key, high = (uint32_t)((uint64_t)key >> 32) | 1;
    const float inverse = 1.0f / temperature;
    double best = -INF, second = -INF;
    float floor = -INF;  // bounds up to here lose, whatever was rounded
    int64_t id = -1;
    auto consider = [&](int64_t first, const float* logit, const uint32_t* word) {
        v16 v = noise(*(const u32x16_loose*)word, low, high);
        v16 bound = fma(load(logit), splat(inverse), splat(SHIFT));
        bound = fma(__builtin_convertvector((i32x16)v, v16), splat(SCALE), bound);
        for (uint32_t open = bits(bound > floor); open; open &= open - 1) {
            const int i = __builtin_ctz(open);
            if (!(bound[i] > floor)) continue;  // it rose meanwhile
            const double E = -std::log1p(-(double)((v[i] + 0.5f) * V_SCALE));
            const double score = logit[i] / temperature - std::log(E);
            second = std::max(second, std::min(best, score));
            if (score > best) best = score, id = first + i;
            floor = (float)(best - 1e-3 - 1e-6 * std::abs(best));
        }
    };
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) consider(i, logits + i, words + i);
    if (i < n) {
        float logit[LANES];
        uint32_t word[LANES] = {};
        std::fill(std::copy(logits + i, logits + n, logit), logit + LANES, -INF);
        std::copy(words + i, words + n, word);
        consider(i, logit, word);
    }
    // A float32 score is off by an ulp of the logarithm (2e-6) and a rounding.
    return best - second > 1e-5 + 1e-6 * std::abs(best) ? id : -1;
}

// Sorts by value, then by lower id: the larger integer is the better entry. -0 equals 0.
int64_t sort_key(float x, int64_t id) {
    int32_t bits;
    x += 0.0f;
    memcpy(&bits, &x, 4);
    return (int64_t)(bits ^ ((bits >> 31) & 0x7fffffff)) * (1ll << 32) + (0xffffffffll - id);
}

int64_t id_of(int64_t key) { return 0xffffffffll - (key & 0xffffffffll); }

// The k largest as keys, best first. What exceeds the k-th of those seen so far is collected, and sieved when it is 2k.
void topk(std::vector<int64_t>& keys, const float* x, int64_t n, int64_t k) {
    keys.clear();
    const int64_t num_first = std::min(n, (2 * k + LANES - 1) / LANES * LANES);
    for (int64_t i = 0; i < num_first; i++) keys.push_back(sort_key(x[i], i));
    float floor;
    auto sieve = [&] {
        std::nth_element(keys.begin(), keys.begin() + (k - 1), keys.end(), std::greater<>());
        keys.resize(k);
        floor = x[id_of(keys.back())];  // later equals lose to it
    };
    sieve();
    int64_t i = num_first;
    for (; i + LANES <= n; i += LANES) {
        for (uint32_t open = bits(load(x + i) > floor); open; open &= open - 1) {
            const int64_t id = i + __builtin_ctz(open);
            keys.push_back(sort_key(x[id], id));
        }
        if ((int64_t)keys.size() >= 2 * k) sieve();
    }
    for (; i < n; i++)
        if (x[i] > floor) keys.push_back(sort_key(x[i], i));
    std::partial_sort(keys.begin(), keys.begin() + k, keys.end(), std::greater<>());
}

}  // namespace

extern "C" {

// Tokens whose bit is 0 become -inf in the rows at `places`.
void quire_mask_logits(float* x, int64_t stride, const int64_t* places, const uint32_t* words, int64_t rows, int64_t n) {
    const int64_t num_words = (n + 31) / 32;
    for_rows(rows, n, [=](int64_t row) {
        float* logits = x + places[row] * stride;
        for (int64_t w = 0; w < num_words; w++) {
            uint32_t forbidden = ~words[row * num_words + w];
            const int64_t count = std::min<int64_t>(32, n - 32 * w);
            if (forbidden == ~0u) {
                std::fill_n(logits + 32 * w, count, -INF);
                continue;
            }
            for (; forbidden; forbidden &= forbidden - 1) {
                const int64_t i = __builtin_ctz(forbidden);
                if (i < count) logits[32 * w + i] = -INF;
            }
        }
    });
}

void quire_argmax(const float* x, int64_t stride, int64_t rows, int64_t n, float* values, int64_t* ids) {
    for_rows(rows, n, [=](int64_t row) {
        Found found = argmax(x + row * stride, n);
        values[row] = found.value;
        ids[row] = found.id;
    });
}

void quire_gumbel_argmax(const float* logits, int64_t stride, const float* temperatures, const uint32_t* words,
                         const int64_t* keys, int64_t rows, int64_t n, int64_t* ids) {
    for_rows(rows, n, [=](int64_t row) {
        ids[row] = gumbel_argmax(logits + row * stride, temperatures[row], words, keys[row], n);
    });
}

void quire_topk(const float* x, int64_t stride, int64_t rows, int64_t n, int64_t k, float* values, int64_t* ids) {
    for_rows(rows, n, [=](int64_t row) {
        static thread_local std::vector<int64_t> keys;
        topk(keys, x + row * stride, n, k);
        for (int64_t i = 0; i < k; i++) {
            ids[row * k + i] = id_of(keys[i]);
            values[row * k + i] = x[row * stride + ids[row * k + i]] + 0.0f;
        }
    });
}
}
