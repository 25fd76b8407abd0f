// Paged attention for float32 and bfloat16. Called through ctypes by ops/cpu/attention.py; the torch twin in
// ops/ref/attention.py says what it must compute, kv_layout.h how the cache lies.
//
// A unit of work is a tile: the queries of a few consecutive tokens of one row, all heads that share one kv head, against
// their keys in steps of 64. Softmax is online over the steps of a partition (256 keys, aligned by position); partitions
// are merged in order. So the sums behind a query depend on its position alone: not on the tile it was in, the other rows,
// or whether the partitions of a long context were spread over threads. In float32 that makes chunked prefill bit-exact.
#include "amx.h"
#include "kv_layout.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

constexpr int STEP = 64;  // keys per turn of the online softmax
constexpr int CHUNKS = STEP / CHUNK;
constexpr int PARTITION = 256;  // keys whose softmax does not know other partitions'
constexpr int TILE_ROWS = 96;   // a tile has about this many rows (tokens * heads): six AMX tiles
constexpr int AMX_MIN_ROWS = 9;
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
    int64_t row, kv_head;
    int64_t first_token, num_tokens;  // index into q
    int64_t first_pos;                // position of the first token
    int64_t first_part, end_part;

    int64_t end_pos() const { return first_pos + num_tokens; }
    bool same_tile(const Unit& other) const { return first_token == other.first_token && kv_head == other.kv_head; }
    bool sees(const Args& a, int64_t begin, int64_t end) const {
        bool in_window = !a.window || end > first_pos - a.window + 1;
        return begin < end_pos() && (in_window || begin < a.num_sink_tokens);
    }
};

// Softmax so far of a tile's rows: largest logit (as a power of 2), sum of exponentials by lane, weighted sum of values.
struct State {
    float* top;  // [rows]
    v16* sum;    // [rows]
    float* o;    // [rows][head_size]

