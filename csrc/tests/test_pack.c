/* Elements on their way in and out: with one key the output is the value itself, so conversions show exactly. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/test.h"

/* 16 heads of one query, one key and 4096 columns: the value and output of 65536 conversions. */
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

static void write_value(live_case *c, long n, double x) {
    element_set(array_at(&c->value, n / 4096, 1, 0, n % 4096), c->value.tensor.m.dtype, c->value.tensor.m.swapped, x);
}

/* Runs and compares each output with `right` rounded to the output's dtype by element_set. */
static void verify_conversion(live_case *c, const double *right, const char *title) {
    long wrong = 0;
    double first[2] = {0, 0};
    const sa_status status = case_run(c);
    for (long n = 0; n < 65536; ++n) {
        char rounded[8];
        const sa_dtype out = c->out.tensor.m.dtype;
        element_set(rounded, out, false, right[n]);
        const double want = element_get(rounded, out, false), got = array_get(&c->out, n / 4096, 1, 0, n % 4096);
        if (!(got == want || (isnan(got) && isnan(want))) && wrong++ == 0) {
            first[0] = got;
            first[1] = want;
        }
    }
    CHECK(status == SA_OK && wrong == 0, "%s, dtypes %d to %d: %ld wrong, first %.17g, not %.17g", title,
          c->value.tensor.m.dtype, c->out.tensor.m.dtype, wrong, first[0], first[1]);
}

/* Every code of a 16-bit format, read in place, with a step and swapped. */
static void read_16_bits(sa_dtype dtype, unsigned layout) {
    static double right[65536];
    live_case c;
    make_conversion(&c, dtype, SA_F32, layout, 0);
    for (long n = 0; n < 65536; ++n) {
        const uint16_t code = (uint16_t)n, other = __builtin_bswap16(code);
        char *p = array_at(&c.value, n / 4096, 1, 0, n % 4096);
        memcpy(p, c.value.tensor.m.swapped ? &other : &code, 2);
        right[n] = element_get((const char *)&code, dtype, false);
    }
    verify_conversion(&c, right, "every 16-bit code read");
    case_free(&c);
}

/* float32 around every number of a 16-bit format: itself, the tie with the next, and either side of the tie. */
static void write_16_bits(sa_dtype dtype, int part, unsigned layout) {
    static double right[65536];
    live_case c;
    make_conversion(&c, SA_F32, dtype, 0, layout);
    for (long n = 0; n < 65536; ++n) {
        const uint16_t code = (uint16_t)n, next = (uint16_t)(n + 1);
        const double here = element_get((const char *)&code, dtype, false);
        const double there = element_get((const char *)&next, dtype, false);
        float x = (float)here;
        if (part > 0 && isfinite(here)) {
            const double width = dtype == SA_F16 ? 32 : 0x1p120; /* of the last step, to where infinity begins */
            x = (float)(isfinite(there) ? (here + there) / 2 : here + copysign(width / 2, here));
            x = part == 2 ? nextafterf(x, INFINITY) : part == 3 ? nextafterf(x, -INFINITY) : x;
        }
        right[n] = (double)x;
        write_value(&c, n, (double)x);
    }
    verify_conversion(&c, right, "float32 around every 16-bit number");
    case_free(&c);
}

static void read_integers(sa_dtype dtype, double least, double most, unsigned layout) {
    static double right[65536];
    live_case c;
    random_source r = {(uint64_t)dtype};
    make_conversion(&c, dtype, SA_F64, layout, 0);
    for (long n = 0; n < 65536; ++n) {
        const double x = n == 0 ? least : n == 1 ? most : rint(random_between(&r, least, most));
        write_value(&c, n, x);
        right[n] = x;
    }
    verify_conversion(&c, right, "integers read");
    case_free(&c);
}

void test_pack(void) {
    const unsigned layouts[] = {0, SWAPPED, STEPPED_COLS, UNALIGNED, FLIPPED_COLS | SWAPPED | UNALIGNED};
    for (int n = 0; n < 5; ++n) {
        read_16_bits(SA_F16, layouts[n]);
        read_16_bits(SA_BF16, layouts[n]);
        read_integers(SA_I8, -128, 127, layouts[n]);
        read_integers(SA_U8, 0, 255, layouts[n]);
        read_integers(SA_I16, -32768, 32767, layouts[n]);
        read_integers(SA_U16, 0, 65535, layouts[n]);
        read_integers(SA_I32, -0x1p31, 0x1p31 - 1, layouts[n]);
        read_integers(SA_U32, 0, 0x1p32 - 1, layouts[n]);
        read_integers(SA_I64, -0x1p63, 0x1p63 - 1024, layouts[n]);
        read_integers(SA_U64, 0, 0x1p64 - 2048, layouts[n]);
        for (int part = 0; part < 4; ++part) {
            write_16_bits(SA_F16, part, layouts[n] & ~(unsigned)SWAPPED);
            write_16_bits(SA_BF16, part, layouts[n] & ~(unsigned)SWAPPED);
        }
    }
}
