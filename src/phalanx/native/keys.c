/* Rows of a part that are found by key. See tables/keys.py for what lies where.

   Each process has an index of its own: a hash table of places, over the list of keys that all share.
   One thread at a time inserts; others look keys up meanwhile. */

#include <stdatomic.h>
#include <string.h>

#include "part.h"

#define MANY 64 /* keys that are looked up before their rows are copied, so that these are fetched */

typedef _Atomic int32_t entry; /* 0: empty, else the place + 1 */

/* As `IndexView` of native/library.py. */
typedef struct {
    entry *entries;
    const int64_t *keys; /* of each place, shared */
    int64_t mask, seed;
    int64_t generation; /* as the word GENERATION said */
    word stop;          /* places before this one are in */
} key_index;

/* As `KeysView` of native/library.py. */
typedef struct {
    const part *rows;
    word *counts;
    const char *first_row; /* what a row holds at first; NULL where each has its own */
} keys_part;

/* 64 bits, every one of which depends on all of the number's. Source: the finaliser of splitmix64
   (Steele, Lea and Flood, OOPSLA 2014). */
static inline uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 31;
}

static inline uint64_t bucket_of(const key_index *index, int64_t key) {
    return mix((uint64_t)(key ^ index->seed)) & (uint64_t)index->mask;
}

/* Insert the keys of places up to `stop`. */
void phalanx_index_insert(key_index *index, int64_t stop) {
    int64_t place = index->stop;
    for (; place < stop; place++) {
        uint64_t at = bucket_of(index, index->keys[place]);
        while (index->entries[at]) at = (at + 1) & (uint64_t)index->mask;
        atomic_store_explicit(&index->entries[at], (int32_t)(place + 1), memory_order_release);
    }
    atomic_store_explicit(&index->stop, place, memory_order_release);
}

/* Return the key's place among the index's first `count`, or -1. */
static inline int64_t find(const key_index *index, int64_t key, int64_t count) {
    for (uint64_t at = bucket_of(index, key);; at = (at + 1) & (uint64_t)index->mask) {
        int64_t number = atomic_load_explicit(&index->entries[at], memory_order_acquire);
        if (!number) return -1;
        if (number <= count && index->keys[number - 1] == key) return number - 1;
    }
}

/* How many of the index's places count now; negative where it does not know all of them yet. */
static inline int64_t counted_by(const key_index *index, const keys_part *p) {
    int64_t generation = atomic_load_explicit(&p->counts[GENERATION], memory_order_acquire);
    int64_t stop = atomic_load_explicit(&p->counts[STOP], memory_order_acquire);
    if (generation != index->generation || index->stop < stop) return -1;
    return stop;
}

/* Look keys up, -1 where one is absent, and return how many are. */
int64_t phalanx_index_find(const key_index *index, const int64_t *keys, int64_t count, int64_t stop,
                           int64_t *places) {
    int64_t absent = 0;
    for (int64_t i = 0; i < count; i++) {
        places[i] = find(index, keys[i], stop);
        absent += places[i] < 0;
    }
    return absent;
}

/* Copy the rows of keys, of one moment, without the lock, or with it; `places` says which were absent where
   these have rows of their own. */
int64_t phalanx_keys_get(const keys_part *p, const key_index *index, const int64_t *keys,
                         int64_t count, char *out, int64_t *places) {
    const part *rows = p->rows;
    int64_t row_bytes = rows->num_cols * size_of(rows->dtype), some[MANY];
    int64_t before = atomic_load_explicit(&rows->header[WORD], memory_order_acquire);
    if (before & 1) return UNSETTLED;
    int64_t num_keys = counted_by(index, p);
    const char *values = values_of(rows);
    if (num_keys < 0) return BEHIND;
    for (int64_t at = 0; at < count; at += MANY) {
        int64_t stop = count - at < MANY ? count : at + MANY;
        for (int64_t i = at; i < stop; i++) {
            int64_t place = some[i - at] = find(index, keys[i], num_keys);
            if (place >= 0) __builtin_prefetch(values + place * row_bytes);
        }
        for (int64_t i = at; i < stop; i++) {
            int64_t place = some[i - at];
            const char *row = place < 0 ? p->first_row : values + place * row_bytes;
            if (row) memcpy(out + i * row_bytes, row, (size_t)row_bytes);
            if (places) places[i] = place;
        }
    }
    atomic_thread_fence(memory_order_acquire);
    int64_t after = atomic_load_explicit(&rows->header[WORD], memory_order_relaxed);
    return after == before ? DONE : UNSETTLED;
}

/* Add to the rows of keys that are all there, as `phalanx_part_add` adds to rows. */
int64_t phalanx_keys_add(const keys_part *p, const key_index *index, const int64_t *keys, int64_t count,
                         const char *delta, int64_t worker, int64_t number, int64_t ms) {
    const part *rows = p->rows;
    if (phalanx_lock_take(rows->lock, ms)) return LATE;
    int64_t answer, num_keys = counted_by(index, p);
    if (rows->header[WORD] & 1)
        answer = UNSETTLED;
    else if (num_keys < 0)
        answer = BEHIND;
    else if (count > recorded_by(rows, 1))
        answer = CRAMPED;
    else if (phalanx_index_find(index, keys, count, p->counts[STOP], rows->record_rows))
        answer = ABSENT;
    else {
        phalanx_put(&p->counts[NEXT_STOP], p->counts[STOP]);
        answer = phalanx_part_add_at_once(rows, rows->record_rows, 0, count, delta, worker, number);
    }
    phalanx_lock_release(rows->lock);
    return answer;
}
