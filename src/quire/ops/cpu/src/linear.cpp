// Linear layers with packed weights: y = x W^T (+ bias), x in bf16, W in 4, 8 or 16 bits. Called by ops/packed_linear/cpu.py.
//
// Weight layout (ops/packed_linear/reference.py is its plain twin). Sixteen outputs form a panel, 32 values of K a block; blocks
// follow each other along K, then panels. Inside a block the sixteen outputs lie side by side, one 32-bit lane each:
//    4 bits  256 B: vector j of 4 holds K 4j..4j+3 in the low nibbles and K 16+4j..16+4j+3 in the high ones
//    8 bits  512 B: vector j of 8 holds K 4j..4j+3; the four bytes of a lane are in the order 0, 2, 1, 3 (see unpack.h)
//   16 bits 1024 B: vector j of 16 holds K 2j, 2j+1                               (an AMX B tile as it is)
// with w = scale * (q - zero) + min, scale and min per output and group of 32 or 16 along K: [panel][group][16].
//
// A row's result never depends on the other rows of the call within one path, nor on the number of threads.

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

#include "few_rows.h"
#include "many_rows.h"
#include "pack.h"

namespace {

template <int Bits>
void run(const Weight& w, const Job& job) {
    if constexpr (Bits != 16) {
        if (job.rows <= w.few_rows) return few_rows<Bits>(w, job);
    }
    many_rows<Bits>(w, job);
}

void run(const Weight& w, const Job& job) {
    if (w.bits == 4) run<4>(w, job);
    if (w.bits == 8) run<8>(w, job);
    if (w.bits == 16) run<16>(w, job);
}

}  // namespace

extern "C" {

// 1 where these kernels may run. Must come before any other call: it asks the system for the use of AMX.
int quire_linear_supported() { return amx_allowed(); }

void quire_linear(const Weight* w, const void* x, int64_t rows, void* out, int out_is_f32, const void* bias) {
    run(*w, {static_cast<const uint16_t*>(x), out, static_cast<const float*>(bias), int32_t(rows), bool(out_is_f32)});
}

// silu(first half of the outputs) * second half: [rows, n / 2] in bf16. Halves must be whole panels.
void quire_linear_silu_mul(const Weight* w, const void* x, int64_t rows, void* out) {
    run(*w, {static_cast<const uint16_t*>(x), out, nullptr, int32_t(rows), false, true});
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
void quire_pack_dense(const Weight* w, const void* weight) { pack_dense(*w, static_cast<const uint32_t*>(weight)); }
}

#else

extern "C" int quire_linear_supported() { return 0; }

#endif