    static size_t bytes(int64_t rows, int64_t head_size) { return rows * (64 + 64 + head_size * 4); }
    static State at(char* memory, int64_t rows, int64_t head_size) {
        return {(float*)(memory + rows * 64), (v16*)memory, (float*)(memory + rows * 128)};
    }
};

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
        for (int64_t g = 0; g < G; g++, m++, to += D) {
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

// The chunks of one step: null where no query of the tile looks (the block table may hold anything there).
template <class E>
struct Keys {
    const typename E::Line *k[CHUNKS] = {}, *v[CHUNKS] = {};
    int num_seen = 0;
};

template <class E>
class Tile {
    using Elem = typename E::Elem;
    using Word = typename E::Word;
    using Line = typename E::Line;
    static constexpr int V_LINES = CHUNK / E::PACK;  // of one chunk, per 16 dims

    const Args& a;
    const Unit& u;
    const KvLayout<E> layout;
    const int64_t D, G, rows, padded_rows;
    const bool use_amx;
    Word *q, *p;       // [rows][D / PACK], [rows][STEP / PACK]
    float *s, *alpha;  // [rows][STEP], [rows]: scores of a step, and what it multiplies earlier sums by
    Line* v_copy;      // [D / 16][V_LINES] of the last chunk; with AMX [2][D / 16][16] of the whole step
    State part, total;
    const bool unfinished;

   public:
    // `memory` needs bytes(). With `kept` the state is left there, to be merged, instead of giving the output.
    Tile(const Args& a, const Unit& u, char* memory, char* kept)
        : a(a), u(u), layout{a.num_kv_heads, a.head_size, a.block_size}, D(a.head_size), G(a.group()),
          rows(u.num_tokens * G), padded_rows(padded(rows)),
          use_amx(E::PACK == 2 && rows >= AMX_MIN_ROWS && D % 32 == 0 && AMX_BUILT && amx::allowed()),
          unfinished(kept) {
        auto take = [&](int64_t bytes) { return std::exchange(memory, memory + bytes); };
        v_copy = (Line*)take(STEP * D * sizeof(Elem));
        q = (Word*)take(padded_rows * D * sizeof(Elem));
        p = (Word*)take(padded_rows * STEP * sizeof(Elem));
        s = (float*)take(padded_rows * STEP * sizeof(float));
        alpha = (float*)take(padded_rows * sizeof(float));
        part = State::at(take(State::bytes(padded_rows, D)), padded_rows, D);
        total = State::at(kept ? kept : take(State::bytes(padded_rows, D)), padded_rows, D);
    }

    static int64_t padded(int64_t rows) { return (rows + 15) / 16 * 16; }
    static size_t bytes(int64_t rows, int64_t head_size) {
        return STEP * head_size * sizeof(Elem) +
               padded(rows) * ((head_size + STEP) * sizeof(Elem) + (STEP + 1) * sizeof(float)) +
               2 * State::bytes(padded(rows), head_size);
    }

    void run() {
        const Elem* from = (const Elem*)a.q + u.first_token * a.q_stride + u.kv_head * G * D;
        for (int64_t i = 0; i < u.num_tokens; i++)
            memcpy(q + i * G * D / E::PACK, from + i * a.q_stride, G * D * sizeof(Elem));
        bool empty = true;
        for (int64_t i = u.first_part; i < u.end_part; i++) {
            if (!u.sees(a, i * PARTITION, (i + 1) * PARTITION)) continue;
            run_partition(empty ? total : part, i * PARTITION);
            if (!empty) merge(total, part, rows, D);
            empty = false;
        }
        if (!unfinished) write_output<E>(a, u, total);
    }

   private:
    void run_partition(State& state, int64_t begin) {
        clear(state, padded_rows, D);
        Keys<E> keys = find(begin);
        for (int64_t first = begin; first < begin + PARTITION; first += STEP) {
            Keys<E> next = find(first + STEP);
            if (keys.num_seen) {
                if (use_amx) {
                    amx_score(keys);
                    softmax(state, first);
                    amx_accumulate(state, keys, first);
                } else {
                    score(keys, next);
                    softmax(state, first);
                    hide_unwritten(keys, first);
                    accumulate(state, keys, next);
                }
            }
            keys = next;
        }
    }

    Keys<E> find(int64_t first) const {
        Keys<E> keys;
        const int32_t* table = a.block_table + u.row * a.table_stride;
        for (int c = 0; c < CHUNKS; c++) {
            int64_t pos = first + c * CHUNK;
            if (!u.sees(a, pos, pos + CHUNK)) continue;
            const char* chunk = a.cache + layout.chunk_at(table[pos / a.block_size], u.kv_head, pos % a.block_size);
            keys.k[c] = (const Line*)chunk;
            keys.v[c] = (const Line*)(chunk + layout.half_bytes());
            keys.num_seen++;
        }
        return keys;
    }

    // Number of tokens of the chunk at `pos` that exist; what lies in the slots behind them may be NaN.
    int64_t num_written(int64_t pos) const { return std::min<int64_t>(CHUNK, u.end_pos() - pos); }

    static void copy_v(Line* to, const Line* from, int64_t num_tokens) {
        for (int i = 0; i < V_LINES; i++) {
            int64_t n = num_tokens - i * E::PACK;
            to[i] = n >= E::PACK ? from[i] : n > 0 ? (Line)((u32x16)from[i] & 0xffffu) : Line{};
        }
    }

    void hide_unwritten(Keys<E>& keys, int64_t first) {
        for (int c = 0; c < CHUNKS; c++) {
            if (!keys.v[c] || num_written(first + c * CHUNK) == CHUNK) continue;
            for (int64_t i = 0; i < D / LANES; i++)
                copy_v(v_copy + i * V_LINES, keys.v[c] + i * V_LINES, num_written(first + c * CHUNK));
            keys.v[c] = v_copy;
        }
    }

    void score(const Keys<E>& keys, const Keys<E>& next) {
        const bool few = rows <= ROWS_AT_ONCE;  // then memory is the limit
        in_blocks(0, rows, [&](int64_t m, auto n) {
            for (int c = 0; c < CHUNKS;) {
                if (LINES_AT_ONCE == CHUNKS && keys.num_seen == CHUNKS) {
                    score_rows<n, LINES_AT_ONCE>(m, keys, next, 0, few);
                    break;
                }
                if (keys.k[c]) score_rows<n, 1>(m, keys, next, c, few);
                c++;
            }
        });
    }

    template <int M, int N>
    void score_rows(int64_t m, const Keys<E>& keys, const Keys<E>& next, int c, bool prefetch) {
        v16 acc[M][N] = {};
        const Word* w = q + m * D / E::PACK;
        for (int64_t d = 0; d < D / E::PACK; d++) {
            Line line[N];
            for (int j = 0; j < N; j++) {
                line[j] = keys.k[c + j][d];
                if (prefetch) __builtin_prefetch(next.k[c + j] + d);
            }
            for (int i = 0; i < M; i++)
                for (int j = 0; j < N; j++) acc[i][j] = E::mac(acc[i][j], line[j], w[i * D / E::PACK + d]);
        }
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) store(s + (m + i) * STEP + (c + j) * CHUNK, acc[i][j]);
    }

    void accumulate(State& state, const Keys<E>& keys, const Keys<E>& next) {
        const bool few = rows <= ROWS_AT_ONCE;
        in_blocks(0, rows, [&](int64_t m, auto n) {
            int64_t i = 0;
            for (; i + LINES_AT_ONCE <= D / LANES; i += LINES_AT_ONCE)
                accumulate_rows<n, LINES_AT_ONCE>(state, m, keys, next, i, few);
            for (; i < D / LANES; i++) accumulate_rows<n, 1>(state, m, keys, next, i, few);
        });
    }

    template <int M, int N>
    void accumulate_rows(State& state, int64_t m, const Keys<E>& keys, const Keys<E>& next, int64_t first, bool prefetch) {
        v16 acc[M][N];
        float* o = state.o + m * D + first * LANES;
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) acc[i][j] = load(o + i * D + j * LANES) * alpha[m + i];
        for (int c = 0; c < CHUNKS; c++) {
            const Line *v = keys.v[c] + first * V_LINES, *v_next = next.v[c] + first * V_LINES;
            if (!keys.v[c]) continue;
            const Word* w = p + (m * STEP + c * CHUNK) / E::PACK;
            for (int t = 0; t < V_LINES; t++) {
                Line line[N];
                for (int j = 0; j < N; j++) {
                    line[j] = v[j * V_LINES + t];
                    if (prefetch) __builtin_prefetch(v_next + j * V_LINES + t);
                }
                for (int i = 0; i < M; i++)
                    for (int j = 0; j < N; j++) acc[i][j] = E::mac(acc[i][j], line[j], w[i * STEP / E::PACK + t]);
            }
        }
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) store(o + i * D + j * LANES, acc[i][j]);
    }

    void softmax(State& state, int64_t first) {
        for (int64_t i = 0, m = 0; i < u.num_tokens; i++) {
            // Columns of the step this token sees: [begin, end), and those before `sinks`.
            int end = (int)std::clamp<int64_t>(u.first_pos + i + 1 - first, 0, STEP);
            int begin = a.window ? (int)std::clamp<int64_t>(u.first_pos + i + 1 - a.window - first, 0, STEP) : 0;
            int sinks = (int)std::clamp<int64_t>(a.num_sink_tokens - first, 0, STEP);
            bool whole = end == STEP && (begin == 0 || sinks >= begin);
            for (int64_t g = 0; g < G; g++, m++)
                whole ? softmax_row<true>(state, m, 0, 0, 0) : softmax_row<false>(state, m, begin, end, sinks);
        }
    }

    template <bool WHOLE>
    void softmax_row(State& state, int64_t m, int begin, int end, int sinks) {
        typedef int32_t i32x16 __attribute__((vector_size(64)));
        const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        v16 x[CHUNKS], top = splat(state.top[m]);
        i32x16 seen[CHUNKS];
        for (int c = 0; c < CHUNKS; c++) {
            x[c] = load(s + m * STEP + c * CHUNK);
            x[c] = a.softcap == 0 ? x[c] * (a.scale * LOG2_E) : tanh(x[c] * (a.scale / a.softcap)) * (a.softcap * LOG2_E);
            if (!WHOLE) {
                i32x16 col = lanes + c * CHUNK;
                seen[c] = (col < end) & ((col >= begin) | (col < sinks));
                x[c] = seen[c] ? x[c] : splat(-INFINITY);
            }
            top = max(x[c], top);
        }
        float new_top = horizontal_max(top), old_top = std::exchange(state.top[m], new_top);
        alpha[m] = new_top == old_top ? 1.0f : exp2(splat(old_top - new_top))[0];
        v16 sum = {};
        for (int c = 0; c < CHUNKS; c++) {
            x[c] = exp2(x[c] - new_top);
            if (!WHOLE) x[c] = seen[c] ? x[c] : v16{};
            sum += x[c];
            store((Elem*)(p + (m * STEP + c * CHUNK) / E::PACK), x[c]);
        }
        state.sum[m] = fma(state.sum[m], splat(alpha[m]), sum);
    }

    template <bool ADD>
    void amx_product(float* c, int64_t c_width, const Word* w, int64_t depth, int64_t w_width, const Line* b0, const Line* b1) {
        int64_t m = 0;
        for (; m + 32 <= padded_rows; m += 32)
            amx::product<2, ADD>(c + m * c_width, c_width * 4, w + m * w_width, w_width * 4, b0, b1, depth);
        if (m < padded_rows)
            amx::product<1, ADD>(c + m * c_width, c_width * 4, w + m * w_width, w_width * 4, b0, b1, depth);
    }

    void amx_score(const Keys<E>& keys) {
        amx::fence();
        for (int c = 0; c < CHUNKS; c += 2) {
            const Line *k0 = keys.k[c], *k1 = keys.k[c + 1];
            if (!k0 && !k1) continue;
            // A chunk nobody sees gets another's scores: the mask hides them.
            amx_product<false>(s + c * CHUNK, STEP, q, D / 32, D / 2, k0 ? k0 : k1, k1 ? k1 : k0);
        }
    }

    void amx_accumulate(State& state, const Keys<E>& keys, int64_t first) {
        const int64_t tiles = D / LANES;
        for (int c = 0; c < CHUNKS; c++)
            for (int64_t i = 0; i < tiles; i++) {
                Line* to = v_copy + ((i * 2 + c / 2) * 2 + c % 2) * V_LINES;
                if (keys.v[c])
                    copy_v(to, keys.v[c] + i * V_LINES, num_written(first + c * CHUNK));
                else
                    memset((void*)to, 0, V_LINES * sizeof(Line));
            }
        for (int64_t m = 0; m < rows; m++)
            if (alpha[m] != 1.0f)
                for (int64_t d = m * D; d < (m + 1) * D; d += LANES) store(state.o + d, load(state.o + d) * alpha[m]);
        amx::fence();
        for (int64_t i = 0; i < tiles; i += 2)
            amx_product<true>(state.o + i * LANES, D, p, 2, STEP / 2, v_copy + i * 32, v_copy + (i + 1) * 32);
    }
};

