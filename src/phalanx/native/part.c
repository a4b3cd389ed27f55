/* Rows of a part of a table, read and added to by one call. See tables/part.py for the protocol, and
   for what is not done here: updaters that have a state, and undoing what a death interrupted. */

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>

#include "part.h"

static int64_t steps_left; /* of a test: the process dies after so many stores */

void phalanx_die_after(int64_t steps) { steps_left = steps; }

static inline void step(void) {
    if (__builtin_expect(steps_left != 0, 0) && !--steps_left) raise(SIGKILL);
}

void phalanx_put(word *at, int64_t value) {
    step();
    atomic_store_explicit(at, value, memory_order_release);
}

static int is_finite(const part *p, const void *delta, int64_t num_rows) {
    int64_t count = num_rows * p->num_cols;
    if (p->dtype == FLOAT32) return phalanx_finite_float32(delta, count) != 0;
    if (p->dtype == FLOAT64) return phalanx_finite_float64(delta, count) != 0;
    if (p->dtype == BFLOAT16) return phalanx_finite_bfloat16(delta, count) != 0;
    return 1;
}

static void add_rows(const part *p, void *values, int64_t num_rows, int64_t num_cols,
                     const int64_t *rows, int64_t count, const void *delta) {
    if (p->dtype == FLOAT32)
        phalanx_add_float32(values, num_rows, num_cols, rows, count, delta, p->scale);
    else if (p->dtype == FLOAT64)
        phalanx_add_float64(values, num_rows, num_cols, rows, count, delta, p->scale);
    else if (p->dtype == INT32)
        phalanx_add_int32(values, num_rows, num_cols, rows, count, delta, p->scale);
    else if (p->dtype == INT64)
        phalanx_add_int64(values, num_rows, num_cols, rows, count, delta, p->scale);
    else
        phalanx_add_bfloat16(values, num_rows, num_cols, rows, count, delta, p->scale);
}

/* Write `count` rows from `first` on, with a delta, to the record; tell whether this is finite. */
static int64_t write_sums(const part *p, int64_t first, int64_t count, const void *delta) {
    static const int64_t only = 0;
    int64_t row_bytes = p->num_cols * size_of(p->dtype), num = count * p->num_cols;
    const void *values = values_of(p) + first * row_bytes;
    void *record = record_of(p) + first * row_bytes;
    if (p->dtype == FLOAT32)
        return phalanx_sum_float32(values, delta, record, num, p->scale);
    if (p->dtype == FLOAT64)
        return phalanx_sum_float64(values, delta, record, num, p->scale);
    if (!is_finite(p, delta, count)) return 0;
    phalanx_copy(values, record, count * row_bytes, 0);
    add_rows(p, record, 1, num, &only, 1, delta);
    return 1;
}

/* Add the delta's rows to rows, one after the other; where `rows` is NULL, see `write_sums`. */
void phalanx_part_change(const part *p, const int64_t *rows, int64_t first, int64_t count,
                         const char *delta) {
    atomic_thread_fence(memory_order_seq_cst); /* after the words that say so */
    if (rows)
        add_rows(p, values_of(p), p->num_rows, p->num_cols, rows, count, delta);
    else
        write_sums(p, first, count, delta);
}

/* Save rows and change them, block by block; tell whether the delta is finite. */
static int64_t change_rows(const part *p, const int64_t *rows, int64_t first_row, int64_t count,
                           const char *delta) {
    int64_t row_bytes = p->num_cols * size_of(p->dtype), most = p->block_rows;
    char *record = record_of(p);
    for (int64_t first = 0; first < count; first += most) {
        int64_t some = count - first < most ? count - first : most;
        int64_t *numbers = p->record_rows + first;
        if (!is_finite(p, delta + first * row_bytes, some)) return 0;
        /* A copy, brought within: what is put back is right, whatever others do to `rows`. */
        phalanx_clamp(rows + first, some, first_row, p->num_rows, numbers);
        phalanx_take(values_of(p), p->num_rows, row_bytes, numbers, some, 0,
                     record + first * row_bytes);
        phalanx_put(&p->header[AT], first + some);
        step();
        phalanx_part_change(p, numbers, first, some, delta + first * row_bytes);
    }
    return 1;
}

/* Make an add, unless it has a number and is in. The lock is held, and WORD even. Where a
   block is not finite, leave the add as a death would. */
int64_t phalanx_part_add_at_once(const part *p, const int64_t *rows, int64_t first_row,
                                 int64_t count, const char *delta, int64_t worker, int64_t number) {
    word *header = p->header;
    int64_t before = header[WORD], next_side = rows ? header[SIDE] : !header[SIDE];
    if (!count || (number && p->done[worker] >= number)) return DONE;
    if (count > recorded_by(p, rows != NULL)) return CRAMPED;
    phalanx_put(&header[WORKER], worker);
    phalanx_put(&header[NUMBER], number);
    phalanx_put(&header[NEXT_SIDE], next_side);
    phalanx_put(&header[BLOCK], p->block_rows);
    phalanx_put(&header[AT], 0);
    phalanx_put(&header[WORD], before + 1);
    if (!(rows ? change_rows(p, rows, first_row, count, delta) : write_sums(p, 0, count, delta)))
        return NOT_FINITE;
    phalanx_put(&header[AT], ALL);
    phalanx_put(&header[SIDE], next_side);
    if (number) phalanx_put(&p->done[worker], number);
    phalanx_put(&header[WORD], before + 2);
    step();
    return DONE;
}

/* Add to rows, whole or not at all: to all rows of the part where `rows` is NULL. An add with a
   number, of a worker, counts once. */
int64_t phalanx_part_add(const part *p, const int64_t *rows, int64_t count, const char *delta,
                         int64_t worker, int64_t number, int64_t ms) {
    if (rows && !phalanx_within(rows, count, p->first_row, p->num_rows)) return OUTSIDE;
    if (phalanx_lock_take(p->lock, ms)) return LATE;
    int64_t answer = UNSETTLED;
    if (!(p->header[WORD] & 1))
        answer = phalanx_part_add_at_once(p, rows, p->first_row, count, delta, worker, number);
    phalanx_lock_release(p->lock);
    return answer;
}

/* Copy rows, all of them if `count` is negative, of one moment, without the lock; UNSETTLED where
   adds overtake it. */
int64_t phalanx_part_get(const part *p, const int64_t *rows, int64_t count, char *out) {
    word *header = p->header;
    int64_t row_bytes = p->num_cols * size_of(p->dtype);
    int64_t num_bytes = p->num_rows * row_bytes;
    if (!phalanx_within(rows, count, p->first_row, p->num_rows)) return OUTSIDE;
    for (int attempt = 0; attempt < 3; attempt++) {
        int64_t before = atomic_load_explicit(&header[WORD], memory_order_acquire);
        if (before & 1) return UNSETTLED;
        const char *values = values_of(p);
        if (count >= 0)
            phalanx_take(values, p->num_rows, row_bytes, rows, count, p->first_row, out);
        else
            phalanx_copy(values, out, num_bytes, num_bytes >= PAST_CACHE);
        atomic_thread_fence(memory_order_acquire);
        if (atomic_load_explicit(&header[WORD], memory_order_relaxed) == before) return DONE;
    }
    return UNSETTLED;
}
