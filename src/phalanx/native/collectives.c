/* Collectives of ranks on one host, through shared memory. distributed/shared_memory.py makes the
   memory and calls; this file is the protocol.

       memory   page of rank 0 | page of rank 1 | ... | rank 0: slot a, slot b | rank 1: slot a, ...

   A tensor of any size travels in pieces through slots of fixed size. A rank's progress, on its
   page, only grows; in piece p it passes

       2p + 1   my slot holds what others need
       2p + 2   all slots hold the part that I have reduced

   Even pieces use slots a, odd ones slots b. A rank that writes piece p + 1 has seen all publish
   piece p, and they had read piece p - 1 before; but they may still read piece p.

   A rank that waits spins for a moment, then sleeps on its bell, which the rank that it waits for
   rings. It returns to Python every few milliseconds, which looks for deaths, deadlines and signals
   and calls again: an operation resumes in the phase where it stopped. */

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "native.h"

typedef int64_t word;

enum { SHORT_ALL_REDUCE, ALL_REDUCE, REDUCE_SCATTER, SHARE, SWAP };
enum { ENDED, WAITS, STOPS, DIFFERS, MISFITS };
enum { WRITE, PUBLISH, READ, TAKE, OVER };

/* Words of a page, as in distributed/status_pages.py. */
enum { PROGRESS = 0, AWAITED = 3, WANTED = 4, BELL = 5, FINGERPRINTS = 16, RING = 4, PAGE = 32 };
enum { PUBLISHED = 1, REDUCED = 2, PER_PIECE = 2, NUM_SLOTS = 2 };

/* The state of one rank: words, which distributed/shared_memory.py writes and reads. */
typedef struct {
    word *pages;
    char *slots;
    word rank, size, slot_bytes;
    word spin_ns;             /* before a rank sleeps */
    word crowded;             /* ranks outnumber cores */
    word skips, left_to_skip; /* waits without a spin, because spins were in vain */
    word stops;               /* return after each phase: tests inject faults there */
    word kind, dtype, item;   /* of the operation; a dtype is numbered by its place in `sums` */
    word number, what, count; /* its fingerprint, equal on all ranks */
    word bytes, piece_bytes;  /* of the longest part, and of a piece of it */
    char *tensor;             /* of an all-reduce */
    char **give, **take;      /* by rank; where all are given the same, only give[0] */
    word *give_bytes, *take_bytes;
    word piece, at, phase; /* how far it is: the piece's number, the bytes before it */
    word wanted;           /* the progress that others must reach */
    word agreed, misfit;   /* all are in this operation; the rank whose parts are of other sizes */
} collective;

#define BLOCK 1024 /* numbers that are added up in the nearest cache */
#define LOOKS_PER_CLOCK 32
#define MOST_SKIPS 31
#define LATE_NS 1000000 /* between two looks: another process had the core */

static word *page_of(const collective *op, word rank) { return op->pages + PAGE * rank; }

static char *slot_of(const collective *op, word rank) {
    return op->slots + (rank * NUM_SLOTS + op->piece % NUM_SLOTS) * op->slot_bytes;
}

static word least(word one, word other) { return one < other ? one : other; }

/* Where part `part` of `parts` begins among `count` elements: as plan.equal_sizes cuts them. */
static word start_of(word count, word parts, word part) {
    return part * (count / parts) + least(part, count % parts);
}

/* --- waiting ---------------------------------------------------------------------------------- */

static word now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (word)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Return a rank that has not reached `progress`, or -1. */
static word late_rank(const collective *op, word progress) {
    for (word rank = 0; rank < op->size; rank++)
        if (rank != op->rank &&
            __atomic_load_n(page_of(op, rank) + PROGRESS, __ATOMIC_ACQUIRE) < progress)
            return rank;
    return -1;
}

