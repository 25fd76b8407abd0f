// Paged attention for float32 and bfloat16, over a cache of the same numbers (QUIRE_CODES 0), of int8 (1) or of float8
// codes (2). Their scales multiply scores and probabilities. Called through ctypes by ops/attention/cpu.py; the torch twin in
// ops/attention/reference.py says what it must compute, kv_layout.h how the cache lies.
//
// A unit of work is a tile: the queries of a few consecutive tokens of one row, all heads that share one kv head (of a
// single token, several kv heads), against their keys in steps. Softmax is online over the steps of a partition (512 keys, aligned by position);
// partitions are merged in order. So the sums behind a query depend on its position alone: not on the tile it was in,
// on other rows, or on whether the partitions of a long context were spread over threads. In float32 that makes chunked
// prefill bit-exact.
#include "amx.h"
#include "kv_layout.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

constexpr int PARTITION = 512;  // keys whose softmax does not know other partitions'
constexpr int TILE_ROWS = 96;   // a tile has about this many rows (tokens * heads): six AMX tiles
constexpr int AMX_MIN_ROWS = 9;
constexpr int WIDEN_MIN_ROWS = 24;  // so many read each code that it is worth a copy
constexpr int AMX_BLOCK = 32;     // rows that go through scores, softmax and values together, in the first-level cache
constexpr int VECTOR_BLOCK = 24;
constexpr int HEADS_AT_ONCE = 4;  // kv heads of a single token: they lie side by side in its blocks
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
    const float* scales;  // of a cache of codes
    const int32_t *query_starts, *context_lens, *block_table;
    const float* sinks;  // per query head, or null
    int64_t num_rows, num_heads, num_kv_heads, head_size, block_size, block_stride, scales_stride, q_stride, out_stride,
        table_stride;
    int64_t window;        // 0: none
    float scale, softcap;  // scale > 0

    int64_t group() const { return num_heads / num_kv_heads; }
};

struct Unit {
    int64_t row, kv_head, num_kv_heads;  // more than one only for a single token
    int64_t first_token, num_tokens;  // index into q
    int64_t first_pos;                // position of the first token
    int64_t first_key;                // first position that a token sees
    int64_t first_part, end_part;

    int64_t end_pos() const { return first_pos + num_tokens; }
    bool same_tile(const Unit& other) const { return first_token == other.first_token && kv_head == other.kv_head; }
};

// Softmax so far of a tile's rows: largest logit (in base 2), sum of exponentials by lane, weighted sum of values.
struct State {
    float* top;  // [rows]
    v16* sum;    // [rows]
    float* o;    // [rows][head_size]

    static size_t bytes(int64_t rows, int64_t head_size) { return rows * (64 + 64 + head_size * 4); }
    static State at(char* memory, int64_t rows, int64_t head_size) {
        return {(float*)(memory + rows * 64), (v16*)memory, (float*)(memory + rows * 128)};
    }
};

// Rows as AMX wants them.
int64_t padded(int64_t rows) { return (rows + 15) / 16 * 16; }

void clear(State& state, int64_t rows, int64_t head_size) {
    std::fill_n(state.top, rows, -INFINITY);
    memset((void*)state.sum, 0, rows * sizeof(v16));
    memset(state.o, 0, rows * head_size * sizeof(float));
}

// Exact where either side saw no key: its sums are zero and the other side's factor is 1.
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

template <class E>
void write_output(const Args& a, const Unit& u, const State& state) {
    const int64_t D = a.head_size, G = a.group();
    for (int64_t i = 0, m = 0; i < u.num_tokens; i++) {
        auto* to = (typename E::Elem*)a.out + (u.first_token + i) * a.out_stride + u.kv_head * G * D;
        for (int64_t g = 0; g < u.num_kv_heads * G; g++, m++, to += D) {
            float sum = horizontal_sum(state.sum[m]), factor = 1.0f;
            if (a.sinks) {
                float sink = a.sinks[u.kv_head * G + g] * LOG2_E, top = std::max(sink, state.top[m]);
                factor = std::exp2(state.top[m] - top);
                sum = sum * factor + std::exp2(sink - top);
            }
            for (int64_t d = 0; d < D; d += LANES) store(to + d, load(state.o + m * D + d) * (factor / sum));
        }
    }
}

