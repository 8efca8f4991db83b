/* Products of compact weights on the matrix unit: 32 rows × 32 columns in four tiles. Rows and panel are read up to a
 * whole tile, as zeros follow each row and the last panel (drivers/compact.c).
 * Comes after kernels/products/amx_attention.h. */
#include "kernels/kernels.h"

#define SA_TILES_PRODUCT(name, dot)                                                                                    \
    SA_LEAF void name##_32(const sa_compact_tile *t) {                                                                 \
        SA_TILE_ZERO(0);                                                                                               \
        SA_TILE_ZERO(1);                                                                                               \
        SA_TILE_ZERO(2);                                                                                               \
        SA_TILE_ZERO(3);                                                                                               \
        for (ptrdiff_t k = 0; k < t->words; k += SA_TILE_ROWS) {                                                       \
            const char *panel = t->panel + k * SA_PANEL_COLUMNS * SA_WORD, *x = t->x + k * SA_WORD;                    \
            SA_TILE_LOAD(6, panel, SA_PANEL_COLUMNS * SA_WORD);                                                        \
            SA_TILE_LOAD(7, panel + 64, SA_PANEL_COLUMNS * SA_WORD);                                                   \
            SA_TILE_LOAD(4, x, t->stride);                                                                             \
            SA_TILE_LOAD(5, x + SA_TILE_ROWS * t->stride, t->stride);                                                  \
            dot(0, 4, 6);                                                                                              \
            dot(1, 4, 7);                                                                                              \
            dot(2, 5, 6);                                                                                              \
            dot(3, 5, 7);                                                                                              \
        }                                                                                                              \
        char *to = t->sums, *low = to + SA_TILE_ROWS * SA_PANEL_COLUMNS * SA_WORD;                                     \
        SA_TILE_STORE(0, to, SA_PANEL_COLUMNS * SA_WORD);                                                              \
        SA_TILE_STORE(1, to + 64, SA_PANEL_COLUMNS * SA_WORD);                                                         \
        SA_TILE_STORE(2, low, SA_PANEL_COLUMNS * SA_WORD);                                                             \
        SA_TILE_STORE(3, low + 64, SA_PANEL_COLUMNS * SA_WORD);                                                        \
        SA_TILE_FENCE();                                                                                               \
    }                                                                                                                  \
    SA_LEAF void name##_16(const sa_compact_tile *t) {                                                                 \
        SA_TILE_ZERO(0);                                                                                               \
        SA_TILE_ZERO(1);                                                                                               \
        for (ptrdiff_t k = 0; k < t->words; k += SA_TILE_ROWS) {                                                       \
            const char *panel = t->panel + k * SA_PANEL_COLUMNS * SA_WORD;                                             \
            SA_TILE_LOAD(6, panel, SA_PANEL_COLUMNS * SA_WORD);                                                        \
            SA_TILE_LOAD(7, panel + 64, SA_PANEL_COLUMNS * SA_WORD);                                                   \
            SA_TILE_LOAD(4, t->x + k * SA_WORD, t->stride);                                                            \
            dot(0, 4, 6);                                                                                              \
            dot(1, 4, 7);                                                                                              \
        }                                                                                                              \
        char *to = t->sums;                                                                                            \
        SA_TILE_STORE(0, to, SA_PANEL_COLUMNS * SA_WORD);                                                              \
        SA_TILE_STORE(1, to + 64, SA_PANEL_COLUMNS * SA_WORD);                                                         \
        SA_TILE_FENCE();                                                                                               \
    }                                                                                                                  \
    static void name(const sa_compact_tile *t) {                                                                       \
        SA_TILE_FENCE();                                                                                               \
        if (t->rows > SA_TILE_ROWS) {                                                                                  \
            name##_32(t);                                                                                              \
        } else {                                                                                                       \
            name##_16(t);                                                                                              \
        }                                                                                                              \
    }
#define SA_TILE_DOT_INT8(c, a, b) _tile_dpbusd(c, a, b)
SA_TILES_PRODUCT(sa_tiles_int8, SA_TILE_DOT_INT8)
SA_TILES_PRODUCT(sa_tiles_bf16, SA_TILE_DOT)
#undef SA_TILES_PRODUCT
#undef SA_TILE_DOT_INT8

static void sa_start_unit(void) { sa_start_tiles(); }
static void sa_end_unit(void) { sa_end_tiles(); }

const sa_compact_unit sa_int8_amx = {.name = "amxint8",
                                     .most_rows = 2 * SA_TILE_ROWS,
                                     .leaf = sa_tiles_int8,
                                     .start = sa_start_unit,
                                     .end = sa_end_unit};
const sa_compact_unit sa_bf16_amx = {
    .name = "amx", .most_rows = 2 * SA_TILE_ROWS, .leaf = sa_tiles_bf16, .start = sa_start_unit, .end = sa_end_unit};
