/* Memory that lies in one piece: looked at, added and copied. See blocks.py, which has the same in
   torch.

   Memory is fetched FAR bytes ahead, because the processor's own looking ahead ends with each
   page. */

#include <stdint.h>
#include <string.h>

#include "compiled.h"

#define FAR 2048  /* bytes ahead */
#define PIECE 2048 /* bytes that are looked at before they are added, and stay in the nearest cache */

/* A number is not finite if all bits of its exponent are set. */
#define FINITE(NAME, BITS, EXPONENT)                                                \
    typedef BITS __attribute__((may_alias)) NAME##_bits;                            \
    WIDE int64_t phalanx_finite_##NAME(const NAME##_bits *numbers, int64_t count) { \
        BITS found = 0;                                                             \
        for (int64_t i = 0; i < count; i++)                                         \
            found |= (BITS)((numbers[i] & (EXPONENT)) == (EXPONENT));               \
        return !found;                                                              \
    }

FINITE(float32, uint32_t, UINT32_C(0x7f800000))
FINITE(float64, uint64_t, UINT64_C(0x7ff0000000000000))

#if defined(__x86_64__)
#include <emmintrin.h>
#define FENCE() _mm_sfence()
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

/* Write the sum of values and a delta past the caches, and tell whether the delta is finite.
   It is for what is larger than they are: else the processor would fetch each line of memory before
   it overwrites it. Such stores may come late, hence the fence.
   Integers are added as unsigned ones, which wrap around; as torch's do. */
#define SUM(NAME, TYPE, LOOK, ...)                                                               \
    int64_t phalanx_sum_to_##NAME(const TYPE *values, const TYPE *delta, TYPE *to, int64_t count) { \
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

/* Copy bytes, to where none of them lie; or to where they are. */
void phalanx_copy(const char *from, char *to, int64_t count) {
    int64_t at = from == to ? count : 0;
#if defined(__x86_64__)
    for (; at < count && (uintptr_t)(to + at) % LINE; at++) to[at] = from[at];
    for (; at + LINE <= count; at += LINE) {
        __builtin_prefetch(from + at + FAR);
        __builtin_prefetch(to + at + FAR, 1);
        for (int64_t j = at; j < at + LINE; j += 16)
            _mm_store_si128((__m128i *)(to + j), _mm_loadu_si128((const __m128i *)(from + j)));
    }
#endif
    memcpy(to + at, from + at, (size_t)(count - at));
}