// Calls f(first row, compile-time number of rows) until all rows are done.
template <int N = ROWS_AT_ONCE, class F>
void in_blocks(int64_t first, int64_t rows, F f) {
    for (; first + N <= rows; first += N) f(first, std::integral_constant<int, N>());
    if constexpr (N > 1) in_blocks<N - 1>(first, rows, f);
}

// How a tile multiplies: with vectors, with vectors after widening codes to bfloat16, in which all of them are exact, so
// that the sums are the same; with AMX.
enum class Way { VECTORS, WIDENED, AMX };

template <class E, Way WAY>
class Tile {
    static constexpr bool AMX = WAY == Way::AMX, WIDENED = WAY == Way::WIDENED;
    using Elem = typename E::Elem;
    // What lines are multiplied by. Two fused multiply-adds of floats take half the time of one bfloat16 dot product.
    using Factor = std::conditional_t<AMX, Elem, float>;
    using Line = typename E::Line;
    // What products read. (Lines as template arguments would forget that they may lie anywhere.)
    using Read = std::conditional_t<WAY == Way::VECTORS, E, BF16>;
    using Wide = typename Read::Line;
    // Keys per turn of the online softmax: many spare work on the outputs, few leave cache for what is fetched ahead.
    static constexpr int STEP = AMX ? 128 : 64;
    static constexpr int CHUNKS = STEP / CHUNK;
    static constexpr int V_LINES = CHUNK / Read::PACK;  // of one chunk, per 16 dims
    static_assert(HEADS_AT_ONCE <= CHUNKS);            // v_copy holds a chunk of each
    static constexpr bool COPIES_KEYS = E::IS_CODED && WAY != Way::VECTORS;

    // The chunks of one step, as products read them: null where no query of the tile looks.
    struct Chunks {
        const Wide *k[CHUNKS] = {}, *v[CHUNKS] = {};
    };

    // The same as they lie in the cache. (The block table may hold anything where no query looks.)
    struct Keys {
        const Line *k[CHUNKS] = {}, *v[CHUNKS] = {};
        const float* scales[CHUNKS] = {};  // of keys, if these are codes

        // Of another head, where they are read as they lie.
        Chunks moved(int64_t bytes) const {
            const int64_t lines = bytes / sizeof(Line);
            Chunks to;
            for (int c = 0; c < CHUNKS; c++)
                if (k[c]) to.k[c] = (const Wide*)(k[c] + lines), to.v[c] = (const Wide*)(v[c] + lines);
            return to;
        }
    };

    const Args& a;
    const Unit& u;
    const Unit* following;  // what this thread does next, as far as is known: its keys are fetched ahead
    const KvLayout<E> layout;
    const int64_t D, G, width, rows, padded_rows;  // width: heads of a token
    const bool unfinished;
    Factor* q;         // [rows][D]
    float* s;          // [block][STEP]: scores of a step
    Factor* p;         // [block][STEP]: their exponentials
    float* alpha;      // [block]: what a step multiplies earlier sums by
    Wide* v_copy;      // [kv heads][D / 16][V_LINES] of the last chunk, or of each; with AMX [D / 16][CHUNKS][V_LINES]
    Wide* k_copy;      // of codes that are widened: [CHUNKS][D / 2]
    float *k_scales, *v_scales;  // of codes: [kv heads][STEP]
    State part, total;

