// Paged attention for float32 and bfloat16. Called through ctypes by ops/cpu/attention.py; the torch twin in
// ops/ref/attention.py says what it must compute, kv_layout.h how the cache lies.
//
// A unit of work is a tile: the queries of a few consecutive tokens of one row, all heads that share one kv head, against
// their keys in steps of 64. Softmax is online over the steps of a partition (256 keys, aligned by position); partitions
// are merged in order. So the sums behind a query depend on its position alone: not on the tile it was in, the other rows,
// or whether the partitions of a long context were spread over threads. In float32 that makes chunked prefill bit-exact.
#include "kv_layout.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>
#include <omp.h>
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAVE_AMX 1
#endif

namespace {

constexpr int STEP = 64;        // keys per turn of the online softmax
constexpr int CHUNKS = STEP / CHUNK;
constexpr int PARTITION = 256;  // keys whose softmax is independent of other partitions'
constexpr int TILE_ROWS = 96;   // tokens * heads of a tile aim at this: six AMX tiles
constexpr float LOG2_E = 1.442695041f;
#if defined(__AVX512F__)
constexpr int ROWS_AT_ONCE = 6, LINES_AT_ONCE = 4;  // accumulators held in registers: 24 of 32
#else
constexpr int ROWS_AT_ONCE = 4, LINES_AT_ONCE = 1;  // a v16 is two AVX2 registers of 16, or four of NEON's 32
#endif
// Below this many multiply-adds, waking the other threads costs more than they save.
constexpr int64_t PARALLEL_WORK = 1 << 18;

struct Args {
    const void* q;
    void* out;
    const char* cache;
    const int32_t *query_starts, *context_lens, *block_table;
    const float* sinks;  // per query head, or null
    int64_t num_rows, num_heads, num_kv_heads, head_size, block_size, q_stride, out_stride, table_stride;
    int64_t window, num_sink_tokens;
    float scale, softcap;

    int64_t group() const { return num_heads / num_kv_heads; }
};

struct Unit {
    int32_t row, kv_head;
    int32_t first_token, num_tokens;  // index into q
    int32_t first_pos;                // position of the first token
    int32_t first_part, end_part;
    int32_t partial;                  // where this unit's single partition is kept for merging, or -1: finish it here

    int64_t end_pos() const { return first_pos + num_tokens; }
};

// Softmax so far of a tile's rows: largest logit (in units of log 2), sum of exponentials (by lane), weighted values.
struct State {
    float* top;  // [rows]
    v16* sum;    // [rows]
    float* o;    // [rows][D]
};

// A thread's buffers, grown to the largest tile seen and kept.
class Scratch {
    char* base_ = nullptr;
    size_t size_ = 0, used_ = 0;

   public:
    ~Scratch() { free(base_); }
    void reset(size_t bytes) {
        used_ = 0;
        if (bytes <= size_) return;
        free(base_);
        base_ = (char*)aligned_alloc(64, size_ = (bytes + 4095) / 4096 * 4096);
    }
    template <class T>
    T* take(size_t count) {
        T* p = (T*)(base_ + used_);
        used_ += (count * sizeof(T) + 63) / 64 * 64;
        return p;
    }
    static size_t state_bytes(size_t rows, size_t head_size) { return rows * (head_size * 4 + 64) + rows * 4 + 256; }
    State take_state(size_t rows, size_t head_size) {
        return {take<float>(rows), take<v16>(rows), take<float>(rows * head_size)};
    }
};

void clear(State& s, int64_t rows, int64_t head_size) {
    std::fill_n(s.top, rows, -INFINITY);
    memset(s.sum, 0, rows * sizeof(v16));
    memset(s.o, 0, rows * head_size * sizeof(float));
}

// Exact where either side saw no key: its sums are zero and the other's factor is 1.
void merge(State& total, const State& part, int64_t rows, int64_t head_size) {
    for (int64_t m = 0; m < rows; m++) {
        float top = std::max(total.top[m], part.top[m]);
        v16 keep = exp2(splat(total.top[m] - top)), gain = exp2(splat(part.top[m] - top));
        total.top[m] = top;
        total.sum[m] = fma(part.sum[m], gain, total.sum[m] * keep);
        for (int64_t d = m * head_size; d < (m + 1) * head_size; d += LANES)
            store(total.o + d, fma(load(part.o + d), gain, load(total.o + d) * keep));
    }
}

// The 64 keys of one step: null where no query of the tile looks (the table may hold anything there).
template <class E>
struct Keys {
    const typename E::Line *k[CHUNKS], *v[CHUNKS];
    int64_t first;  // position of key 0
    bool all, any;
};

template <class E>
class Tile {
    using Elem = typename E::Elem;
    using Word = typename E::Word;
    using Line = typename E::Line;

    const Args& a;
    const Unit& u;
    const KvLayout<E> layout;
    const int64_t D, G, rows, padded_rows;
    Word *q, *p;       // [rows][D / PACK], [rows][STEP / PACK]
    float *s, *alpha;  // [rows][STEP], [rows]
    Line *v_last, *v_tiles;
    State part, total;

   public:
    Tile(const Args& a, const Unit& u, Scratch& scratch)
        : a(a), u(u), layout{a.num_kv_heads, a.head_size, a.block_size}, D(a.head_size), G(a.group()),
          rows(u.num_tokens * G), padded_rows((rows + 15) / 16 * 16) {
        scratch.reset(padded_rows * (D * 4 + STEP * 8 + 4) + STEP * D * 4 * 2 + 1024 +
                      2 * Scratch::state_bytes(padded_rows, D));
        q = scratch.take<Word>(padded_rows * D / E::PACK);
        p = scratch.take<Word>(padded_rows * STEP / E::PACK);
        s = scratch.take<float>(padded_rows * STEP);
        alpha = scratch.take<float>(padded_rows);
        v_last = scratch.take<Line>(CHUNK * D / LANES / E::PACK);
        v_tiles = scratch.take<Line>(STEP * D / LANES / E::PACK);
        part = scratch.take_state(padded_rows, D);
        total = scratch.take_state(padded_rows, D);
    }

    void run(char* partials, size_t partial_bytes) {
        const Elem* from = (const Elem*)a.q + u.first_token * a.q_stride + u.kv_head * G * D;
        for (int64_t i = 0; i < u.num_tokens; i++)
            memcpy(q + i * G * D / E::PACK, from + i * a.q_stride, G * D * sizeof(Elem));
        bool first = true;
        for (int64_t i = u.first_part; i < u.end_part; i++) {
            if (!sees(i * PARTITION, (i + 1) * PARTITION)) continue;
            if (!first) std::swap(part, total);
            run_partition(i * PARTITION);
            if (!first) {
                std::swap(part, total);
                merge(total, part, rows, D);
            } else {
                std::swap(part, total);
            }
            first = false;
        }
        if (u.partial < 0) return finish(total);
        Scratch::state_bytes(rows, D);
        (void)partials, (void)partial_bytes;
    }

    void finish(const State& done) {}

   private:
    bool sees(int64_t begin, int64_t end) const {
        int64_t window_start = a.window ? u.first_pos - a.window + 1 : 0;
        return begin < u.end_pos() && (end > window_start || begin < a.num_sink_tokens);
    }
    void run_partition(int64_t begin) {}
};

}  // namespace
