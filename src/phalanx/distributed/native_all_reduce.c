/* An all-reduce, run as far as it goes without waiting for long. See native_all_reduce.py, and
   collective_buffers.py, whose protocol and slots these are.

   The state is an array of words: where everything lies, and how far the operation has come. Each
   call goes on from there, and returns why it has stopped. */

#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "../native/native.h"

/* As in native_all_reduce.py. */
enum {
    WORDS, WORDS_PER_PAGE, RANK, SIZE, SLOTS, SLOT_BYTES, SPIN_NS, CROWDED, FAIL_POINTS,
    NUMBER, WHAT, TENSOR, COUNT, PIECE, AT, PHASE, WANTED, AGREED, WHOLE_BYTES, PIECE_BYTES
};
enum { ENDED, WAITS, POSTED, DIFFERS };
enum { WRITE, PUBLISH, REDUCE, TAKE, OVER };

/* As in status_pages.py and collective_buffers.py. */
enum { PROGRESS = 0, AWAITED = 3, WANTED_PROGRESS = 4, FINGERPRINTS = 16, RING = 4 };
enum { PUBLISHED = 1, REDUCED = 2, DONE = 3, PER_PIECE = 3, NUM_SLOTS = 2 };

#define BLOCK 1024 /* numbers that are added up in the nearest cache */
#define LOOKS_PER_CLOCK 32
#define LATE_NS 1000000 /* between looks: other work had the core */
#define PIECES_PER_CALL 128

typedef int64_t word;

void phalanx_copy(const char *from, char *to, int64_t count, int64_t past);

static word *page_of(const word *state, word rank) {
    return (word *)state[WORDS] + state[WORDS_PER_PAGE] * rank;
}

