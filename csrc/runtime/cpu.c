/* Finds which instruction sets this CPU and operating system can run. */
#define _GNU_SOURCE
#include "runtime/dispatch.h"

#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#endif

#if defined(__x86_64__)
typedef struct {
    unsigned eax, ebx, ecx, edx;
} registers;

/* Returns zeros for a leaf that the CPU does not have. */
static registers cpuid(unsigned leaf, unsigned subleaf) {
    registers r = {0, 0, 0, 0};
    __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
    return r;
}

static bool has_all(unsigned bits, unsigned needed) { return (bits & needed) == needed; }

/* True if the system saves these register states (XCR0). */
static bool saves(unsigned states) {
    if (!has_all(cpuid(1, 0).ecx, 1u << 27)) { /* the bit OSXSAVE */
        return false;
    }
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return has_all(low, states);
}

static bool has_avx2(void) {
    const unsigned fma = 1u << 12, avx = 1u << 28, f16c = 1u << 29, avx2 = 1u << 5;
    return saves(0x6) && has_all(cpuid(1, 0).ecx, fma | avx | f16c) && has_all(cpuid(7, 0).ebx, avx2); /* XMM and YMM */
}

static bool has_avx512(void) {
    const unsigned f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31;
    return has_avx2() && saves(0xe6) && has_all(cpuid(7, 0).ebx, f | dq | bw | vl); /* masks and ZMM, too */
}

/* Only AMD's CPUs count: on Intel's these instructions are slower than multiply-adds. */
static bool has_avx512bf16(void) {
    const registers name = cpuid(0, 0);
    const bool amd = name.ebx == signature_AMD_ebx && name.edx == signature_AMD_edx && name.ecx == signature_AMD_ecx;
    return amd && has_avx512() && has_all(cpuid(7, 1).eax, 1u << 5);
}

static bool has_avx512vnni(void) { return has_avx512() && has_all(cpuid(7, 0).ecx, 1u << 11); }

static bool has_avxvnni(void) { return has_avx2() && has_all(cpuid(7, 1).eax, 1u << 4); }

/* A process has to request the tiles from Linux once, for all its threads. */
static bool has_amx(void) {
#if defined(__linux__)
    const unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
    const long request_permission = 0x1023, tile_data = 18;
    return has_avx512() && saves(0x60000) && has_all(cpuid(7, 0).edx, amx_bf16 | amx_tile) &&
           syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}

static bool has_amxint8(void) { return has_amx() && has_all(cpuid(7, 0).edx, 1u << 25); }
#endif

#if defined(__aarch64__)
static bool has_neondot(void) {
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__APPLE__)
    return true;
#else
    return false;
#endif
}
#endif

bool sa_cpu_runs(const char *isa) {
#if defined(__x86_64__) || defined(__aarch64__)
    static const struct {
        const char *name;
        bool (*has)(void);
    } sets[] = {
#if defined(__x86_64__)
        {"amx", has_amx},         {"amxint8", has_amxint8},       {"avx512bf16", has_avx512bf16},
        {"avx512", has_avx512},   {"avx512vnni", has_avx512vnni}, {"avx2", has_avx2},
        {"avxvnni", has_avxvnni},
#else
        {"neondot", has_neondot},
#endif
    };
    for (size_t i = 0; i < sizeof sets / sizeof *sets; ++i) {
        if (strcmp(isa, sets[i].name) == 0) {
            return sets[i].has();
        }
    }
#else
    (void)isa;
#endif
    return true; /* every CPU of this architecture has it */
}
