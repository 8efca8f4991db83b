/* Owns what this CPU and this operating system can run. */
#define _GNU_SOURCE /* syscall */
#include "runtime/cpu.h"

#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "selfattn.h"

#if defined(__x86_64__)
/* XCR0: which register states the operating system saves. A CPU may have AVX-512 and the OS not. */
static unsigned long long saved_states(void) {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & (1u << 27))) { /* OSXSAVE */
        return 0;
    }
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((unsigned long long)high << 32) | low;
}

static bool has_avx2(void) {
    unsigned eax, ebx, ecx, edx;
    if ((saved_states() & 0x6) != 0x6 || !__get_cpuid(1, &eax, &ebx, &ecx, &edx)) { /* XMM and YMM */
        return false;
    }
    const unsigned fma = 1u << 12, avx = 1u << 28, f16c = 1u << 29;
    if ((ecx & (fma | avx | f16c)) != (fma | avx | f16c) || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
        return false;
    }
    return (ebx & (1u << 5)) != 0;
}

static bool has_avx512(void) {
    unsigned eax, ebx, ecx, edx;
    if (!has_avx2() || (saved_states() & 0xe6) != 0xe6) { /* also the masks, and both halves of ZMM */
        return false;
    }
    const unsigned needed = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F, DQ, BW, VL */
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & needed) == needed;
}

/* AVX512_BF16 where it pays, on AMD's CPUs: a product of pairs took as long as a multiply-add on a Zen 4 and a Zen 5, on an Intel with
 * AMX 0.6 ns where that took 0.16. */
static bool has_avx512bf16(void) {
    unsigned eax, ebx, ecx, edx;
    if (!has_avx512() || !__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) || !(eax & (1u << 5)) ||
        !__get_cpuid(0, &eax, &ebx, &ecx, &edx)) {
        return false;
    }
    return ebx == signature_AMD_ebx && edx == signature_AMD_edx && ecx == signature_AMD_ecx;
}

/* AMX with bfloat16. A process has to ask Linux for the tiles once, for all its threads; the answer does not change. */
static bool has_amx(void) {
#if defined(__linux__)
    unsigned eax, ebx, ecx, edx;
    if (!has_avx512() || (saved_states() & 0x60000) != 0x60000 || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
        return false;
    }
    const unsigned needed = 1u << 22 | 1u << 24; /* AMX-BF16, AMX-TILE */
    const long request_permission = 0x1023, tile_data = 18;
    return (edx & needed) == needed && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}
#endif

bool sa_cpu_runs(const char *isa) {
#if defined(__x86_64__)
    if (strcmp(isa, "amx") == 0) {
        return has_amx();
    }
    if (strcmp(isa, "avx512bf16") == 0) {
        return has_avx512bf16();
    }
    if (strcmp(isa, "avx512") == 0) {
        return has_avx512();
    }
    if (strcmp(isa, "avx2") == 0) {
        return has_avx2();
    }
    if (strcmp(isa, "baseline") == 0) {
        return true;
    }
#endif
#if defined(__aarch64__)
    if (strcmp(isa, "neon") == 0) {
        return true;
    }
#endif
    return strcmp(isa, "generic") == 0;
}
