/* Memory that lies in one piece: looked at, added and copied. See memory/blocks.py, which has the same in
   torch.

   In lanes: see native.h. */

#include <stdint.h>
#include <string.h>

#include "native.h"

/* A number is not finite if all bits of its exponent are set. */
#define EXPONENT_32 UINT32_C(0x7f800000)
#define EXPONENT_64 UINT64_C(0x7ff0000000000000)
#define FINITE(NAME, BITS, EXPONENT)                                                \
    typedef BITS __attribute__((may_alias)) NAME##_bits;                            \
    WIDE int64_t phalanx_finite_##NAME(const NAME##_bits *numbers, int64_t count) { \
        BITS found = 0;                                                             \
        for (int64_t i = 0; i < count; i++)                                         \
            found |= (BITS)((numbers[i] & (EXPONENT)) == (EXPONENT));               \
        return !found;                                                              \
    }

FINITE(float32, uint32_t, EXPONENT_32)
FINITE(float64, uint64_t, EXPONENT_64)

#if defined(__x86_64__)
#define STREAM(to, vector) _mm_stream_si128((__m128i *)(void *)(to), (__m128i)(vector))

/* Tell how many elements lie before the first line of the cache that begins in `to`. */
static int64_t until_line(const void *to, int64_t size, int64_t count) {
    int64_t head = (int64_t)((LINE - (uintptr_t)to % LINE) % LINE) / size;
    return head < count ? head : count;
}

/* Sum lane by lane and tell whether the delta was finite: where EXPONENT is 0 it
   always is. */
#define SUM_LANES(NAME, TYPE, BITS, EXPONENT)                                                    \
    typedef TYPE NAME##_v VECTOR_OF(TYPE);                                                       \
    typedef BITS NAME##_bits_v VECTOR_OF(BITS);                                                  \
    static int64_t sum_lanes_##NAME(const TYPE *values, const TYPE *delta, TYPE *to,             \
                                    int64_t lane) {                                              \
        int64_t line = LINE / (int64_t)sizeof(TYPE), step = VECTOR / (int64_t)sizeof(TYPE);      \
        NAME##_bits_v exponent = (NAME##_bits_v){0} + (EXPONENT), spoilt = {0};                  \
        for (int64_t i = 0; i < lane; i += line)                                                 \
            for (int64_t at = i; at < LANES * lane; at += lane) {                                \
                __builtin_prefetch((const char *)(values + at) + FAR);                           \
                __builtin_prefetch((const char *)(delta + at) + FAR);                            \
                for (int64_t j = at; j < at + line; j += step) {                                 \
                    NAME##_v added = *(const NAME##_v *)(delta + j);                             \
                    if (EXPONENT)                                                                \
                        spoilt |= (NAME##_bits_v)(((NAME##_bits_v)added & exponent) == exponent); \
                    STREAM(to + j, *(const NAME##_v *)(values + j) + added);                     \
                }                                                                                \
            }                                                                                    \
        FENCE();                                                                                 \
        BITS found = 0;                                                                          \
        for (int64_t k = 0; k < step; k++) found |= spoilt[k];                                   \
        return !found;                                                                           \
    }
#else
#define until_line(to, size, count) (count)
#define SUM_LANES(NAME, TYPE, BITS, EXPONENT)                                           \
    static int64_t sum_lanes_##NAME(const TYPE *v, const TYPE *d, TYPE *t, int64_t n) { \
        return (void)v, (void)d, (void)t, (void)n, 1;                                   \
    }
#endif

/* Write the sum of values and a delta past the caches, and tell whether the delta is finite.
   It is for what is larger than they are: else the processor would fetch each line of memory before
   it overwrites it.
   Integers are added as unsigned ones, which wrap around; as torch's do. */
#define SUM(NAME, TYPE, BITS, EXPONENT, LOOK)                                                    \
    SUM_LANES(NAME, TYPE, BITS, EXPONENT)                                                        \
    static int64_t sum_few_##NAME(const TYPE *values, const TYPE *delta, TYPE *to,               \
                                  int64_t count) {                                               \
        for (int64_t i = 0; i < count; i++) to[i] = values[i] + delta[i];                        \
        return LOOK((const void *)delta, count);                                                 \
    }                                                                                            \
    int64_t phalanx_sum_to_##NAME(const TYPE *values, const TYPE *delta, TYPE *to, int64_t count) { \
        int64_t size = sizeof(TYPE), head = until_line(to, size, count);                         \
        int64_t lane = (count - head) * size / (LANES * LINE) * LINE / size;                     \
        int64_t tail = head + LANES * lane;                                                      \
        int64_t finite = sum_few_##NAME(values, delta, to, head);                                \
        finite &= sum_lanes_##NAME(values + head, delta + head, to + head, lane);                \
        return finite & sum_few_##NAME(values + tail, delta + tail, to + tail, count - tail);    \
    }

#define ALWAYS(numbers, count) ((void)(numbers), (void)(count), 1)
SUM(float32, float, uint32_t, EXPONENT_32, phalanx_finite_float32)
SUM(float64, double, uint64_t, EXPONENT_64, phalanx_finite_float64)
SUM(int32, uint32_t, uint32_t, 0, ALWAYS)
SUM(int64, uint64_t, uint64_t, 0, ALWAYS)

#if defined(__x86_64__)
#define COPY_LANES(NAME, STORE, PREPARE)                                                      \
    static void copy_##NAME(const char *from, char *to, int64_t lane) {                       \
        for (int64_t i = 0; i < lane; i += LINE)                                              \
            for (int64_t at = i; at < LANES * lane; at += lane) {                             \
                __builtin_prefetch(from + at + FAR);                                          \
                PREPARE(to + at + FAR);                                                       \
                for (int64_t j = at; j < at + LINE; j += VECTOR)                              \
                    STORE((__m128i *)(void *)(to + j),                                        \
                          _mm_loadu_si128((const __m128i *)(const void *)(from + j)));        \
            }                                                                                 \
    }

#define TO_WRITE(to) __builtin_prefetch(to, 1)
#define NOT_AT_ALL(to)
COPY_LANES(near, _mm_store_si128, TO_WRITE)
COPY_LANES(past, _mm_stream_si128, NOT_AT_ALL)
#endif

/* Copy bytes, past the caches or not, to where none of them lie; or to where they are. */
void phalanx_copy(const char *from, char *to, int64_t count, int64_t past) {
    if (from == to) return;
    int64_t at = until_line(to, 1, count);
    memcpy(to, from, (size_t)at);
#if defined(__x86_64__)
    int64_t lane = (count - at) / (LANES * LINE) * LINE;
    if (past) {
        copy_past(from + at, to + at, lane);
        FENCE();
    } else {
        copy_near(from + at, to + at, lane);
    }
    at += LANES * lane;
#else
    (void)past;
#endif
    memcpy(to + at, from + at, (size_t)(count - at));
}