static void pause_for_a_look(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Spin until the others have reached `progress`. Another rank may have been put on our core, or
   other work: so we yield, do not spin for longer where that has cost a time slice, and spin the
   more rarely the more often it was in vain. The kernel runs a thread that slept sooner. */
static int spin(collective *op, word progress) {
    if (op->left_to_skip > 0) {
        op->left_to_skip--;
        return 0;
    }
    word looks = op->crowded ? 1 : LOOKS_PER_CLOCK, now = now_ns(), until = now + op->spin_ns;
    while (now < until) {
        for (word look = 0; look < looks; look++) {
            pause_for_a_look();
            if (late_rank(op, progress) < 0) {
                op->skips = 0;
                return 1;
            }
        }
        word before = now;
        now = now_ns();
        if (now - before > LATE_NS) break;
        sched_yield();
    }
    op->skips = least(2 * op->skips + 1, MOST_SKIPS);
    op->left_to_skip = op->skips - 1;
    return 0;
}

/* Sleep until the others have reached `progress`, or patience ends. */
static int sleep_until(const collective *op, word progress, word patience_ns) {
    word *mine = page_of(op, op->rank), until = now_ns() + patience_ns, late;
    uint32_t *bell = (uint32_t *)(mine + BELL);
    while ((late = late_rank(op, progress)) >= 0) {
        word left = until - now_ns();
        if (left <= 0) return 0;
        uint32_t rung = __atomic_load_n(bell, __ATOMIC_ACQUIRE); /* before what is said below */
        __atomic_store_n(mine + WANTED, progress, __ATOMIC_RELAXED);
        __atomic_store_n(mine + AWAITED, late + 1, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_SEQ_CST); /* before the look: see post */
        if (__atomic_load_n(page_of(op, late) + PROGRESS, __ATOMIC_ACQUIRE) < progress) {
            struct timespec most = {.tv_sec = left / 1000000000, .tv_nsec = left % 1000000000};
            syscall(SYS_futex, bell, FUTEX_WAIT, rung, &most, NULL, 0);
        }
        __atomic_store_n(mine + AWAITED, 0, __ATOMIC_RELAXED);
    }
    return 1;
}

static int await_others(collective *op, word step, word patience_ns) {
    word progress = PER_PIECE * op->piece + step;
    op->wanted = progress;
    return late_rank(op, progress) < 0 || spin(op, progress) ||
           sleep_until(op, progress, patience_ns);
}

/* Post our progress, and wake the ranks that sleep until then. */
static void post(collective *op, word step, word phase) {
    word progress = PER_PIECE * op->piece + step;
    op->phase = phase;
    __atomic_store_n(page_of(op, op->rank) + PROGRESS, progress, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* a rank that falls asleep looks after it */
    for (word rank = 0; rank < op->size; rank++) {
        word *page = page_of(op, rank), sleeper = op->rank + 1;
        if (__atomic_load_n(page + AWAITED, __ATOMIC_RELAXED) == sleeper &&
            __atomic_load_n(page + WANTED, __ATOMIC_RELAXED) <= progress &&
            __atomic_compare_exchange_n(page + AWAITED, &sleeper, 0, 0, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
            __atomic_add_fetch((uint32_t *)(page + BELL), 1, __ATOMIC_RELAXED);
            syscall(SYS_futex, page + BELL, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
        }
    }
}

/* See once whether all are in the same operation. */
static int all_agree(collective *op) {
    word at = FINGERPRINTS + RING * (op->number % RING);
    for (word rank = 0; rank < op->size && !op->agreed; rank++) {
        const word *fingerprint = page_of(op, rank) + at;
        if (fingerprint[0] != op->number || fingerprint[1] != op->what ||
            fingerprint[2] != op->count)
            return 0;
    }
    op->agreed = 1;
    return 1;
}

/* --- sums ------------------------------------------------------------------------------------- */

/* Where a rank's numbers lie that are reduced: ours in our tensor, if `ours` says where. */
static const char *source_of(const collective *op, word rank, word offset, const char *ours) {
    return ours && rank == op->rank ? ours : slot_of(op, rank) + offset;
}

static void spread(const collective *op, const void *sum, word offset, word bytes) {
    for (word rank = 0; rank < op->size; rank++)
        if (rank != op->rank) memcpy(slot_of(op, rank) + offset, sum, (size_t)bytes);
}

/* Sums in the order of ranks, which is why all ranks get the same bits. Integers are added as
   unsigned ones, which wrap around. */
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
    static void sum_##NAME(const collective *op, word offset, const char *ours, word count,        \
                           char *to, int spreads) {                                                \
        const word item = (word)sizeof(TYPE);                                                      \
        TYPE sum[BLOCK];                                                                           \
        if (op->size == 2 && spreads) {                                                            \
            char *theirs = slot_of(op, 1 - op->rank) + offset;                                     \
            const char *left = op->rank ? theirs : ours, *right = op->rank ? ours : theirs;        \
            add_two_##NAME((const TYPE *)left, (const TYPE *)right, (TYPE *)to, (TYPE *)theirs,    \
                           count);                                                                 \
            return;                                                                                \
        }                                                                                          \
        for (word at = 0; at < count; at += BLOCK) {                                               \
            word length = least(count - at, BLOCK), bytes = length * item;                         \
            for (word rank = 0; rank < op->size; rank++) {                                         \
                const char *source = source_of(op, rank, offset, ours) + at * item;                \
                if (rank)                                                                          \
                    add_##NAME((const TYPE *)source, sum, length);                                 \
                else                                                                               \
                    memcpy(sum, source, (size_t)bytes);                                            \
            }                                                                                      \
            memcpy(to + at * item, sum, (size_t)bytes);                                            \
            if (spreads) spread(op, sum, offset + at * item, bytes);                               \
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

static void sum_bfloat16(const collective *op, word offset, const char *ours, word count, char *to,
                         int spreads) {
    const word item = sizeof(uint16_t);
    float sum[BLOCK];
    uint16_t result[BLOCK];
    for (word at = 0; at < count; at += BLOCK) {
        word length = least(count - at, BLOCK), bytes = length * item;
        for (word rank = 0; rank < op->size; rank++) {
            const char *source = source_of(op, rank, offset, ours) + at * item;
            (rank ? add_bfloat16 : begin_bfloat16)((const uint16_t *)source, sum, length);
        }
        round_bfloat16(sum, result, length);
        memcpy(to + at * item, result, (size_t)bytes);
        if (spreads) spread(op, result, offset + at * item, bytes);
    }
}

typedef void sum_of_ranks(const collective *, word, const char *, word, char *, int);
static sum_of_ranks *const sums[] = {sum_float32, sum_float64, sum_int32, sum_int64, sum_bfloat16};

/* --- the operations --------------------------------------------------------------------------- */

/* How many of `bytes` are in this piece, from op->at on. */
static word in_piece(const collective *op, word bytes) {
    word left = bytes - op->at;
    return left < 0 ? 0 : least(left, op->piece_bytes);
}

/* An all-reduce. A short tensor is published whole and reduced by every rank: one wait instead of
   two. Of a longer one each rank reduces a part, and puts the result where the others have
   published theirs:

       rank 0   publishes  . B C    reduces A = a0 + a1 + a2    takes  . B C
       rank 1   publishes  A . C    reduces B                   takes  A . C
       rank 2   publishes  A B .    reduces C                   takes  A B . */
static void exchange(const collective *op, int gives) {
    char *slot = slot_of(op, op->rank), *piece = op->tensor + op->at;
    word end = in_piece(op, op->bytes), count = end / op->item;
    word first = op->item * start_of(count, op->size, op->rank);
    word stop = op->item * start_of(count, op->size, op->rank + 1);
    char *to = gives ? slot : piece, *from = gives ? piece : slot;
    phalanx_copy(from, to, first, 0);
    phalanx_copy(from + stop, to + stop, end - stop, 0);
}

static void write_short(collective *op) {
    memcpy(slot_of(op, op->rank), op->tensor, (size_t)op->bytes);
}

static word read_short(collective *op) {
    sums[op->dtype](op, 0, NULL, op->bytes / op->item, op->tensor, 0);
    return ENDED;
}

static void write_all_reduce(collective *op) { exchange(op, 1); }

static word read_all_reduce(collective *op) {
    word count = in_piece(op, op->bytes) / op->item, start = start_of(count, op->size, op->rank);
    word offset = op->item * start, length = start_of(count, op->size, op->rank + 1) - start;
    char *mine = op->tensor + op->at + offset;
    sums[op->dtype](op, offset, mine, length, mine, 1);
    return ENDED;
}

/* What every rank gives to all: all_gather, broadcast, barrier. */
static void write_share(collective *op) {
    phalanx_copy(op->give[0] + op->at, slot_of(op, op->rank), in_piece(op, op->give_bytes[0]), 0);
}

static word read_share(collective *op) {
    for (word rank = 0; rank < op->size; rank++)
        if (rank != op->rank || op->take[rank] != op->give[0]) /* the root of a broadcast has it */
            phalanx_copy(slot_of(op, rank), op->take[rank] + op->at,
                         in_piece(op, op->take_bytes[rank]), 0);
    return ENDED;
}

/* Another part for each rank: all_to_all, gather, scatter, reduce_scatter. A slot holds the sizes of
   all parts, because no rank knows what others give to others, then a place for each rank. */
static word place_of(const collective *op, word rank) {
    word head = (op->size + 1) * (word)sizeof(word);
    return (head + LINE - 1) / LINE * LINE + rank * op->piece_bytes;
}

static void write_swap(collective *op) {
    char *slot = slot_of(op, op->rank);
    word *sizes = (word *)slot;
    sizes[op->size] = op->bytes;
    for (word rank = 0; rank < op->size; rank++) {
        sizes[rank] = op->give_bytes[rank];
        if (rank != op->rank)
            phalanx_copy(op->give[rank] + op->at, slot + place_of(op, rank),
                         in_piece(op, op->give_bytes[rank]), 0);
    }
}

static word read_swap(collective *op) {
    for (word rank = 0; rank < op->size; rank++) {
        const char *slot = slot_of(op, rank);
        const word *sizes = (const word *)slot;
        if (sizes[op->rank] != op->take_bytes[rank]) {
            op->misfit = rank;
            return MISFITS;
        }
        if (op->bytes < sizes[op->size]) op->bytes = sizes[op->size];
        const char *from = slot + place_of(op, op->rank);
        if (rank == op->rank) from = op->give[rank] + op->at;
        phalanx_copy(from, op->take[rank] + op->at, in_piece(op, op->take_bytes[rank]), 0);
    }
    return ENDED;
}

static word read_reduce_scatter(collective *op) {
    word bytes = in_piece(op, op->take_bytes[op->rank]);
    sums[op->dtype](op, place_of(op, op->rank), op->give[op->rank] + op->at, bytes / op->item,
                    op->take[op->rank] + op->at, 0);
    return ENDED;
}

static const struct {
    void (*write)(collective *);
    word (*read)(collective *);
} kinds[] = {
    [SHORT_ALL_REDUCE] = {write_short, read_short},
    [ALL_REDUCE] = {write_all_reduce, read_all_reduce},
    [REDUCE_SCATTER] = {write_swap, read_reduce_scatter},
    [SHARE] = {write_share, read_share},
    [SWAP] = {write_swap, read_swap},
};

/* Run an operation until it ends, or returns to Python for another reason: others are late, and this
   rank has slept for so long. */
word phalanx_collective(collective *op, word patience_ns) {
    for (;;) switch (op->phase) {
        case WRITE:
            kinds[op->kind].write(op);
            op->phase = PUBLISH;
            if (op->stops) return STOPS; /* fall through */
        case PUBLISH:
            post(op, PUBLISHED, READ);
            if (op->stops) return STOPS; /* fall through */
        case READ:
            if (!await_others(op, PUBLISHED, patience_ns)) return WAITS;
            if (!all_agree(op)) return DIFFERS;
            word outcome = kinds[op->kind].read(op);
            if (outcome != ENDED) return outcome;
            op->phase = OVER;
            if (op->kind == ALL_REDUCE) post(op, REDUCED, TAKE);
            if (op->stops) return STOPS;
            break;
        case TAKE:
            if (!await_others(op, REDUCED, patience_ns)) return WAITS;
            exchange(op, 0);
            op->phase = OVER;
            if (op->stops) return STOPS; /* fall through */
        default:
            op->piece++;
            op->at += op->piece_bytes;
            op->phase = WRITE;
            if (op->at >= op->bytes) return ENDED;
        }
}
