/* What the files of C have in common. */

#include <pthread.h>
#include <stdint.h>

#define VERSION 27 /* as in library.py */
#define LINE 64   /* bytes of a cache */

/* What a core does not have, in memory or in another core's cache, it gets the sooner the more of it
   is under way, and its own looking ahead ends with each page. So memory is passed in LANES places
   at once, each of which is fetched FAR bytes ahead: while one waits, the others go on.
   No power of two: lanes of a piece that is one would share lines of the cache. */
#define LANES 6
#define FAR 512 /* bytes */

#if defined(__x86_64__)
#include <emmintrin.h>
#define STREAM(to, vector) _mm_stream_si128((__m128i *)(void *)(to), (__m128i)(vector))
#define FENCE() _mm_sfence() /* stores past the caches may come late */
#else
#define STREAM(to, vector) memcpy(to, &(vector), VECTOR)
#define FENCE() ((void)0)
#endif

#define PAST_CACHE (8 << 20) /* bytes: as in memory/blocks.py */
#define VECTOR 16 /* bytes: what all of these processors have */
#define VECTOR_OF(TYPE) __attribute__((vector_size(VECTOR), aligned(sizeof(TYPE)), may_alias))

/* For each kind of processor one copy of a function, chosen when the library is loaded. Sums have
   the same bits in all of them: nothing is multiplied, and each number is added to one other. */
#if defined(__x86_64__) && defined(__GLIBC__)
#define WIDE __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define WIDE
#endif

#define PHALANX_LOCK_BYTES 128 /* as in ipc/mutex.py */

/* See lock.c. */
typedef struct {
    pthread_mutex_t turn, held;
    _Atomic int64_t owner; /* a number of a process, or 0; for errors */
} phalanx_lock;

int64_t phalanx_lock_take(phalanx_lock *lock, int64_t ms);
int64_t phalanx_lock_release(phalanx_lock *lock);

/* See rows.c and blocks.c. */
int64_t phalanx_within(const int64_t *rows, int64_t count, int64_t first, int64_t num_rows);
void phalanx_clamp(const int64_t *rows, int64_t count, int64_t first, int64_t num_rows,
                   int64_t *to);
void phalanx_take(const char *values, int64_t num_rows, int64_t row_bytes, const int64_t *rows,
                  int64_t count, int64_t first, char *out);
void phalanx_copy(const char *from, char *to, int64_t count, int64_t past);
#define ADD_OF(NAME, TYPE)                                                                      \
    void phalanx_add_##NAME(TYPE *values, int64_t num_rows, int64_t num_cols,                   \
                            const int64_t *rows, int64_t count, const TYPE *delta,              \
                            double scale)
ADD_OF(float32, float);
ADD_OF(float64, double);
ADD_OF(int32, uint32_t);
ADD_OF(int64, uint64_t);
ADD_OF(bfloat16, uint16_t);
#define SUM_OF(NAME, TYPE)                                                                      \
    int64_t phalanx_sum_##NAME(const TYPE *values, const TYPE *delta, TYPE *to, int64_t count,  \
                               double scale)
SUM_OF(float32, float);
SUM_OF(float64, double);
int64_t phalanx_finite_float32(const void *numbers, int64_t count);
int64_t phalanx_finite_float64(const void *numbers, int64_t count);
int64_t phalanx_finite_bfloat16(const void *numbers, int64_t count);