   public:
    // `memory` needs bytes(). With `kept` the state is left there, to be merged, instead of giving the output.
    Tile(const Args& a, const Unit& u, const Unit* following, char* memory, char* kept)
        : a(a), u(u), following(following), layout{a.num_kv_heads, a.head_size, a.block_size, a.block_stride},
          D(a.head_size), G(a.group()), width(u.num_kv_heads * G), rows(u.num_tokens * width),
          padded_rows(padded(rows)), unfinished(kept) {
        auto take = [&](int64_t bytes) { return std::exchange(memory, memory + bytes); };
        v_copy = (Wide*)take(STEP * D * sizeof(Elem));
        k_copy = (Wide*)take(COPIES_KEYS ? STEP * D * sizeof(Elem) : 0);
        k_scales = (float*)take(E::IS_CODED ? HEADS_AT_ONCE * STEP * sizeof(float) : 0);
        v_scales = (float*)take(E::IS_CODED ? HEADS_AT_ONCE * STEP * sizeof(float) : 0);
        s = (float*)take(AMX_BLOCK * STEP * sizeof(float));
        p = (Factor*)take(AMX_BLOCK * STEP * sizeof(Factor));
        alpha = (float*)take(AMX_BLOCK * sizeof(float));
        q = (Factor*)take(padded_rows * D * sizeof(Factor));
        part = State::at(take(State::bytes(padded_rows, D)), padded_rows, D);
        total = State::at(kept ? kept : take(State::bytes(padded_rows, D)), padded_rows, D);
    }

    static size_t bytes(int64_t rows, int64_t head_size) {
        return ((COPIES_KEYS + 1) * STEP * sizeof(Elem) + padded(rows) * sizeof(Factor)) * head_size +
               E::IS_CODED * 2 * HEADS_AT_ONCE * STEP * sizeof(float) +
               AMX_BLOCK * (STEP * (sizeof(float) + sizeof(Factor)) + sizeof(float)) +
               2 * State::bytes(padded(rows), head_size);
    }

    void run() {
        const Elem* from = (const Elem*)a.q + u.first_token * a.q_stride + u.kv_head * G * D;
        for (int64_t i = 0; i < u.num_tokens; i++)
            copy(q + i * width * D, from + i * a.q_stride, width * D);
        bool empty = true;
        for (int64_t i = u.first_part; i < u.end_part; i++) {
            run_partition(empty ? total : part, i);
            if (!empty) merge(total, part, rows, D);
            empty = false;
        }
        if (!unfinished) write_output<E>(a, u, total);
    }

   private:
    static void copy(Elem* to, const Elem* from, int64_t n) { memcpy(to, from, n * sizeof(Elem)); }
    template <class F = float>
    static std::enable_if_t<!std::is_same_v<F, Elem>> copy(F* to, const Elem* from, int64_t n) {
        for (int64_t i = 0; i < n; i += LANES) store(to + i, load(from + i));
    }

    void run_partition(State& state, int64_t idx) {
        clear(state, padded_rows, D);
        const int64_t begin = first_step(u, idx), end = std::min((idx + 1) * PARTITION, u.end_pos());
        Keys keys = find(u, begin);
        for (int64_t first = begin; first < end; first += STEP) {
            Keys next = find(u, first + STEP);
            if (following && first + STEP >= u.end_pos())
                next = find(*following, first_step(*following, following->first_part));
            if constexpr (E::IS_CODED) gather_scales(keys, first);
            if constexpr (AMX)
                amx_step(state, keys, first);
            else
                vector_step(state, keys, next, first);
            keys = next;
        }
    }

    // Where the first step of the partition begins that a token sees.
    static int64_t first_step(const Unit& unit, int64_t partition) {
        return std::max(partition * PARTITION, unit.first_key / STEP * STEP);
    }

    Keys find(const Unit& unit, int64_t first) const {
        Keys keys;
        const int32_t* table = a.block_table + unit.row * a.table_stride;
        for (int c = 0; c < CHUNKS; c++) {
            int64_t pos = first + c * CHUNK;
            if (pos + CHUNK <= unit.first_key || pos >= unit.end_pos()) continue;
            const char* chunk = a.cache + layout.chunk_at(table[pos / a.block_size], unit.kv_head, pos % a.block_size);
            keys.k[c] = (const Line*)chunk;
            keys.v[c] = (const Line*)(chunk + layout.half_bytes());
            if constexpr (E::IS_CODED)
                keys.scales[c] = a.scales + layout.scales_at(table[pos / a.block_size], a.scales_stride, unit.kv_head,
                                                             pos % a.block_size);
        }
        return keys;
    }

