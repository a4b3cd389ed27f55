/* What the compiled files have in common. */

#define VERSION 8 /* as in compiled.py */
#define LINE 64   /* bytes of a cache */

/* For each kind of processor one copy of a function, chosen when the library is loaded. Sums have
   the same bits in all of them: nothing is multiplied, and each number is added to one other. */
#if defined(__x86_64__) && defined(__GLIBC__)
#define WIDE __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define WIDE
#endif
