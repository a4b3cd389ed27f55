/* Memory that lies in one piece: looked at and copied. See memory/blocks.py, which has the same in
   torch.

   In lanes: see native.h. */

#include <stdint.h>
#include <string.h>

#include "native.h"

/* A number is not finite if all bits of its exponent are set. */
#define EXPONENT_32 UINT32_C(0x7f800000)
#define EXPONENT_16 UINT16_C(0x7f80)
#define EXPONENT_64 UINT64_C(0x7ff0000000000000)
#define FINITE(NAME, BITS, EXPONENT)                                                \
    typedef BITS __attribute__((may_alias)) NAME##_bits;                            \
    WIDE int64_t phalanx_finite_##NAME(const void *given, int64_t count) {          \
        const NAME##_bits *numbers = given;                                         \
        BITS found = 0;                                                             \
        for (int64_t i = 0; i < count; i++)                                         \
            found |= (BITS)((numbers[i] & (EXPONENT)) == (EXPONENT));               \
        return !found;                                                              \
    }

FINITE(float32, uint32_t, EXPONENT_32)
FINITE(float64, uint64_t, EXPONENT_64)
FINITE(bfloat16, uint16_t, EXPONENT_16)

/* Write values plus `scale` times a delta, past the caches if that is much; tell whether the delta
   is finite. The processor sees the next of two sources coming. */
#define SUM(NAME, TYPE, BITS, EXPONENT)                                                      \
    typedef TYPE NAME##_vector VECTOR_OF(TYPE);                                              \
    typedef BITS NAME##_bits_vector VECTOR_OF(BITS);                                         \
    SUM_OF(NAME, TYPE) {                                                                     \
        const int64_t step = VECTOR / (int64_t)sizeof(TYPE);                                 \
        NAME##_bits_vector found = {0};                                                      \
        int64_t i = 0, infinite = 0;                                                         \
        int past = count * VECTOR / step >= PAST_CACHE && (uintptr_t)to % VECTOR == 0;       \
        for (; i + step <= count; i += step) {                                               \
            NAME##_vector own = *(const NAME##_vector *)(delta + i);                         \
            NAME##_vector sum = *(const NAME##_vector *)(values + i) + (TYPE)scale * own;    \
            found |= (NAME##_bits_vector)(((NAME##_bits_vector)own & (EXPONENT)) == (EXPONENT)); \
            if (past)                                                                        \
                STREAM(to + i, sum);                                                         \
            else                                                                             \
                *(NAME##_vector *)(to + i) = sum;                                            \
        }                                                                                    \
        if (past) FENCE();                                                                   \
        for (int64_t j = 0; j < step; j++) infinite |= found[j] != 0;                        \
        infinite |= !phalanx_finite_##NAME(delta + i, count - i);                            \
        for (; i < count; i++) to[i] = values[i] + (TYPE)scale * delta[i];                   \
        return !infinite;                                                                    \
    }

SUM(float32, float, uint32_t, EXPONENT_32)
SUM(float64, double, uint64_t, EXPONENT_64)

#if defined(__x86_64__)
/* Tell how many elements lie before the first line of the cache that begins in `to`. */
static int64_t until_line(const void *to, int64_t size, int64_t count) {
    int64_t head = (int64_t)((LINE - (uintptr_t)to % LINE) % LINE) / size;
    return head < count ? head : count;
}
#else
#define until_line(to, size, count) (count)
#endif

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