// Tiles of long rows come first and the costliest of them at the front; single tokens then fill the gaps between threads.
std::vector<Unit> plan(const Args& a, int64_t& work) {
    std::vector<Unit> units;
    const int64_t tile_tokens = std::max<int64_t>(1, TILE_ROWS / a.group());
    work = 0;
    for (bool single : {false, true})
        for (int64_t row = 0; row < a.num_rows; row++) {
            const int64_t start = a.query_starts[row], n = a.query_starts[row + 1] - start;
            if (n == 0 || (n == 1) != single) continue;
            for (int64_t first = (n - 1) / tile_tokens * tile_tokens; first >= 0; first -= tile_tokens) {
                const int64_t num = std::min(tile_tokens, n - first), pos = a.context_lens[row] - n + first;
                for (int64_t head = 0; head < a.num_kv_heads; head++)
                    units.push_back({row, head, start + first, num, pos, 0, (pos + num - 1) / PARTITION + 1});
                work += num * a.num_heads * a.head_size * std::min(pos + num, a.window ? a.window + num : pos + num);
            }
        }
    return units;
}

// Fewer units than threads can share evenly: give each partition its own, to be merged in order afterwards.
std::vector<Unit> split(const Args& a, const std::vector<Unit>& units) {
    std::vector<Unit> parts;
    for (const Unit& unit : units)
        for (int64_t i = unit.first_part; i < unit.end_part; i++) {
            if (!unit.sees(a, i * PARTITION, (i + 1) * PARTITION)) continue;
            parts.push_back(unit);
            parts.back().first_part = i;
            parts.back().end_part = i + 1;
        }
    return parts;
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
void paged_attention(const Args& a) {
    static thread_local Buffer scratch, kept;
    int64_t work;
    std::vector<Unit> units = plan(a, work), parts;
    const int64_t max_rows = std::max<int64_t>(1, TILE_ROWS / a.group()) * a.group();
    const bool parallel = work > PARALLEL_WORK, few = (int64_t)units.size() < 4 * omp_get_max_threads();
    if (parallel && few) parts = split(a, units);
    const std::vector<Unit>& todo = parts.empty() ? units : parts;
    const size_t kept_bytes = State::bytes(Tile<E>::padded(max_rows), a.head_size);
    char* const kept_states = parts.empty() ? nullptr : kept.at_least(parts.size() * kept_bytes);
#pragma omp parallel if (parallel)
    {
        amx::Tiles tiles(E::PACK == 2 && AMX_BUILT && amx::allowed());
        char* memory = scratch.at_least(Tile<E>::bytes(max_rows, a.head_size));
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < todo.size(); i++)
            Tile<E>(a, todo[i], memory, parts.empty() ? nullptr : kept_states + i * kept_bytes).run();
    }
    for (size_t i = 0; i < parts.size();) {
        const int64_t rows = parts[i].num_tokens * a.group(), padded = Tile<E>::padded(rows);
        State total = State::at(kept_states + i * kept_bytes, padded, a.head_size);
        size_t next = i + 1;
        for (; next < parts.size() && parts[next].same_tile(parts[i]); next++)
            merge(total, State::at(kept_states + next * kept_bytes, padded, a.head_size), rows, a.head_size);
        write_output<E>(a, parts[i], total);
        i = next;
    }
}