static char *slot_of(const word *state, word rank) {
    word parity = state[PIECE] % NUM_SLOTS;
    return (char *)state[SLOTS] + (rank * NUM_SLOTS + parity) * state[SLOT_BYTES];
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

static int have_reached(const word *state, word progress) {
    for (word rank = 0; rank < state[SIZE]; rank++)
        if (rank != state[RANK] &&
            __atomic_load_n(page_of(state, rank) + PROGRESS, __ATOMIC_ACQUIRE) < progress)
            return 0;
    return 1;
}

static void pause_for_a_look(const word *state) {
    if (state[CROWDED]) sched_yield();
#if defined(__x86_64__)
    else __builtin_ia32_pause();
#endif
}

/* Look for a while whether all others have come as far. Where that has cost a time slice, this call
   spins no more: a thread that slept is run sooner. */
static int await_others(word *state, word step) {
    word progress = PER_PIECE * state[PIECE] + step, looks = state[CROWDED] ? 1 : LOOKS_PER_CLOCK;
    state[WANTED] = progress;
    if (progress <= 0 || have_reached(state, progress)) return 1;
    word now = now_ns(), until = now + state[SPIN_NS];
    while (now < until) {
        int reached = 0;
        for (word look = 0; look < looks && !reached; look++) {
            pause_for_a_look(state);
            reached = have_reached(state, progress);
        }
        word before = now;
        now = now_ns();
        if (now - before > LATE_NS) state[SPIN_NS] = 0;
        if (reached) return 1;
    }
    return 0;
}

/* Post our progress; tell whether somebody sleeps until then. */
static int post(word *state, word step, word phase) {
    word progress = PER_PIECE * state[PIECE] + step, asleep = 0;
    state[PHASE] = phase;
    state[WANTED] = progress;
    __atomic_store_n(page_of(state, state[RANK]) + PROGRESS, progress, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* who falls asleep looks once more after it */
    for (word rank = 0; rank < state[SIZE]; rank++) {
        const word *page = page_of(state, rank);
        asleep |= __atomic_load_n(page + AWAITED, __ATOMIC_RELAXED) == state[RANK] + 1 &&
                  __atomic_load_n(page + WANTED_PROGRESS, __ATOMIC_RELAXED) <= progress;
    }
    return asleep || state[FAIL_POINTS];
}

/* See once whether all are in the same operation. */
static int all_agree(word *state) {
    word at = FINGERPRINTS + RING * (state[NUMBER] % RING);
    for (word rank = 0; rank < state[SIZE] && !state[AGREED]; rank++) {
        const word *fingerprint = page_of(state, rank) + at;
        if (fingerprint[0] != state[NUMBER] || fingerprint[1] != state[WHAT] ||
            fingerprint[2] != state[COUNT])
            return 0;
    }
    state[AGREED] = 1;
    return 1;
}

/* Copy the parts of a piece that others reduce into our slot, or their results out of it. */
static void exchange(const word *state, char *piece, word count, word item, int give) {
    char *slot = slot_of(state, state[RANK]);
    word first = item * start_of(count, state[SIZE], state[RANK]);
    word stop = item * start_of(count, state[SIZE], state[RANK] + 1), end = item * count;
    char *to = give ? slot : piece;
    const char *from = give ? piece : slot;
    phalanx_copy(from, to, first, 0);
    phalanx_copy(from + stop, to + stop, end - stop, 0);
}

/* Sums in the order of ranks. Integers are added as unsigned ones, which wrap around. */
#define SUM_OF_RANKS(NAME, TYPE)                                                                   \
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
    /* Write the sum to a tensor; and, where `ours` are our numbers outside of our slot, to where  \
       theirs are in the others' slots. */                                                         \
    static void reduce_##NAME(const word *state, const TYPE *ours, word start, word count,         \
                              TYPE *to) {                                                          \
        TYPE sum[BLOCK];                                                                           \
        if (state[SIZE] == 2 && ours) {                                                            \
            TYPE *theirs = (TYPE *)slot_of(state, 1 - state[RANK]) + start;                        \
            add_two_##NAME(state[RANK] ? theirs : ours, state[RANK] ? ours : theirs, to, theirs,   \
                           count);                                                                 \
            return;                                                                                \
        }                                                                                          \
        for (word at = 0; at < count; at += BLOCK) {                                               \
            word length = count - at < BLOCK ? count - at : BLOCK;                                 \
            size_t bytes = (size_t)length * sizeof(TYPE);                                          \
            for (word rank = 0; rank < state[SIZE]; rank++) {                                      \
                const TYPE *source = (const TYPE *)slot_of(state, rank) + start;                   \
                if (ours && rank == state[RANK]) source = ours;                                    \
                if (rank)                                                                          \
                    add_##NAME(source + at, sum, length);                                          \
                else                                                                               \
                    memcpy(sum, source + at, bytes);                                               \
            }                                                                                      \
            memcpy(to + at, sum, bytes);                                                           \
            for (word rank = 0; ours && rank < state[SIZE]; rank++)                                \
                if (rank != state[RANK])                                                           \
                    memcpy((TYPE *)slot_of(state, rank) + start + at, sum, bytes);                 \
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
static void reduce_bfloat16(const word *state, const uint16_t *ours, word start, word count,
                            uint16_t *to) {
    float sum[BLOCK];
    uint16_t result[BLOCK];
    for (word at = 0; at < count; at += BLOCK) {
        word length = count - at < BLOCK ? count - at : BLOCK;
        size_t bytes = (size_t)length * sizeof *result;
        for (word rank = 0; rank < state[SIZE]; rank++) {
            const uint16_t *source = (const uint16_t *)slot_of(state, rank) + start;
            if (ours && rank == state[RANK]) source = ours;
            (rank ? add_bfloat16 : begin_bfloat16)(source + at, sum, length);
        }
        round_bfloat16(sum, result, length);
        memcpy(to + at, result, bytes);
        for (word rank = 0; ours && rank < state[SIZE]; rank++)
            if (rank != state[RANK])
                memcpy((uint16_t *)slot_of(state, rank) + start + at, result, bytes);
    }
}

#define ALL_REDUCE(NAME, TYPE)                                                                     \
    /* All publish everything, and each reduces everything: one wait instead of two. */            \
    static word reduce_whole_##NAME(word *state) {                                                 \
        TYPE *tensor = (TYPE *)state[TENSOR];                                                      \
        switch (state[PHASE]) {                                                                    \
        case WRITE:                                                                                \
            if (!await_others(state, DONE - NUM_SLOTS * PER_PIECE)) return WAITS;                  \
            memcpy(slot_of(state, state[RANK]), tensor, (size_t)state[COUNT] * sizeof(TYPE));      \
            state[PHASE] = PUBLISH;                                                                \
            if (state[FAIL_POINTS]) return POSTED; /* fall through */                              \
        case PUBLISH:                                                                              \
            if (post(state, PUBLISHED, REDUCE)) return POSTED; /* fall through */                  \
        case REDUCE:                                                                               \
            if (!await_others(state, PUBLISHED)) return WAITS;                                     \
            if (!all_agree(state)) return DIFFERS;                                                 \
            reduce_##NAME(state, 0, 0, state[COUNT], tensor);                                      \
            if (post(state, DONE, OVER)) return POSTED; /* fall through */                         \
        default:                                                                                   \
            state[PIECE]++;                                                                        \
            return ENDED;                                                                          \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    static word reduce_piece_##NAME(word *state, word count) {                                     \
        const word item = (word)sizeof(TYPE), start = start_of(count, state[SIZE], state[RANK]);   \
        word length = start_of(count, state[SIZE], state[RANK] + 1) - start;                       \
        TYPE *piece = (TYPE *)state[TENSOR] + state[AT];                                           \
        switch (state[PHASE]) {                                                                    \
        case WRITE:                                                                                \
            if (!await_others(state, DONE - NUM_SLOTS * PER_PIECE)) return WAITS;                  \
            exchange(state, (char *)piece, count, item, 1);                                        \
            state[PHASE] = PUBLISH;                                                                \
            if (state[FAIL_POINTS]) return POSTED; /* fall through */                              \
        case PUBLISH:                                                                              \
            if (post(state, PUBLISHED, REDUCE)) return POSTED; /* fall through */                  \
        case REDUCE:                                                                               \
            if (!await_others(state, PUBLISHED)) return WAITS;                                     \
            if (!all_agree(state)) return DIFFERS;                                                 \
            reduce_##NAME(state, piece + start, start, length, piece + start);                     \
            if (post(state, REDUCED, TAKE)) return POSTED; /* fall through */                      \
        case TAKE:                                                                                 \
            if (!await_others(state, REDUCED)) return WAITS;                                       \
            exchange(state, (char *)piece, count, item, 0);                                        \
            if (post(state, DONE, OVER)) return POSTED; /* fall through */                         \
        default:                                                                                   \
            state[PIECE]++;                                                                        \
            state[AT] += count;                                                                    \
            state[PHASE] = WRITE;                                                                  \
            return ENDED;                                                                          \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    word phalanx_all_reduce_##NAME(word *state) {                                                  \
        word per_piece = state[PIECE_BYTES] / (word)sizeof(TYPE);                                  \
        if (state[COUNT] * (word)sizeof(TYPE) <= state[WHOLE_BYTES])                               \
            return reduce_whole_##NAME(state);                                                     \
        for (word pieces = 0; pieces < PIECES_PER_CALL; pieces++) {                                \
            word left = state[COUNT] - state[AT], outcome;                                         \
            outcome = reduce_piece_##NAME(state, left < per_piece ? left : per_piece);             \
            if (outcome != ENDED || state[AT] == state[COUNT]) return outcome;                     \
        }                                                                                          \
        return POSTED; /* for signals to be heard */                                               \
    }

ALL_REDUCE(float32, float)
ALL_REDUCE(float64, double)
ALL_REDUCE(int32, uint32_t)
ALL_REDUCE(int64, uint64_t)
ALL_REDUCE(bfloat16, uint16_t)