    // The scales of a step; 0 where nothing may be seen, as slots may hold anything there, also NaN.
    void gather_scales(const Keys& keys, int64_t first) {
        const int64_t to_values = a.num_kv_heads * a.block_size;
        for (int c = 0; c < CHUNKS; c++) {
            const int64_t written = keys.k[c] ? num_written(first + c * CHUNK) : 0;
            for (int64_t h = 0; h < u.num_kv_heads; h++) {
                const float* from = keys.scales[c] + h * a.block_size;
                float *k_to = k_scales + h * STEP + c * CHUNK, *v_to = v_scales + h * STEP + c * CHUNK;
                v16 of_k = {}, of_v = {};
                if (written == CHUNK)
                    of_k = load(from), of_v = load(from + to_values);
                else
                    for (int64_t i = 0; i < written; i++) of_k[i] = from[i], of_v[i] = from[i + to_values];
                store(k_to, of_k * E::CodeType::UNIT);
                store(v_to, of_v * E::CodeType::UNIT);
            }
        }
    }

    // Tokens of the chunk at `pos` that the tile may see. Slots behind them may hold NaN, which a weight of 0 keeps.
    int64_t num_written(int64_t pos) const { return std::min<int64_t>(CHUNK, u.end_pos() - pos); }

    static void copy_v(Line* to, const Line* from, int64_t num_tokens) {
        for (int i = 0; i < V_LINES; i++) {
            int64_t n = num_tokens - i * E::PACK;
            to[i] = n >= E::PACK ? from[i] : n > 0 ? (Line)((u32x16)from[i] & 0xffffu) : Line{};
        }
    }

    // Line `i` of a chunk, if 64 bytes begin with it, into the second-level cache: a step of all heads is more than the
    // first holds.
    static void prefetch(const Line* chunk, int64_t i) {
        if (i % (64 / sizeof(Line)) == 0) __builtin_prefetch(chunk + i, 0, 2);
    }
    void fetch(const Line* chunk) const {
        for (int64_t i = 0; chunk && i < CHUNK * D / (LANES * E::PACK); i++) prefetch(chunk, i);
    }

    // A function of its own: inlined into its caller, it grows so large that gcc leaves calls in its inner loops.
    [[gnu::noinline]] void vector_step(State& state, const Keys& keys, const Keys& next, int64_t first) {
        Chunks of_head[HEADS_AT_ONCE], ahead[HEADS_AT_ONCE];
        if constexpr (WIDENED) {
            of_head[0] = widened(keys);
        } else {
            for (int64_t h = 0; h < u.num_kv_heads; h++) {
                of_head[h] = keys.moved(h * layout.head_bytes());
                ahead[h] = next.moved(h * layout.head_bytes());
                if constexpr (!E::IS_CODED) hide_unwritten(of_head[h], v_copy + h * V_LINES * D / LANES, first);
            }
        }
        const int64_t rows_per_head = u.num_kv_heads == 1 ? rows : G;
        const bool few = !WIDENED && rows_per_head <= ROWS_AT_ONCE;  // then memory is the limit: fetch ahead
        for (int64_t m = 0; m < rows; m += VECTOR_BLOCK) {
            const int64_t end = std::min<int64_t>(rows, m + VECTOR_BLOCK);
            auto each_head = [&](auto f) {
                for (int64_t h = m / rows_per_head, i = m; i < end; h++, i = h * rows_per_head)
                    in_blocks(i, std::min(end, (h + 1) * rows_per_head), [&](int64_t i, auto n) { f(h, i, n); });
            };
            each_head([&](int64_t h, int64_t i, auto n) {
                few ? score<n, !WIDENED>(i, i - m, of_head[h], ahead[h]) : score<n, false>(i, i - m, of_head[h], ahead[h]);
            });
            softmax(state, first, m, end);
            each_head([&](int64_t h, int64_t i, auto n) {
                few ? accumulate<n, !WIDENED>(state, i, i - m, of_head[h], ahead[h])
                    : accumulate<n, false>(state, i, i - m, of_head[h], ahead[h]);
            });
        }
    }

