/* An all-reduce, carried as far as it goes without waiting for long. See course.py, which says the
   same in Python for what is not built here, and collective_buffers.py, whose marks and slots these are.

   A course is a row of numbers: where everything lies, and how far it has come. Whoever is called
   with it goes on there, and returns what stands in the way. */

#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "../memory/compiled.h"

/* As in course.py. */
enum {
    WORDS, WORDS_PER_PAGE, RANK, SIZE, SLOTS, SLOT_BYTES, SPIN_NS, CROWDED, STOPS,
    NUMBER, WHAT, TENSOR, COUNT, PIECE, AT, PHASE, WANTED, AGREED, WHOLE_BYTES, PIECE_BYTES
};
enum { ENDED, WAITS, MOVES, DIFFERS };
enum { WRITE, PUBLISH, REDUCE, TAKE, OVER };

/* As in status_pages.py and collective_buffers.py. */
enum { MARK = 0, AWAITED = 3, WANTED_MARK = 4, SIGNATURES = 16, RING = 4 };
enum { PUBLISHED = 1, REDUCED = 2, DONE = 3, PER_PIECE = 3, NUM_SLOTS = 2 };

#define BLOCK 1024 /* numbers that are added up in the nearest cache */
#define LOOKS_PER_CLOCK 32
#define LATE_NS 1000000 /* between looks: other work had the core */
#define PIECES_PER_CALL 128

typedef int64_t word;

void phalanx_copy(const char *from, char *to, int64_t count, int64_t past);

static word *page_of(const word *course, word rank) {
    return (word *)course[WORDS] + course[WORDS_PER_PAGE] * rank;
}

static char *slot_of(const word *course, word rank) {
    word letter = course[PIECE] % NUM_SLOTS;
    return (char *)course[SLOTS] + (rank * NUM_SLOTS + letter) * course[SLOT_BYTES];
}

/* Where part `part` of `parts` begins in a piece: as plan.equal_sizes cuts it. */
static word start_of(word count, word parts, word part) {
    word size = count / parts, longer = count % parts;
    return part * size + (part < longer ? part : longer);
}

static word now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (word)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int have_reached(const word *course, word mark) {
    for (word rank = 0; rank < course[SIZE]; rank++)
        if (rank != course[RANK] &&
            __atomic_load_n(page_of(course, rank) + MARK, __ATOMIC_ACQUIRE) < mark)
            return 0;
    return 1;
}

static void pause_for_a_look(const word *course) {
    if (course[CROWDED]) sched_yield();
#if defined(__x86_64__)
    else __builtin_ia32_pause();
#endif
}

/* Look for a while whether all others have reached a mark. Where that has cost a time slice, this
   call looks for nobody any more: a thread that slept is run sooner. */
static int come(word *course, word step) {
    word mark = PER_PIECE * course[PIECE] + step, looks = course[CROWDED] ? 1 : LOOKS_PER_CLOCK;
    course[WANTED] = mark;
    if (mark <= 0 || have_reached(course, mark)) return 1;
    word now = now_ns(), until = now + course[SPIN_NS];
    while (now < until) {
        int reached = 0;
        for (word look = 0; look < looks && !reached; look++) {
            pause_for_a_look(course);
            reached = have_reached(course, mark);
        }
        word before = now;
        now = now_ns();
        if (now - before > LATE_NS) course[SPIN_NS] = 0;
        if (reached) return 1;
    }
    return 0;
}

