/* Random numbers, elements of any dtype, memory. */
#define _DEFAULT_SOURCE  /* for MAP_ANONYMOUS of Linux */
#define _DARWIN_C_SOURCE /* and of macOS */
#include "tests/test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(_WIN32)
#include <windef.h>

#include <memoryapi.h>
#elif !defined(__wasm__)
#include <sys/mman.h>
#endif

uint64_t random_bits(random_source *r) {
    uint64_t z = (r->state += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

double random_between(random_source *r, double least, double most) {
    return least + (most - least) * ((double)(random_bits(r) >> 11) * 0x1p-53);
}

bool random_chance(random_source *r, double p) { return random_between(r, 0, 1) < p; }

static double decode(uint64_t code, int bits, int width) {
    const int bias = (1 << (width - bits - 1)) - 1;
    const uint64_t significand = code & ((UINT64_C(1) << (bits - 1)) - 1);
    const int exponent = (int)(code >> (bits - 1)) & (2 * bias + 1);
    const double sign = code >> (width - 1) ? -1 : 1;
    if (exponent == 2 * bias + 1) {
        return significand ? (double)NAN : sign * (double)INFINITY;
    }
    if (exponent == 0) {
        return sign * ldexp((double)significand, 2 - bias - bits);
    }
    return sign * ldexp((double)(significand | UINT64_C(1) << (bits - 1)), exponent - bias - bits + 1);
}

double element_get(const char *p, sa_dtype dtype) {
    uint16_t code;
#define GET(type)                                                                                                      \
    {                                                                                                                  \
        type x;                                                                                                        \
        memcpy(&x, p, sizeof x);                                                                                       \
        return (double)x;                                                                                              \
    }
    switch (dtype) {
    case SA_F16:
    case SA_BF16: memcpy(&code, p, sizeof code); return decode(code, dtype == SA_F16 ? 11 : 8, 16);
    case SA_F32: GET(float)
    case SA_F64: GET(double)
    case SA_I32: GET(int32_t)
    case SA_I8: GET(int8_t)
    default: GET(uint8_t)
    }
}

double unit_roundoff(sa_dtype dtype) {
    return dtype == SA_F64 ? 0x1p-53 : dtype == SA_F32 ? 0x1p-24 : dtype == SA_F16 ? 0x1p-11 : 0x1p-8;
}

#if defined(_WIN32)
static void *allocate(size_t size) { return _aligned_malloc(size, 64); }
static void release(void *p) { _aligned_free(p); }

char *closed_pages(size_t bytes) { return VirtualAlloc(NULL, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_NOACCESS); }
bool open_pages(char *pages, size_t bytes) {
    DWORD before;
    return VirtualProtect(pages, bytes, PAGE_READWRITE, &before);
}
void free_pages(char *pages, size_t bytes) {
    (void)bytes;
    VirtualFree(pages, 0, MEM_RELEASE);
}
#else
static void *allocate(size_t size) {
    void *p = NULL;
    return posix_memalign(&p, 64, size) == 0 ? p : NULL;
}
static void release(void *p) { free(p); }

#if !defined(__wasm__)
char *closed_pages(size_t bytes) {
    char *pages = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return pages == MAP_FAILED ? NULL : pages;
}
bool open_pages(char *pages, size_t bytes) { return mprotect(pages, bytes, PROT_READ | PROT_WRITE) == 0; }
void free_pages(char *pages, size_t bytes) { munmap(pages, bytes); }
#endif
#endif

static void **owned;
static size_t owned_count, owned_most;

static void *own(void *p) {
    if (owned_count == owned_most) {
        owned_most = 2 * owned_most + 1024;
        owned = realloc(owned, owned_most * sizeof *owned);
    }
    if (p == NULL || owned == NULL) {
        abort();
    }
    return owned[owned_count++] = p;
}

size_t memory_count(void) { return owned_count; }

void memory_free(const size_t *before) {
    while (owned_count > *before) {
        release(owned[--owned_count]);
    }
}

void *dirty_memory(size_t size) { return memset(own(allocate(size ? size : 64)), 0xFF, size); }

void *zero_memory(size_t size) { return memset(own(allocate(size ? size : 64)), 0, size); }

double real_get(const void *x, bool f64, ptrdiff_t i) {
    return f64 ? ((const double *)x)[i] : (double)((const float *)x)[i];
}

void real_set(void *x, bool f64, ptrdiff_t i, double value) {
    if (f64) {
        ((double *)x)[i] = value;
    } else {
        ((float *)x)[i] = (float)value;
    }
}