    Chunks widened(const Keys& keys) {
        Chunks to;
        const int64_t lines = CHUNK * D / LANES / 2;  // of a chunk
        for (int c = 0; c < CHUNKS; c++)
            if (keys.k[c]) {
                to.k[c] = widen_pairs(k_copy + c * lines, keys.k[c], lines);
                to.v[c] = widen_pairs(v_copy + c * lines, keys.v[c], lines);
            }
        return to;
    }

    // Only the last chunk in sight can be unfinished.
    void hide_unwritten(Chunks& keys, Line* copy, int64_t first) const {
        for (int c = 0; c < CHUNKS; c++) {
            const int64_t written = num_written(first + c * CHUNK);
            if (!keys.v[c] || written == CHUNK) continue;
            for (int64_t i = 0; i < D / LANES; i++) copy_v(copy + i * V_LINES, keys.v[c] + i * V_LINES, written);
            keys.v[c] = copy;
        }
    }

    // `m` is the row in the tile, `i` in the block.
    template <int M, bool FETCH>
    void score(int64_t m, int64_t i, const Chunks& keys, const Chunks& next) {
        for (int c = 0; c < CHUNKS; c++) {
            const int begin = c;
            while (c < CHUNKS && keys.k[c]) c++;
            in_blocks<LINES_AT_ONCE>(begin, c, [&](int64_t at, auto n) { score_rows<M, n, FETCH>(m, i, keys, next, at); });
            if constexpr (FETCH)
                if (c < CHUNKS) fetch(next.k[c]);
        }
    }

    template <int M, int N, bool FETCH>
    void score_rows(int64_t m, int64_t i, const Chunks& keys, const Chunks& next, int c) {
        v16 acc[M][N] = {};
        const float* w = q + m * D;
        const Wide *k[N], *ahead[N];
        for (int j = 0; j < N; j++) k[j] = keys.k[c + j], ahead[j] = next.k[c + j] ? next.k[c + j] : k[j];
        for (int64_t d = 0; d < D / Read::PACK; d++) {
            for (int j = 0; j < N; j++) {
                if constexpr (FETCH) prefetch(ahead[j], d);
                for (int r = 0; r < M; r++) acc[r][j] = Read::mac(acc[r][j], k[j][d], w + r * D + d * Read::PACK);
            }
        }
        for (int r = 0; r < M; r++)
            for (int j = 0; j < N; j++) store(s + (i + r) * STEP + (c + j) * CHUNK, acc[r][j]);
    }

    template <int M, bool FETCH>
    void accumulate(State& state, int64_t m, int64_t i, const Chunks& keys, const Chunks& next) {
        int64_t d = 0;
        for (; d + LINES_AT_ONCE <= D / LANES; d += LINES_AT_ONCE)
            accumulate_rows<M, LINES_AT_ONCE, FETCH>(state, m, i, keys, next, d);
        for (; d < D / LANES; d++) accumulate_rows<M, 1, false>(state, m, i, keys, next, d);
    }

    template <int M, int N, bool FETCH>
    void accumulate_rows(State& state, int64_t m, int64_t i, const Chunks& keys, const Chunks& next,
                         int64_t d) {
        v16 acc[M][N];
        float* o = state.o + m * D + d * LANES;
        for (int r = 0; r < M; r++)
            for (int j = 0; j < N; j++) acc[r][j] = load(o + r * D + j * LANES) * alpha[i + r];
        for (int c = 0; c < CHUNKS; c++) {
            if (!keys.v[c]) {
                if constexpr (FETCH)
                    if (d == 0) fetch(next.v[c]);
                continue;
            }
            const Wide *v = keys.v[c] + d * V_LINES, *ahead = (next.v[c] ? next.v[c] : keys.v[c]) + d * V_LINES;
            const float* w = p + i * STEP + c * CHUNK;
            for (int t = 0; t < V_LINES; t++) {
                for (int j = 0; j < N; j++) {
                    if constexpr (FETCH) prefetch(ahead, j * V_LINES + t);
                    for (int r = 0; r < M; r++)
                        acc[r][j] = Read::mac(acc[r][j], v[j * V_LINES + t], w + r * STEP + t * Read::PACK);
                }
            }
        }
        for (int r = 0; r < M; r++)
            for (int j = 0; j < N; j++) store(o + r * D + j * LANES, acc[r][j]);
    }

