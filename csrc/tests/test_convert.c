/* Conversions: with one key the output is the value itself. */
#include <math.h>
#include <string.h>

#include "tests/test.h"

/* 16 heads, one key and 4096 columns: 65536 conversions. */
static void make_conversion(live_case *c, sa_dtype value, sa_dtype out, unsigned value_layout, unsigned out_layout) {
    test_case t = plain_case(out, 1, 1, 1, 4096);
    t.lead[0] = 16;
    t.query = t.key = SA_F32;
    t.value = value;
    t.value_layout = value_layout;
    t.out_layout = out_layout;
    t.lse = false;
    case_make(c, &t, 1);
}

/* `right` has the numbers before they are rounded. */
static void verify_conversion(live_case *c, const double *right, const char *title) {
    long wrong = 0;
    double first[2] = {0, 0};
    const sa_status status = case_run(c);
    for (long n = 0; n < 65536; ++n) {
        char rounded[8];
        const sa_dtype out = c->arrays[OUT].tensor.m.dtype;
        element_set(rounded, out, false, right[n]);
        const double want = element_get(rounded, out, false), got = case_get(c, OUT, n / 4096, 0, n % 4096);
        if (!(got == want || (isnan(got) && isnan(want))) && wrong++ == 0) {
            first[0] = got;
            first[1] = want;
        }
    }
    CHECK(status == SA_OK && wrong == 0, "%s, dtypes %d to %d: %ld wrong, first %.17g, not %.17g", title,
          c->arrays[VALUE].tensor.m.dtype, c->arrays[OUT].tensor.m.dtype, wrong, first[0], first[1]);
}

/* Reads every 16-bit code: in place, with a step, with bytes swapped. */
static void read_16_bits(sa_dtype dtype, unsigned layout) {
    FREES_AT_END;
    static double right[65536];
    live_case c;
    make_conversion(&c, dtype, SA_F32, layout, 0);
    for (long n = 0; n < 65536; ++n) {
        const uint16_t code = (uint16_t)n, other = __builtin_bswap16(code);
        char *p = case_at(&c, VALUE, n / 4096, 0, n % 4096);
        memcpy(p, c.arrays[VALUE].tensor.m.swapped ? &other : &code, 2);
        right[n] = element_get((const char *)&code, dtype, false);
    }
    verify_conversion(&c, right, "every 16-bit code read");
}

/* Writes float32 at every 16-bit number, at the next tie, and on either side of the tie. */
static void write_16_bits(sa_dtype dtype, int place, unsigned layout) {
    FREES_AT_END;
    static double right[65536];
    live_case c;
    make_conversion(&c, SA_F32, dtype, 0, layout);
    for (long n = 0; n < 65536; ++n) {
        const uint16_t code = (uint16_t)n, next = (uint16_t)(n + 1);
        const double here = element_get((const char *)&code, dtype, false);
        const double there = element_get((const char *)&next, dtype, false);
        float x = (float)here;
        if (place > 0 && isfinite(here)) {
            const double width = dtype == SA_F16 ? 32 : 0x1p120; /* the width of the step to infinity */
            x = (float)(isfinite(there) ? (here + there) / 2 : here + copysign(width / 2, here));
            x = place == 2 ? nextafterf(x, INFINITY) : place == 3 ? nextafterf(x, -INFINITY) : x;
        }
        right[n] = (double)x;
        case_set(&c, VALUE, n / 4096, 0, n % 4096, (double)x);
    }
    verify_conversion(&c, right, "float32 around every 16-bit number");
}

static void read_integers(sa_dtype dtype, double least, double most, unsigned layout) {
    FREES_AT_END;
    static double right[65536];
    live_case c;
    random_source r = {(uint64_t)dtype};
    make_conversion(&c, dtype, SA_F64, layout, 0);
    for (long n = 0; n < 65536; ++n) {
        const double x = n == 0 ? least : n == 1 ? most : rint(random_between(&r, least, most));
        case_set(&c, VALUE, n / 4096, 0, n % 4096, x);
        right[n] = x;
    }
    verify_conversion(&c, right, "integers read");
}

void test_convert(void) {
    static const unsigned layouts[] = {0, SWAPPED, STEPPED_COLS, UNALIGNED, FLIPPED_COLS | SWAPPED | UNALIGNED};
    for (int n = 0; n < 5; ++n) {
        for (sa_dtype dtype = SA_F16; dtype <= SA_BF16; ++dtype) {
            read_16_bits(dtype, layouts[n]);
            for (int place = quick ? n % 4 : 0; place < 4; place += quick ? 4 : 1) {
                write_16_bits(dtype, place, layouts[n] & ~(unsigned)SWAPPED);
            }
        }
        for (sa_dtype dtype = SA_I8; dtype <= SA_U64; ++dtype) {
            const int bits = 8 * (int)sa_itemsize(dtype);
            const bool is_signed = dtype == SA_I8 || dtype == SA_I16 || dtype == SA_I32 || dtype == SA_I64;
            const double most = ldexp(1, bits - is_signed), step = bits == 64 ? ldexp(1, bits - is_signed - 53) : 1;
            read_integers(dtype, is_signed ? -most : 0, most - step, layouts[n]);
        }
    }
}
