/* Rows of a matrix: copied, and added to. See rows.py, which has the same in torch.

   Random rows of a large matrix are in no cache. The processor waits for each unless it is told
   early which ones come next: that is all that these loops do beyond what they say.

   Rows outside of the matrix are read as its nearest: callers check them, but what they checked
   may be changed by another thread meanwhile. */

#include <stdint.h>
#include <string.h>

#define VERSION 5 /* as in rows.py */
#define AHEAD 8   /* rows: fewer come too late, more push each other out */
#define LINE 64   /* bytes */
#define MOST 512  /* bytes of a row: what is longer, the processor sees coming itself */

/* For each kind of processor one copy of a function, chosen when the library is loaded. Sums have
   the same bits in all of them: nothing is multiplied, and each number is added to one other. */
#if defined(__x86_64__) && defined(__GLIBC__)
#define WIDE __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define WIDE
#endif

int64_t phalanx_version(void) { return VERSION; }

static inline int64_t within(int64_t row, int64_t num_rows) {
    return row < 0 ? 0 : row < num_rows ? row : num_rows - 1;
}

static inline void fetch(const char *row, int64_t row_bytes) {
    int64_t stop = row_bytes < MOST ? row_bytes : MOST;
    for (int64_t at = 0; at < stop; at += LINE) __builtin_prefetch(row + at);
}

/* Tell whether all rows are within the matrix. */
WIDE int64_t phalanx_within(const int64_t *rows, int64_t count, int64_t num_rows) {
    uint64_t outside = 0; /* a negative number is a large one without a sign */
    for (int64_t i = 0; i < count; i++) outside |= (uint64_t)rows[i] >= (uint64_t)num_rows;
    return !outside;
}

/* Copy row numbers; one that is outside of the matrix becomes the nearest that is not. */
void phalanx_clamp(const int64_t *rows, int64_t count, int64_t num_rows, int64_t *to) {
    for (int64_t i = 0; i < count; i++) to[i] = within(rows[i], num_rows);
}

void phalanx_take(const char *values, int64_t num_rows, int64_t row_bytes,
                  const int64_t *rows, int64_t count, char *out) {
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            fetch(values + within(rows[i + AHEAD], num_rows) * row_bytes, row_bytes);
        memcpy(out + i * row_bytes, values + within(rows[i], num_rows) * row_bytes,
               (size_t)row_bytes);
    }
}

/* Add rows of a delta, the i-th or, where places are given, the places[i]-th, to rows.
   Integers are added as unsigned ones, which wrap around; as torch's do. */
#define ADD(NAME, TYPE)                                                                          \
    WIDE void phalanx_add_##NAME(TYPE *values, int64_t num_rows, int64_t num_cols,               \
                                 const int64_t *rows, int64_t count, const TYPE *delta,          \
                                 const int64_t *places) {                                        \
        int64_t row_bytes = num_cols * (int64_t)sizeof(TYPE);                                    \
        for (int64_t i = 0; i < count; i++) {                                                    \
            if (i + AHEAD < count) {                                                             \
                int64_t next = within(rows[i + AHEAD], num_rows);                                \
                fetch((const char *)(values + next * num_cols), row_bytes);                      \
                if (places)                                                                      \
                    fetch((const char *)(delta + places[i + AHEAD] * num_cols), row_bytes);      \
            }                                                                                    \
            TYPE *restrict row = values + within(rows[i], num_rows) * num_cols;                  \
            const TYPE *restrict own = delta + (places ? places[i] : i) * num_cols;              \
            for (int64_t j = 0; j < num_cols; j++) row[j] += own[j];                             \
        }                                                                                        \
    }

ADD(float32, float)
ADD(float64, double)
ADD(int32, uint32_t)
ADD(int64, uint64_t)

/* A number is not finite if all bits of its exponent are set. */
#define FINITE(NAME, BITS, EXPONENT)                                         \
    typedef BITS __attribute__((may_alias)) NAME##_bits;                     \
    WIDE int64_t phalanx_finite_##NAME(const NAME##_bits *numbers, int64_t count) { \
        BITS found = 0;                                                      \
        for (int64_t i = 0; i < count; i++)                                  \
            found |= (BITS)((numbers[i] & (EXPONENT)) == (EXPONENT));        \
        return !found;                                                       \
    }

FINITE(float32, uint32_t, UINT32_C(0x7f800000))
FINITE(float64, uint64_t, UINT64_C(0x7ff0000000000000))

/* Write the sum of values and a delta to a third array, and tell whether the delta is finite.

   The third is too large for a cache, and so is stored past it: else the processor would fetch
   each line of memory before it overwrites it. Such stores may come late, hence the fence. (Rows
   that are taken are stored the usual way, which is faster.) Each piece of the delta is looked at
   right before it is added, and then lies in the nearest cache. */
#define PIECE 2048 /* bytes */
#if defined(__x86_64__)
#include <emmintrin.h>
#define FENCE() _mm_sfence()
#define FAR 2048 /* bytes ahead: the processor's own looking ahead ends with each page */
#define SUM_LINES(VECTOR, LOAD, PLUS, STREAM)                                                    \
    int64_t width = 16 / (int64_t)sizeof(*to);                                                   \
    for (; i < stop && (uintptr_t)(to + i) % 16; i++) to[i] = values[i] + delta[i];              \
    for (; i + 4 * width <= stop; i += 4 * width) {                                              \
        __builtin_prefetch((const char *)(values + i) + FAR);                                    \
        __builtin_prefetch((const char *)(delta + i) + FAR);                                     \
        for (int64_t j = i; j < i + 4 * width; j += width)                                       \
            STREAM((VECTOR *)(to + j), PLUS(LOAD((const VECTOR *)(values + j)),                  \
                                            LOAD((const VECTOR *)(delta + j))));                 \
    }
#else
#define FENCE()
#define SUM_LINES(VECTOR, LOAD, PLUS, STREAM)
#endif

#define SUM(NAME, TYPE, LOOK, ...)                                                               \
    int64_t phalanx_sum_##NAME(const TYPE *values, const TYPE *delta, TYPE *to, int64_t count) { \
        int64_t finite = 1, step = PIECE / (int64_t)sizeof(TYPE);                                \
        for (int64_t i = 0, stop; i < count;) {                                                  \
            stop = i + step < count ? i + step : count;                                          \
            finite &= LOOK((const void *)(delta + i), stop - i);                                 \
            SUM_LINES(__VA_ARGS__)                                                               \
            for (; i < stop; i++) to[i] = values[i] + delta[i];                                  \
        }                                                                                        \
        FENCE();                                                                                 \
        return finite;                                                                           \
    }

#define ALWAYS(numbers, count) 1
#define FLOATS(from) _mm_loadu_ps((const float *)(from))
#define DOUBLES(from) _mm_loadu_pd((const double *)(from))
SUM(float32, float, phalanx_finite_float32, float, FLOATS, _mm_add_ps, _mm_stream_ps)
SUM(float64, double, phalanx_finite_float64, double, DOUBLES, _mm_add_pd, _mm_stream_pd)
SUM(int32, uint32_t, ALWAYS, __m128i, _mm_loadu_si128, _mm_add_epi32, _mm_stream_si128)
SUM(int64, uint64_t, ALWAYS, __m128i, _mm_loadu_si128, _mm_add_epi64, _mm_stream_si128)