    // Rows `begin` to `end` of the tile, whose scores are rows 0.. of the block.
    void softmax(State& state, int64_t first, int64_t begin, int64_t end) {
        const float factor = a.softcap == 0 ? a.scale * LOG2_E : 1.0f;
        alignas(64) float old_top[AMX_BLOCK] = {}, new_top[AMX_BLOCK] = {};
        for (int64_t m = begin, token = begin / width, head = begin % width; m < end; m++) {
            const int64_t seen = u.first_pos + token + 1 - first;  // columns before this are not in the future
            if constexpr (E::IS_CODED) scale(s + (m - begin) * STEP, k_scales + head / G * STEP);
            mask(s + (m - begin) * STEP, a.window ? seen - a.window : 0, seen);
            old_top[m - begin] = state.top[m];
            new_top[m - begin] = state.top[m] = std::max(state.top[m], largest(s + (m - begin) * STEP) * factor);
            if (++head == width) head = 0, token++;
        }
        for (int i = 0; i < end - begin; i += LANES) store(alpha + i, exp2(load(old_top + i) - load(new_top + i)));
        for (int64_t m = begin; m < end; m++) {
            const float* x = s + (m - begin) * STEP;
            Factor* to = p + (m - begin) * STEP;
            v16 sum = {}, minus_top = splat(-state.top[m]);
            for (int c = 0; c < STEP; c += LANES) {
                v16 e = exp2(fma(load(x + c), splat(factor), minus_top));
                sum += e;
                if constexpr (E::IS_CODED) e *= load(v_scales + m % width / G * STEP + c);
                store(to + c, e);
            }
            state.sum[m] = fma(state.sum[m], splat(alpha[m - begin]), sum);
        }
    }

    static void scale(float* x, const float* by) {
        for (int c = 0; c < STEP; c += LANES) store(x + c, load(x + c) * load(by + c));
    }

    static float largest(const float* x) {
        v16 top = max(load(x), load(x + LANES));
        for (int c = 2 * LANES; c < STEP; c += LANES) top = max(load(x + c), top);
        return horizontal_max(top);
    }

    // Caps the scores, and hides all but columns [begin, end).
    void mask(float* x, int64_t begin, int64_t end) const {
        if (a.softcap != 0)
            for (int c = 0; c < STEP; c += LANES)
                store(x + c, tanh(load(x + c) * (a.scale / a.softcap)) * (a.softcap * LOG2_E));
        if (begin <= 0 && end >= STEP) return;
        typedef int32_t i32x16 __attribute__((vector_size(64)));
        i32x16 column = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        auto held = [](int64_t n) { return (int32_t)std::clamp<int64_t>(n, 0, STEP); };
        for (int c = 0; c < STEP; c += LANES, column += LANES) {
            i32x16 visible = (column >= held(begin)) & (column < held(end));
            store(x + c, visible ? load(x + c) : splat(-INFINITY));
        }
    }

    void amx_step(State& state, const Keys& keys, int64_t first) {
        const Wide* k[CHUNKS] = {};
        for (int c = 0; c < CHUNKS; c++) {
            for (int64_t i = 0; i < D / LANES; i++) {
                Wide* to = v_copy + (i * CHUNKS + c) * V_LINES;
                if (!keys.v[c])
                    memset((void*)to, 0, V_LINES * sizeof(Wide));
                else if constexpr (E::IS_CODED)
                    widen_pairs(to, keys.v[c] + i * CHUNK, V_LINES);
                else
                    copy_v(to, keys.v[c] + i * V_LINES, num_written(first + c * CHUNK));
            }
            if constexpr (!E::IS_CODED)
                k[c] = keys.k[c];
            else if (keys.k[c])
                k[c] = widen_pairs(k_copy + c * D / 2, keys.k[c], D / 2);
        }
        for (int64_t m = 0; m < rows; m += AMX_BLOCK)
            padded_rows - m > 16 ? amx_block<2>(state, k, first, m) : amx_block<1>(state, k, first, m);
    }

