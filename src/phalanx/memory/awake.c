/* Threads that keep cores from falling asleep while replicas wait for each other; see awake.py.

   They are the kernel's lowest class, so that whoever has work there has the core at once; and they
   never touch the interpreter, whose lock must not be held by somebody who may not run. */

#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "compiled.h"

#define PATIENCE_NS 2000000 /* a core that nobody has wanted for so long may sleep */
#define LONGEST_NS 50000000 /* and any core, so long after the last kick */
#define ABSENCE_NS 50000    /* who was away for so long has let somebody run */
#define PAUSES 64

static uint32_t kicks;
static uint32_t asleep;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void pause_often(void) {
#if defined(__x86_64__)
    for (int i = 0; i < PAUSES; i++) __builtin_ia32_pause();
#endif
}

/* Stay awake until there was neither a kick nor anybody else here for a while. Whoever comes may be
   of another process, which is no reason to stay for long. */
static uint32_t stay_awake(void) {
    uint32_t seen = __atomic_load_n(&kicks, __ATOMIC_SEQ_CST), found;
    int64_t last = now_ns(), idle_since = last, kicked = last;
    while (last - idle_since < PATIENCE_NS && last - kicked < LONGEST_NS) {
        int64_t before = last;
        pause_often();
        sched_yield();
        last = now_ns();
        found = __atomic_load_n(&kicks, __ATOMIC_SEQ_CST);
        if (found != seen) kicked = last;
        if (found != seen || last - before > ABSENCE_NS) idle_since = last;
        seen = found;
    }
    return seen;
}

static void *watch(void *unused) {
    struct sched_param lowest = {0};
    if (sched_setscheduler(0, SCHED_IDLE, &lowest)) return unused;
    for (;;) {
        uint32_t seen = stay_awake();
        __atomic_add_fetch(&asleep, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, &kicks, FUTEX_WAIT_PRIVATE, seen, 0, 0, 0);
        __atomic_sub_fetch(&asleep, 1, __ATOMIC_SEQ_CST);
    }
}

/* Start a thread on a core; tell whether it could be. */
int64_t phalanx_watch_core(int64_t core) {
    pthread_attr_t attributes;
    pthread_t thread;
    cpu_set_t only;
    sigset_t all, before;
    int failed;
    if (core < 0 || core >= CPU_SETSIZE) return 0;
    CPU_ZERO(&only);
    CPU_SET((size_t)core, &only);
    pthread_attr_init(&attributes);
    failed = pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED) ||
             pthread_attr_setstacksize(&attributes, 256 << 10) ||
             pthread_attr_setaffinity_np(&attributes, sizeof only, &only);
    sigfillset(&all); /* signals are the main thread's to hear */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    failed = failed || pthread_create(&thread, &attributes, watch, 0);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    pthread_attr_destroy(&attributes);
    return !failed;
}

/* Keep all watched cores awake for the next moment. */
void phalanx_keep_awake(void) {
    __atomic_add_fetch(&kicks, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&asleep, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &kicks, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
}