/* Say that a mark is reached; tell whether somebody sleeps until it is. */
static int post(word *course, word step, word phase) {
    word mark = PER_PIECE * course[PIECE] + step, asleep = 0;
    course[PHASE] = phase;
    course[WANTED] = mark;
    __atomic_store_n(page_of(course, course[RANK]) + MARK, mark, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* who falls asleep looks at marks once more after it */
    for (word rank = 0; rank < course[SIZE]; rank++) {
        const word *page = page_of(course, rank);
        asleep |= __atomic_load_n(page + AWAITED, __ATOMIC_RELAXED) == course[RANK] + 1 &&
                  __atomic_load_n(page + WANTED_MARK, __ATOMIC_RELAXED) <= mark;
    }
    return asleep || course[STOPS];
}

/* See once whether all are in the same operation. */
static int all_agree(word *course) {
    word place = SIGNATURES + RING * (course[NUMBER] % RING);
    for (word rank = 0; rank < course[SIZE] && !course[AGREED]; rank++) {
        const word *signature = page_of(course, rank) + place;
        if (signature[0] != course[NUMBER] || signature[1] != course[WHAT] ||
            signature[2] != course[COUNT])
            return 0;
    }
    course[AGREED] = 1;
    return 1;
}

/* Copy the parts of a piece that others reduce into our slot, or their results out of it. */
static void exchange(const word *course, char *piece, word count, word item, int give) {
    char *slot = slot_of(course, course[RANK]);
    word first = item * start_of(count, course[SIZE], course[RANK]);
    word stop = item * start_of(count, course[SIZE], course[RANK] + 1), end = item * count;
    char *to = give ? slot : piece;
    const char *from = give ? piece : slot;
    phalanx_copy(from, to, first, 0);
    phalanx_copy(from + stop, to + stop, end - stop, 0);
}

/* Sums in the order of ranks. Integers are added as unsigned ones, which wrap around. */
#define SUM_OF_RANKS(NAME, TYPE)                                                                    \
    typedef TYPE NAME##_v VECTOR_OF(TYPE);                                                         \
                                                                                                   \
    static void add_two_##NAME(const TYPE *left, const TYPE *right, TYPE *to, TYPE *copy,          \
                               word count) {                                                       \
        word line = LINE / (word)sizeof(TYPE), step = VECTOR / (word)sizeof(TYPE);                 \
        word lane = count / (LANES * line) * line;                                                 \
        for (word i = 0; i < lane; i += line)                                                      \
            for (word at = i; at < LANES * lane; at += lane) {                                     \
                __builtin_prefetch((const char *)(left + at) + FAR);                               \
                __builtin_prefetch((const char *)(right + at) + FAR);                              \
                for (word j = at; j < at + line; j += step) {                                      \
                    NAME##_v sum = *(const NAME##_v *)(left + j) + *(const NAME##_v *)(right + j); \
                    *(NAME##_v *)(to + j) = sum;                                                   \
                    *(NAME##_v *)(copy + j) = sum;                                                 \
                }                                                                                  \
            }                                                                                      \
        for (word i = LANES * lane; i < count; i++) copy[i] = to[i] = left[i] + right[i];          \
    }                                                                                              \
                                                                                                   \
    WIDE static void add_##NAME(const TYPE *other, TYPE *restrict sum, word count) {               \
        for (word i = 0; i < count; i++) sum[i] += other[i];                                       \
    }                                                                                              \
                                                                                                   \
    /* Write the sum to a tensor; and, where `ours` are our numbers outside of our slot, to where   \
       theirs are in the others' slots. */                                                         \
    static void reduce_##NAME(const word *course, const TYPE *ours, word start, word count,        \
                              TYPE *to) {                                                          \
        TYPE sum[BLOCK];                                                                           \
        if (course[SIZE] == 2 && ours) {                                                           \
            TYPE *theirs = (TYPE *)slot_of(course, 1 - course[RANK]) + start;                      \
            add_two_##NAME(course[RANK] ? theirs : ours, course[RANK] ? ours : theirs, to, theirs, \
                           count);                                                                 \
            return;                                                                                \
        }                                                                                          \
        for (word at = 0; at < count; at += BLOCK) {                                               \
            word length = count - at < BLOCK ? count - at : BLOCK;                                 \
            size_t bytes = (size_t)length * sizeof(TYPE);                                          \
            for (word rank = 0; rank < course[SIZE]; rank++) {                                     \
                const TYPE *source = (const TYPE *)slot_of(course, rank) + start;                  \
                if (ours && rank == course[RANK]) source = ours;                                   \
                if (rank)                                                                          \
                    add_##NAME(source + at, sum, length);                                          \
                else                                                                               \
                    memcpy(sum, source + at, bytes);                                               \
            }                                                                                      \
            memcpy(to + at, sum, bytes);                                                           \
            for (word rank = 0; ours && rank < course[SIZE]; rank++)                               \
                if (rank != course[RANK])                                                          \
                    memcpy((TYPE *)slot_of(course, rank) + start + at, sum, bytes);                \
        }                                                                                          \
    }

SUM_OF_RANKS(float32, float)
SUM_OF_RANKS(float64, double)
SUM_OF_RANKS(int32, uint32_t)
SUM_OF_RANKS(int64, uint64_t)

/* A bfloat16 is the upper half of a float. Sums are floats, and rounded once: to the nearest, of two
   that are as near to the even one. */
static float widened(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static uint16_t rounded(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : nearest); /* not a number */
}

WIDE static void begin_bfloat16(const uint16_t *first, float *restrict sum, word count) {
    for (word i = 0; i < count; i++) sum[i] = widened(first[i]);
}

WIDE static void add_bfloat16(const uint16_t *other, float *restrict sum, word count) {
    for (word i = 0; i < count; i++) sum[i] += widened(other[i]);
}

WIDE static void round_bfloat16(const float *sum, uint16_t *restrict to, word count) {
    for (word i = 0; i < count; i++) to[i] = rounded(sum[i]);
}

