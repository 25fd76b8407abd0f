// What processes that compute one model together exchange, through memory that all of them have mapped: sums, rows side by
// side, and a ring from one process to the next.
// Called through ctypes by ops/ranks/cpu.py; utils/shared_memory.py makes the memory: a flag per rank (or per end of a ring),
// then slots. Everybody calls in the same order with the same sizes. Messages larger than a slot go in pieces.
#include "simd.h"

#include <linux/futex.h>
#include <omp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>

// float16, beside simd.h's float32 and bfloat16.
struct Half {
    uint16_t bits;
};

static inline v16 load(const Half* p) {
    v16 r;
#if defined(__F16C__)
    for (int i = 0; i < 2; i++) {
        const __m256 eight = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + i));
        memcpy((float*)&r + i * 8, &eight, 32);
    }
#else
    _Float16 halves[LANES];
    memcpy(halves, p, sizeof(halves));
    for (int i = 0; i < LANES; i++) r[i] = halves[i];
#endif
    return r;
}

static inline void store(Half* p, v16 x) {
#if defined(__F16C__)
    for (int i = 0; i < 2; i++) {
        __m256 eight;
        memcpy(&eight, (const float*)&x + i * 8, 32);
        _mm_storeu_si128((__m128i*)p + i, _mm256_cvtps_ph(eight, _MM_FROUND_TO_NEAREST_INT));
    }
#else
    _Float16 halves[LANES];
    for (int i = 0; i < LANES; i++) halves[i] = x[i];
    memcpy(p, halves, sizeof(halves));
#endif
}