template <class E>
void write_kv(char* cache, const void* k, const void* v, const int64_t* slots, int64_t num_tokens, int64_t num_kv_heads,
              int64_t head_size, int64_t block_size, int64_t k_stride, int64_t v_stride) {
    using Elem = typename E::Elem;
    const KvLayout<E> layout{num_kv_heads, head_size, block_size};
#pragma omp parallel for schedule(static) if (num_tokens * num_kv_heads * head_size > 1 << 15)
    for (int64_t t = 0; t < num_tokens; t++)
        for (int64_t h = 0; h < num_kv_heads && slots[t] >= 0; h++)
            layout.store_token(cache, slots[t], h, (const Elem*)k + t * k_stride + h * head_size,
                               (const Elem*)v + t * v_stride + h * head_size);
}

}  // namespace

extern "C" {

void quire_write_kv(int bf16, char* cache, const void* k, const void* v, const int64_t* slots, int64_t num_tokens,
                    int64_t num_kv_heads, int64_t head_size, int64_t block_size, int64_t k_stride, int64_t v_stride) {
    (bf16 ? write_kv<BF16> : write_kv<F32>)(cache, k, v, slots, num_tokens, num_kv_heads, head_size, block_size, k_stride,
                                            v_stride);
}

void quire_paged_attention(int bf16, const void* q, void* out, const char* cache, const int32_t* query_starts,
                           const int32_t* context_lens, const int32_t* block_table, const float* sinks, int64_t num_rows,
                           int64_t num_heads, int64_t num_kv_heads, int64_t head_size, int64_t block_size,
                           int64_t q_stride, int64_t out_stride, int64_t table_stride, int64_t window,
                           int64_t num_sink_tokens, float scale, float softcap) {
    Args args{q,         out,        cache,    query_starts, context_lens, block_table, sinks,  num_rows,        num_heads, num_kv_heads,
              head_size, block_size, q_stride, out_stride,   table_stride, window,      num_sink_tokens, scale, softcap};
    (bf16 ? paged_attention<BF16> : paged_attention<F32>)(args);
}
}
