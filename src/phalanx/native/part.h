/* What part.c and keys.c have in common: a part of a table. */

#include <stdatomic.h>
#include <stdint.h>

#include "native.h"

/* See part.c, and tables/part.py for the words of the header and the answers. */
enum { WORD, WORKER, NUMBER, BLOCK, AT, RECORDED, NUMBERED, UNDONE, SIDE, NEXT_SIDE };
enum { DONE, LATE, OUTSIDE, NOT_FINITE, UNSETTLED, BEHIND, ABSENT, CRAMPED };
enum { ALL = -1 };
enum { FLOAT32, FLOAT64, INT32, INT64, BFLOAT16 };

typedef _Atomic int64_t word;

/* As `PartView` of native/library.py, in the same order. */
typedef struct {
    word *header;
    word *done;
    phalanx_lock *lock;
    char *sides[2]; /* the rows and the record, or the other way round */
    int64_t *record_rows;
    int64_t num_rows, num_cols, first_row, block_rows, dtype;
    double scale;
} part;

/* See tables/keys.py. */
enum { GENERATION, STOP, NEXT_STOP };

static inline int64_t size_of(int64_t dtype) {
    return dtype == BFLOAT16 ? 2 : dtype == FLOAT64 || dtype == INT64 ? 8 : 4;
}

static inline char *values_of(const part *p) { return p->sides[p->header[SIDE]]; }
static inline char *record_of(const part *p) { return p->sides[!p->header[SIDE]]; }

/* How many rows may be saved, with their numbers or without. */
static inline int64_t recorded_by(const part *p, int has_numbers) {
    int64_t rows = p->header[SIDE] ? p->num_rows : p->header[RECORDED];
    int64_t numbers = p->header[NUMBERED];
    return has_numbers && numbers < rows ? numbers : rows;
}

void phalanx_put(word *at, int64_t value);
int64_t phalanx_part_add_at_once(const part *p, const int64_t *rows, int64_t first_row,
                                 int64_t count, const char *delta, int64_t worker, int64_t number);