namespace {

constexpr int64_t PARALLEL_BYTES = 1 << 16;  // below, waking the other threads costs more than they save
constexpr int64_t SPIN_NS = 50'000;          // in one call, however often it waits
constexpr int64_t PAUSE_NS = 5'000;          // of them; then others may run here: maybe the very rank that is waited for
constexpr int LOOKS = 4;                     // at a flag, between two at the clock
constexpr int64_t FIRST_NAP_NS = 10'000, LONGEST_NAP_NS = 1'000'000'000;

// How many messages a rank has written, or one end of a ring has written or read. Alone in its pair of cache lines.
struct alignas(128) Flag {
    std::atomic<uint32_t> count;
    std::atomic<uint32_t> sleepers;
};
static_assert(sizeof(Flag) == 128 && std::atomic<uint32_t>::is_always_lock_free);

// Not private to a process. Returns at once if the count is not what was seen.
void sleep_on(Flag& flag, uint32_t seen, int64_t ns) {
    const timespec time = {ns / 1'000'000'000, ns % 1'000'000'000};
    syscall(SYS_futex, &flag.count, FUTEX_WAIT, seen, &time, nullptr, 0);
}
void wake(Flag& flag) { syscall(SYS_futex, &flag.count, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Counts wrap around, so it is their distance that counts.
bool reached(uint32_t count, uint32_t target) { return (int32_t)(count - target) >= 0; }

// Sequentially consistent, as `wait_for` is: of a new count and a new sleeper at least one sees the other.
void publish(Flag& flag, uint32_t count) {
    flag.count.store(count);
    if (flag.sleepers.load()) wake(flag);
}

// Sleeps until `target` is reached, for as long as it takes: a process that is stopped comes back. First in short naps, which
// end within 5 us. To be woken may take longer than the others spin: then they would be asleep at the next sum, wake up as
// late in their turn, and so on at every sum.
void sleep_until(Flag& flag, uint32_t target) {
    [[maybe_unused]] static thread_local const int once = prctl(PR_SET_TIMERSLACK, 1);  // else a nap takes 50 us more
    const int64_t start = now_ns();
    flag.sleepers.fetch_add(1);
    for (uint32_t seen; !reached(seen = flag.count.load(), target);)
        sleep_on(flag, seen, std::min(LONGEST_NAP_NS, FIRST_NAP_NS + (now_ns() - start) / 4));
    flag.sleepers.fetch_sub(1);
}

// Spins for as long as `spin_ns` has left, then sleeps.
void wait_for(Flag& flag, uint32_t target, int64_t& spin_ns) {
    if (reached(flag.count.load(std::memory_order_acquire), target)) return;
    for (const int64_t start = now_ns(), left = spin_ns; spin_ns > 0; spin_ns = left - (now_ns() - start))
        for (int i = 0; i < LOOKS; i++) {
            left - spin_ns < PAUSE_NS ? pause() : (void)sched_yield();
            if (reached(flag.count.load(std::memory_order_acquire), target)) return;
        }
    sleep_until(flag, target);
}

// Calls f(start, end) for parts of n elements, one per thread if that pays. All but the last are whole vectors.
template <class F>
void in_parts(int64_t n, int64_t element_bytes, F f) {
    const int64_t num_parts = n * element_bytes > PARALLEL_BYTES ? omp_get_max_threads() : 1;
    if (num_parts == 1) return f(0, n);
    const int64_t each = ((n + num_parts - 1) / num_parts + 63) / 64 * 64;
#pragma omp parallel for num_threads(num_parts)
    for (int64_t i = 0; i < num_parts; i++)
        if (i * each < n) f(i * each, std::min(n, (i + 1) * each));
}

void copy(void* to, const void* from, int64_t num_bytes) {
    in_parts(num_bytes, 1, [&](int64_t start, int64_t end) { memcpy((char*)to + start, (const char*)from + start, end - start); });
}

// A group's memory, and this process's place in it. A rank writes its message n into its slot n % 2. It may: all others have
// read message n - 2 before they wrote n - 1, and it has seen them write that.
struct Group {
    Flag* flags;
    char* slots;
    int64_t slot_bytes;
    int rank, size;
    int64_t spin_ns = SPIN_NS;

    char* slot(int of, uint32_t turn) const { return slots + (2 * of + turn % 2) * slot_bytes; }

    // `write(slot)` what this rank has, then `read(turn)` when all have written.
    template <class Write, class Read>
    void exchange(Write write, Read read) {
        const uint32_t turn = flags[rank].count.load(std::memory_order_relaxed) + 1;
        write(slot(rank, turn));
        publish(flags[rank], turn);
        for (int i = 1; i < size; i++) wait_for(flags[(rank + i) % size], turn, spin_ns);
        read(turn);
    }
};

// x = the sum of what lies at `parts`, apart by `stride` bytes, in that order; in float32, rounded once.
template <class T>
void add(T* x, const char* parts, int64_t stride, int size, int64_t start, int64_t end) {
    auto total = [&](int64_t at) {
        v16 sum = load((const T*)parts + at);
        for (int r = 1; r < size; r++) sum += load((const T*)(parts + r * stride) + at);
        return sum;
    };
    int64_t i = start;
    for (; i + LANES <= end; i += LANES) store(x + i, total(i));
    if (i == end) return;
    T rest[LANES] = {};
    v16 sum = {};
    for (int r = 0; r < size; r++) {
        memcpy(rest, (const T*)(parts + r * stride) + i, (end - i) * sizeof(T));
        sum = r ? sum + load(rest) : load(rest);
    }
    store(rest, sum);
    memcpy(x + i, rest, (end - i) * sizeof(T));
}

template <class T>
void sum(Group group, T* x, int64_t n) {
    for (int64_t count; n > 0; n -= count, x += count) {
        count = std::min<int64_t>(n, group.slot_bytes / sizeof(T));
        group.exchange([&](char* slot) { copy(slot, x, count * sizeof(T)); },
                       [&](uint32_t turn) {
                           in_parts(count, sizeof(T), [&](int64_t start, int64_t end) {
                               add(x, group.slot(0, turn), 2 * group.slot_bytes, group.size, start, end);
                           });
                       });
    }
}

// The piece of a rank's row that begins at `column` has this many bytes, of `most`.
int64_t piece(int64_t width, int64_t column, int64_t most) { return std::max<int64_t>(0, std::min(width - column, most)); }

// As many rows at a time as fit a slot, or a piece of one.
void gather(Group group, char* out, const char* x, int64_t stride, const int64_t* widths, int64_t rows) {
    int64_t out_stride = 0, widest = 1;
    for (int r = 0; r < group.size; r++) out_stride += widths[r], widest = std::max(widest, widths[r]);
    const int64_t most = std::min(widest, group.slot_bytes), at_once = std::max<int64_t>(1, group.slot_bytes / most);
    auto write = [&](char* slot, int64_t first, int64_t count, int64_t column) {
        const int64_t width = piece(widths[group.rank], column, most);
        in_parts(count, width, [&](int64_t start, int64_t end) {
            for (int64_t i = start; i < end; i++) memcpy(slot + i * width, x + (first + i) * stride + column, width);
        });
    };
    auto read = [&](uint32_t turn, int64_t first, int64_t count, int64_t column) {
        in_parts(count, out_stride, [&](int64_t start, int64_t end) {
            char* to = out + column;
            for (int r = 0; r < group.size; to += widths[r++]) {
                const int64_t width = piece(widths[r], column, most);
                for (int64_t i = start; width && i < end; i++)
                    memcpy(to + (first + i) * out_stride, group.slot(r, turn) + i * width, width);
            }
        });
    };
    for (int64_t first = 0; first < rows; first += at_once)
        for (int64_t column = 0, count = std::min(at_once, rows - first); column < widest; column += most)
            group.exchange([&](char* slot) { write(slot, first, count, column); },
                           [&](uint32_t turn) { read(turn, first, count, column); });
}

}  // namespace

extern "C" {

// `type` of x: 0 float32, 1 bfloat16, 2 float16.
void quire_sum(int type, Flag* flags, char* slots, int64_t slot_bytes, int rank, int size, void* x, int64_t rows,
               int64_t width) {
    const Group group{flags, slots, slot_bytes, rank, size};
    if (type == 0) sum(group, (float*)x, rows * width);
    if (type == 1) sum(group, (uint16_t*)x, rows * width);
    if (type == 2) sum(group, (Half*)x, rows * width);
}

// `widths` and `stride` in bytes.
void quire_gather(Flag* flags, char* slots, int64_t slot_bytes, int rank, int size, char* out, const char* x, int64_t stride,
                  const int64_t* widths, int64_t rows) {
    gather({flags, slots, slot_bytes, rank, size}, out, x, stride, widths, rows);
}

// A ring of slots, whose flags say how many were written and how many were read.
void quire_send(Flag* flags, char* slots, int64_t slot_bytes, int num_slots, const char* x, int64_t rows, int64_t row_bytes) {
    int64_t spin_ns = SPIN_NS;
    for (int64_t sent = 0; sent < rows * row_bytes; sent += slot_bytes) {
        const uint32_t turn = flags[0].count.load(std::memory_order_relaxed);
        wait_for(flags[1], turn + 1 - num_slots, spin_ns);
        copy(slots + turn % num_slots * slot_bytes, x + sent, std::min(slot_bytes, rows * row_bytes - sent));
        publish(flags[0], turn + 1);
    }
}

void quire_receive(Flag* flags, char* slots, int64_t slot_bytes, int num_slots, char* x, int64_t rows, int64_t row_bytes) {
    int64_t spin_ns = SPIN_NS;
    for (int64_t received = 0; received < rows * row_bytes; received += slot_bytes) {
        const uint32_t turn = flags[1].count.load(std::memory_order_relaxed);
        wait_for(flags[0], turn + 1, spin_ns);
        copy(x + received, slots + turn % num_slots * slot_bytes, std::min(slot_bytes, rows * row_bytes - received));
        publish(flags[1], turn + 1);
    }
}
}
