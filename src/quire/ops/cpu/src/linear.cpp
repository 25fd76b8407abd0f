// Linear layers with packed weights: y = x W^T (+ bias), x in bf16, W in 2 to 6, 8 or 16 bits. Called by ops/packed_linear/cpu.py.
//
// Weight layout (ops/packed_linear/reference.py is its plain twin). Sixteen outputs form a panel, 32 values of K a block; blocks
// follow each other along K, then panels. Inside a block the sixteen outputs lie side by side, one 32-bit lane each. The
// codes of a block are eight vectors of bytes: vector j holds K 4j..4j+3, the four bytes of a lane in the order 0, 2, 1, 3
// (see unpack.h). These are stored as they are, or in planes of 4, 2 and 1 bits:
//    8 bits  512 B: the eight vectors
//    4 bits  256 B: vector i of 4 holds vector i in its low nibbles and vector 4 + i in the high ones
//    5 bits  320 B: the low four bits as above; then one vector, of which bit j of a byte is the fifth of vector j
//    6 bits  384 B: the low four bits as above; then two vectors, the first with two bits each of vectors 0 to 3
//    2 bits  128 B: two vectors, the first with two bits each of vectors 0 to 3
//    3 bits  192 B: the low two bits as above; then one vector, of which bit j of a byte is the third of vector j
//   16 bits 1024 B: no codes: vector j of 16 holds K 2j, 2j+1 in bf16             (an AMX B tile as it is)
// with w = scale * (q - zero) + min, scale and min per output and group of inputs: [panel][group][16]. Codes of 4 bits may
// stand for sixteen values of a table instead.
//
// Compiled once for each kind of code in use, with QUIRE_KIND: see packed.h. A model has only a few kinds, and to compile
// all would take half a minute.
//
// A row's result never depends on the other rows of the call within one path, nor on the number of threads.

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include "few_rows.h"
#include "many_rows.h"

namespace {

constexpr int Kind = QUIRE_KIND;

void run(const Weight& w, const Job& job) {
    if constexpr (Kind != 16 && Kind != kFloatTable) {
        if (job.rows <= w.few_rows) return few_rows<Kind>(w, job);
    }
    many_rows<Kind>(w, job);
}

// Rows of the weight itself, in bf16; its first is that of id `first`, and those that it does not have are zero. A whole
// panel is unpacked for each, of which sixteen outputs are one.
void copy_rows(const Weight& w, const int32_t* ids, int64_t num_rows, uint16_t* out, int64_t first) {
    const int num_blocks = w.k / kBlock;
    const v16 unit = (v16)unit_of<Kind>(w);
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t id = ids[row] - first;
        if (id < 0 || id >= w.n) {
            std::memset(out + row * w.k, 0, w.k * sizeof *out);
            continue;
        }
        const int panel = id / kLanes, lane = id % kLanes;
        alignas(64) __m512i unpacked[kLanes];
        Unpacker<Kind> unpacker(w, {panel, {0, num_blocks}, nullptr}, scale_scratch[0]);
        for (int b = 0; b < num_blocks; ++b) {
            const __m512i* tile = unpacked;
            if constexpr (Kind == 16) {
                tile = reinterpret_cast<const __m512i*>(panel_data(w, 16, {panel, {b, b + 1}, nullptr}));
            } else {
                unpacker.start(b, unpacked);
                for (int j = 0; j < 4; ++j) unpacker.part(j);
            }
            uint32_t pairs[kLanes];
            for (int j = 0; j < kLanes; ++j) pairs[j] = reinterpret_cast<const uint32_t*>(tile + j)[lane];
            uint16_t* values = out + row * w.k + b * kBlock;
            std::memcpy(values, pairs, sizeof pairs);
            for (int i = 0; i < kBlock; i += kLanes) store(values + i, load(values + i) * unit);
        }
    }
}

}  // namespace

extern "C" {

// `out_stride`: values from one row of the output to the next.
void quire_linear(const Weight* w, const void* x, int64_t rows, void* out, int out_stride, int out_is_f32,
                  const void* bias) {
    run(*w, {static_cast<const uint16_t*>(x), out, out_stride, static_cast<const float*>(bias), int32_t(rows),
             bool(out_is_f32)});
}

// silu(first half of the outputs) * second half: [rows, n / 2] in bf16. Halves must be whole panels.
void quire_linear_silu_mul(const Weight* w, const void* x, int64_t rows, void* out) {
    run(*w, {static_cast<const uint16_t*>(x), out, w->n / 2, nullptr, int32_t(rows), false, true});
}

// The rows with these ids: [rows, k] in bf16.
void quire_packed_rows(const Weight* w, const void* ids, int64_t rows, void* out, int64_t first) {
    copy_rows(*w, static_cast<const int32_t*>(ids), rows, static_cast<uint16_t*>(out), first);
}
}

#endif