    // Lines of codes, in pairs as lines of bfloat16, in which all codes are exact.
    static Wide* widen_pairs(Wide* to, const Line* from, int64_t num_pairs) {
        for (int64_t i = 0; i < num_pairs; i++) {
            const u32x16 low = (u32x16)E::CodeType::widen(from[2 * i]), high = (u32x16)E::CodeType::widen(from[2 * i + 1]);
            to[i] = low >> 16 | (high & 0xffff0000u);
        }
        return to;
    }

    template <int MT>
    void amx_block(State& state, const Wide* const* k, int64_t first, int64_t m) {
        amx::fence();
        for (int c = 0; c < CHUNKS; c += 2) {
            const Wide *k0 = k[c], *k1 = k[c + 1];
            if (!k0 && !k1) continue;
            // A chunk nobody sees gets another's scores: the mask hides them.
            amx::product<MT, false>(s + c * CHUNK, STEP * 4, q + m * D, D * 2, k0 ? k0 : k1, k1 ? k1 : k0, D / 32);
        }
        const int64_t end = std::min<int64_t>(rows, m + AMX_BLOCK);
        softmax(state, first, m, end);
        for (int64_t i = m; i < end; i++)
            if (alpha[i - m] != 1.0f)
                for (int64_t d = i * D; d < (i + 1) * D; d += LANES)
                    store(state.o + d, load(state.o + d) * alpha[i - m]);
        amx::fence();
        for (int64_t d = 0; d < D; d += 2 * LANES) {
            const Wide* v = v_copy + d / LANES * CHUNKS * V_LINES;
            amx::product<MT, true>(state.o + m * D + d, D * 4, p, STEP * 2, v, v + CHUNKS * V_LINES, STEP / 32);
        }
    }
};

// Tiles of long rows come first, the costliest at the front; single tokens then even out the threads.
void plan(const Args& a, std::vector<Unit>& units, int64_t& work) {
    units.clear();
    const bool few = a.num_rows < 8 * omp_get_max_threads();  // then heads are needed to keep the threads busy
    const int64_t heads_at_once = std::clamp<int64_t>(VECTOR_BLOCK / a.group(), 1, few ? 1 : HEADS_AT_ONCE);
    const int64_t tile_tokens = std::max<int64_t>(1, TILE_ROWS / a.group());
    work = 0;
    for (bool single : {false, true})
        for (int64_t row = 0; row < a.num_rows; row++) {
            const int64_t start = a.query_starts[row], n = a.query_starts[row + 1] - start;
            if (n == 0 || (n == 1) != single) continue;
            for (int64_t first = (n - 1) / tile_tokens * tile_tokens; first >= 0; first -= tile_tokens) {
                const int64_t num = std::min(tile_tokens, n - first), pos = a.context_lens[row] - n + first;
                const int64_t first_key = a.window ? std::max<int64_t>(0, pos - a.window + 1) : 0;
                for (int64_t head = 0, heads; head < a.num_kv_heads; head += heads) {
                    heads = single ? std::min(heads_at_once, a.num_kv_heads - head) : 1;
                    units.push_back({row, head, heads, start + first, num, pos, first_key, first_key / PARTITION,
                                     (pos + num - 1) / PARTITION + 1});
                }
                work += num * a.num_heads * a.head_size * std::min(pos + num, a.window ? a.window + num : pos + num);
            }
        }
}

// Fewer units than threads can share evenly: give each partition its own, to be merged in order afterwards.
void split(const std::vector<Unit>& units, std::vector<Unit>& parts) {
    for (const Unit& unit : units)
        for (int64_t i = unit.first_part; i < unit.end_part; i++) {
            parts.push_back(unit);
            parts.back().first_part = i;
            parts.back().end_part = i + 1;
        }
}

struct Buffer {
    char* data = nullptr;
    size_t size = 0;
    ~Buffer() { free(data); }
    char* at_least(size_t bytes) {
        if (bytes > size) {
            free(data);
            data = (char*)aligned_alloc(64, size = (bytes + 4095) / 4096 * 4096);
        }
        return data;
    }
};

