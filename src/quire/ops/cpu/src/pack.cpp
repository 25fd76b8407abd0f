// Packing of weights for linear.cpp, and whether its kernels may run. Called by ops/packed_linear/cpu.py.

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include "pack.h"

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>

static bool amx_allowed() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
static bool amx_allowed() { return true; }
#endif

extern "C" {

// 1 where the kernels may run. Must come before any of their calls: it asks the system for the use of AMX.
int quire_linear_supported() { return amx_allowed(); }

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
    if (is("Q2_K")) return pack<Q2_K>(*w, bytes), 0;
    if (is("Q3_K")) return pack<Q3_K>(*w, bytes), 0;
    if (is("IQ4_NL")) return pack<IQ4_NL>(*w, bytes), 0;
    if (is("IQ4_XS")) return pack<IQ4_XS>(*w, bytes), 0;
    if (is("MXFP4")) return pack<MXFP4>(*w, bytes), 0;
    return -1;
}

// `weight` is [n, k] in bf16.
void quire_pack_dense(const Weight* w, const void* weight) { pack_dense(*w, static_cast<const uint32_t*>(weight)); }
}

#else

extern "C" int quire_linear_supported() { return 0; }

#endif