/* As in SUM_OF_RANKS. */
static void reduce_bfloat16(const word *course, const uint16_t *ours, word start, word count,
                            uint16_t *to) {
    float sum[BLOCK];
    uint16_t result[BLOCK];
    for (word at = 0; at < count; at += BLOCK) {
        word length = count - at < BLOCK ? count - at : BLOCK;
        size_t bytes = (size_t)length * sizeof *result;
        for (word rank = 0; rank < course[SIZE]; rank++) {
            const uint16_t *source = (const uint16_t *)slot_of(course, rank) + start;
            if (ours && rank == course[RANK]) source = ours;
            (rank ? add_bfloat16 : begin_bfloat16)(source + at, sum, length);
        }
        round_bfloat16(sum, result, length);
        memcpy(to + at, result, bytes);
        for (word rank = 0; ours && rank < course[SIZE]; rank++)
            if (rank != course[RANK])
                memcpy((uint16_t *)slot_of(course, rank) + start + at, result, bytes);
    }
}

#define ALL_REDUCE(NAME, TYPE)                                                                     \
    /* All publish everything, and each reduces everything: one wait instead of two. */            \
    static word reduce_whole_##NAME(word *course) {                                                \
        TYPE *tensor = (TYPE *)course[TENSOR];                                                     \
        switch (course[PHASE]) {                                                                   \
        case WRITE:                                                                                \
            if (!come(course, DONE - NUM_SLOTS * PER_PIECE)) return WAITS;                         \
            memcpy(slot_of(course, course[RANK]), tensor, (size_t)course[COUNT] * sizeof(TYPE));   \
            course[PHASE] = PUBLISH;                                                               \
            if (course[STOPS]) return MOVES; /* fall through */                                    \
        case PUBLISH:                                                                              \
            if (post(course, PUBLISHED, REDUCE)) return MOVES; /* fall through */                  \
        case REDUCE:                                                                               \
            if (!come(course, PUBLISHED)) return WAITS;                                            \
            if (!all_agree(course)) return DIFFERS;                                                \
            reduce_##NAME(course, 0, 0, course[COUNT], tensor);                                    \
            if (post(course, DONE, OVER)) return MOVES; /* fall through */                         \
        default:                                                                                   \
            course[PIECE]++;                                                                       \
            return ENDED;                                                                          \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    static word reduce_piece_##NAME(word *course, word count) {                                    \
        const word item = (word)sizeof(TYPE), start = start_of(count, course[SIZE], course[RANK]); \
        word length = start_of(count, course[SIZE], course[RANK] + 1) - start;                     \
        TYPE *piece = (TYPE *)course[TENSOR] + course[AT];                                         \
        switch (course[PHASE]) {                                                                   \
        case WRITE:                                                                                \
            if (!come(course, DONE - NUM_SLOTS * PER_PIECE)) return WAITS;                         \
            exchange(course, (char *)piece, count, item, 1);                                       \
            course[PHASE] = PUBLISH;                                                               \
            if (course[STOPS]) return MOVES; /* fall through */                                    \
        case PUBLISH:                                                                              \
            if (post(course, PUBLISHED, REDUCE)) return MOVES; /* fall through */                  \
        case REDUCE:                                                                               \
            if (!come(course, PUBLISHED)) return WAITS;                                            \
            if (!all_agree(course)) return DIFFERS;                                                \
            reduce_##NAME(course, piece + start, start, length, piece + start);                    \
            if (post(course, REDUCED, TAKE)) return MOVES; /* fall through */                      \
        case TAKE:                                                                                 \
            if (!come(course, REDUCED)) return WAITS;                                              \
            exchange(course, (char *)piece, count, item, 0);                                       \
            if (post(course, DONE, OVER)) return MOVES; /* fall through */                         \
        default:                                                                                   \
            course[PIECE]++;                                                                       \
            course[AT] += count;                                                                   \
            course[PHASE] = WRITE;                                                                 \
            return ENDED;                                                                          \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    word phalanx_all_reduce_##NAME(word *course) {                                                 \
        word per_piece = course[PIECE_BYTES] / (word)sizeof(TYPE);                                 \
        if (course[COUNT] * (word)sizeof(TYPE) <= course[WHOLE_BYTES])                             \
            return reduce_whole_##NAME(course);                                                    \
        for (word pieces = 0; pieces < PIECES_PER_CALL; pieces++) {                                \
            word left = course[COUNT] - course[AT], state;                                         \
            state = reduce_piece_##NAME(course, left < per_piece ? left : per_piece);              \
            if (state != ENDED || course[AT] == course[COUNT]) return state;                       \
        }                                                                                          \
        return MOVES; /* for signals to be heard */                                                \
    }

ALL_REDUCE(float32, float)
ALL_REDUCE(float64, double)
ALL_REDUCE(int32, uint32_t)
ALL_REDUCE(int64, uint64_t)
ALL_REDUCE(bfloat16, uint16_t)