template <class E>
void run_unit(const Args& a, const Unit& u, const Unit* following, char* memory, char* kept) {
    const int64_t rows = u.num_kv_heads == 1 ? u.num_tokens * a.group() : 0;  // that read the same keys
    if constexpr (AMX_BUILT && sizeof(typename E::Elem) == 2)
        if (rows >= AMX_MIN_ROWS && a.head_size % 32 == 0 && amx::allowed())
            return Tile<E, Way::AMX>(a, u, following, memory, kept).run();
    if constexpr (E::IS_CODED)
        if (rows >= WIDEN_MIN_ROWS) return Tile<E, Way::WIDENED>(a, u, following, memory, kept).run();
    Tile<E, Way::VECTORS>(a, u, following, memory, kept).run();
}

template <class E>
void paged_attention(const Args& a) {
    static thread_local Buffer scratch, kept;
    int64_t work;
    static thread_local std::vector<Unit> units, parts;  // kept for their memory
    plan(a, units, work);
    parts.clear();
    const int64_t max_rows = std::max<int64_t>(TILE_ROWS, a.group());
    const bool parallel = work > PARALLEL_WORK, few = (int64_t)units.size() < 4 * omp_get_max_threads();
    if (parallel && few) split(units, parts);
    const std::vector<Unit>& todo = parts.empty() ? units : parts;
    const size_t kept_bytes = State::bytes(padded(max_rows), a.head_size);
    std::atomic<size_t> claimed{0};  // a thread is one unit ahead of its work: it knows what to fetch
    char* const kept_states = parts.empty() ? nullptr : kept.at_least(parts.size() * kept_bytes);
#pragma omp parallel if (parallel)
    {
        constexpr bool HAS_AMX = AMX_BUILT && sizeof(typename E::Elem) == 2;
        amx::Tiles tiles(HAS_AMX && amx::allowed());
        size_t bytes = Tile<E, Way::VECTORS>::bytes(max_rows, a.head_size);
        if constexpr (HAS_AMX) bytes = std::max(bytes, Tile<E, Way::AMX>::bytes(max_rows, a.head_size));
        if constexpr (E::IS_CODED) bytes = std::max(bytes, Tile<E, Way::WIDENED>::bytes(max_rows, a.head_size));
        char* memory = scratch.at_least(bytes);
        for (size_t i = claimed++, next; i < todo.size(); i = next) {
            next = claimed++;
            run_unit<E>(a, todo[i], next < todo.size() ? &todo[next] : nullptr, memory,
                        kept_states ? kept_states + i * kept_bytes : nullptr);
        }
    }
    for (size_t i = 0; i < parts.size();) {
        const int64_t rows = parts[i].num_tokens * parts[i].num_kv_heads * a.group();
        State total = State::at(kept_states + i * kept_bytes, padded(rows), a.head_size);
        size_t next = i + 1;
        for (; next < parts.size() && parts[next].same_tile(parts[i]); next++)
            merge(total, State::at(kept_states + next * kept_bytes, padded(rows), a.head_size), rows, a.head_size);
        write_output<E>(a, parts[i], total);
        i = next;
    }
}

}  // namespace

extern "C" {

void quire_paged_attention(int bf16, const void* q, void* out, const char* cache, const float* scales,
                           const int32_t* query_starts, const int32_t* context_lens, const int32_t* block_table,
                           const float* sinks, int64_t num_rows, int64_t num_heads, int64_t num_kv_heads,
                           int64_t head_size, int64_t block_size, int64_t block_stride, int64_t scales_stride,
                           int64_t q_stride, int64_t out_stride, int64_t table_stride, int64_t window, float scale,
                           float softcap) {
    const Args args{q, out, cache, scales, query_starts, context_lens, block_table, sinks, num_rows, num_heads,
                    num_kv_heads, head_size, block_size, block_stride, scales_stride, q_stride, out_stride,
                    table_stride, window, scale, softcap};
#if QUIRE_CODES == 0
    (bf16 ? paged_attention<BF16> : paged_attention<F32>)(args);
#else
    using Code = std::conditional_t<QUIRE_CODES == 1, Int8, Float8>;
    (bf16 ? paged_attention<Coded<uint16_t, Code>> : paged_attention<Coded<float, Code>>)(args);
#endif
}
}
