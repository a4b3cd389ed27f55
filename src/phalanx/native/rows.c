/* Rows of a matrix: copied, and added to.

   Random rows of a large matrix are in no cache. The processor waits for each unless it is told
   early which ones come next: that is all that these loops do beyond what they say.

   Rows outside of the matrix are read as its nearest: callers check them, but what they checked
   may be changed by another thread meanwhile. Where the matrix is a part of a larger one, `first`
   is the number of its first row. */

#include <stdint.h>
#include <string.h>

#include "native.h"

#define AHEAD 32 /* rows: into the second cache, which has room for them and more of it under way */
#define MOST 512 /* bytes of a row: what is longer, the processor sees coming itself */

static inline int64_t within(int64_t row, int64_t num_rows) {
    return row < 0 ? 0 : row < num_rows ? row : num_rows - 1;
}

static inline void fetch(const char *row, int64_t row_bytes) {
    int64_t stop = row_bytes < MOST ? row_bytes : MOST;
    for (int64_t at = 0; at < stop; at += LINE) __builtin_prefetch(row + at, 0, 2);
}

int64_t phalanx_version(void) { return VERSION; }

/* The row of the matrix; as numbers without a sign, which wrap around. */
static inline int64_t counted(int64_t row, int64_t first) {
    return (int64_t)((uint64_t)row - (uint64_t)first);
}

/* Tell whether all rows are within the matrix. */
WIDE int64_t phalanx_within(const int64_t *rows, int64_t count, int64_t first, int64_t num_rows) {
    uint64_t outside = 0; /* a negative number is a large one without a sign */
    for (int64_t i = 0; i < count; i++)
        outside |= (uint64_t)counted(rows[i], first) >= (uint64_t)num_rows;
    return !outside;
}

/* Copy row numbers, counted from `first`; one that is outside of the matrix becomes its nearest. */
void phalanx_clamp(const int64_t *rows, int64_t count, int64_t first, int64_t num_rows,
                   int64_t *to) {
    for (int64_t i = 0; i < count; i++) to[i] = within(counted(rows[i], first), num_rows);
}

/* Copy rows, through the caches: whoever asks for rows, or sends them to another host, reads them
   soon. */
void phalanx_take(const char *values, int64_t num_rows, int64_t row_bytes,
                  const int64_t *rows, int64_t count, int64_t first, char *out) {
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            fetch(values + within(counted(rows[i + AHEAD], first), num_rows) * row_bytes,
                  row_bytes);
        const char *row = values + within(counted(rows[i], first), num_rows) * row_bytes;
        memcpy(out + i * row_bytes, row, (size_t)row_bytes);
    }
}

/* Add rows of a delta to rows, times `scale`.
   Integers are added as unsigned ones, which wrap around, as torch's do; their scale is 1. */
#define ADD(NAME, TYPE, SUM)                                                                     \
    WIDE ADD_OF(NAME, TYPE) {                                                                    \
        int64_t row_bytes = num_cols * (int64_t)sizeof(TYPE);                                    \
        for (int64_t i = 0; i < count; i++) {                                                    \
            if (i + AHEAD < count) {                                                             \
                int64_t next = within(rows[i + AHEAD], num_rows);                                \
                fetch((const char *)(values + next * num_cols), row_bytes);                      \
            }                                                                                    \
            TYPE *restrict row = values + within(rows[i], num_rows) * num_cols;                  \
            const TYPE *restrict own = delta + i * num_cols;                                     \
            if (scale == 1)                                                                      \
                for (int64_t j = 0; j < num_cols; j++) row[j] = SUM(row[j], own[j]);             \
            else                                                                                 \
                for (int64_t j = 0; j < num_cols; j++) row[j] = SUM(row[j], TIMES_##NAME(own[j])); \
        }                                                                                        \
    }

#define PLAIN(a, b) ((a) + (b))
#define TIMES_float32(x) ((float)scale * (x))
#define TIMES_float64(x) (scale * (x))
#define TIMES_int32(x) (x)
#define TIMES_int64(x) (x)

ADD(float32, float, PLAIN)
ADD(float64, double, PLAIN)
ADD(int32, uint32_t, PLAIN)
ADD(int64, uint64_t, PLAIN)

/* A bfloat16 is the upper half of a float. Sums are rounded to the nearest, ties to the even one. */
static inline float widened(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline uint16_t narrowed(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    if (number != number) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define NARROW(a, b) narrowed(widened(a) + (b))

void phalanx_add_bfloat16(uint16_t *values, int64_t num_rows, int64_t num_cols,
                          const int64_t *rows, int64_t count, const uint16_t *delta,
                          double scale) {
    for (int64_t i = 0; i < count; i++) {
        uint16_t *row = values + within(rows[i], num_rows) * num_cols;
        const uint16_t *own = delta + i * num_cols;
        for (int64_t j = 0; j < num_cols; j++) row[j] = NARROW(row[j], (float)scale * widened(own[j]));
    }
}
