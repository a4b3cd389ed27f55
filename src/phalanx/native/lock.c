/* A lock in shared memory that excludes threads of all processes; see ipc/mutex.py.

       turn   held by the one who waits next      held   the lock itself

   Both are robust mutexes: when the holder of one dies, the kernel marks it, and the next one gets
   it. Whoever comes goes through `turn` first, so a holder that lets go and comes again at once is
   behind whoever waits.

   Both are for checking errors: a thread that asks for what it holds is told so. It does not hold it
   knowingly, as Python code enters no block twice: a KeyboardInterrupt between the call and the
   block has left it behind. */

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "native.h"

_Static_assert(sizeof(phalanx_lock) <= PHALANX_LOCK_BYTES, "a lock must fit into its place");

static _Atomic int64_t own_pid; /* 0: not known, as after a fork */

static void forget_pid(void) { own_pid = 0; }

__attribute__((constructor)) static void begin(void) { pthread_atfork(NULL, NULL, forget_pid); }

static int64_t this_process(void) {
    int64_t pid = own_pid;
    if (!pid) own_pid = pid = getpid();
    return pid;
}

/* Make a free mutex of zeros. May be done again, and by several at once, also while it is held: it
   writes only those words that are not 0 in a new mutex, which say of what kind it is and never
   change. So nobody has to wait for who does it, who may die in the middle. */
static int64_t make(pthread_mutex_t *mutex) {
    pthread_mutexattr_t kind;
    union {
        pthread_mutex_t mutex;
        uint32_t words[sizeof(pthread_mutex_t) / sizeof(uint32_t)];
    } fresh = {.words = {0}};
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
    pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_ERRORCHECK);
    int error = pthread_mutex_init(&fresh.mutex, &kind);
    pthread_mutexattr_destroy(&kind);
    for (size_t i = 0; i < sizeof(fresh.words) / sizeof(*fresh.words); i++)
        if (fresh.words[i])
            atomic_store((_Atomic uint32_t *)(void *)mutex + i, fresh.words[i]);
    return error;
}

int64_t phalanx_lock_make(phalanx_lock *lock) {
    int64_t error = make(&lock->turn);
    return error ? error : make(&lock->held);
}

static struct timespec in_milliseconds(int64_t ms) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    at.tv_nsec += ms % 1000 * 1000000;
    at.tv_sec += ms / 1000 + at.tv_nsec / 1000000000;
    at.tv_nsec %= 1000000000;
    return at;
}

/* Return 0 when the mutex is this thread's. */
static int take(pthread_mutex_t *mutex, int64_t ms) {
    int error = pthread_mutex_trylock(mutex);
    if (error == EBUSY && ms > 0) {
        struct timespec until = in_milliseconds(ms);
        error = pthread_mutex_timedlock(mutex, &until);
    }
    if (error == EOWNERDEAD) return pthread_mutex_consistent(mutex);
    return error == EDEADLK ? 0 : error;
}

/* Take the lock, and return 0; or ETIMEDOUT or EBUSY, where others have held it for so long. */
int64_t phalanx_lock_take(phalanx_lock *lock, int64_t ms) {
    int error = take(&lock->turn, ms);
    if (error) return error;
    error = take(&lock->held, ms);
    pthread_mutex_unlock(&lock->turn);
    if (!error) lock->owner = this_process();
    return error;
}

/* Let go of the lock, if this thread holds it. */
int64_t phalanx_lock_release(phalanx_lock *lock) {
    int error = take(&lock->held, 1); /* at once, where it is ours */
    if (error) return error;
    lock->owner = 0;
    return pthread_mutex_unlock(&lock->held);
}

int64_t phalanx_lock_owner(const phalanx_lock *lock) { return lock->owner; }

/* What somebody waits for; see ipc/mutex.py. */
typedef struct {
    _Atomic uint32_t count;   /* of changes; the word that the kernel compares */
    _Atomic uint32_t waiting; /* how many wait, or died waiting: nobody is woken where it is 0 */
} changes;

int64_t phalanx_changes(const changes *what) { return what->count; }

void phalanx_changes_tell(changes *what) {
    what->count++;
    if (what->waiting) syscall(SYS_futex, &what->count, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Sleep until something changes that had not when `count` was read, or so long. */
void phalanx_changes_wait(changes *what, int64_t count, int64_t ms) {
    struct timespec most = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    what->waiting++;
    syscall(SYS_futex, &what->count, FUTEX_WAIT, (uint32_t)count, &most, NULL, 0);
    what->waiting--;
}
