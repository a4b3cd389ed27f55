/* Memory that torch asks for, given where somebody wants it to lie. See placement.py.

   All memory of tensors on the CPU comes from two calls in torch's lowest library, whose addresses
   stand in that library's own table of what it takes from others. They are replaced there and
   nowhere else: nobody's allocator is touched, and what is not ours goes on to it. */

#define _GNU_SOURCE
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "compiled.h"

#define TORCH "libc10.so"

typedef int (*allocate_t)(void **, size_t, size_t);
typedef void (*release_t)(void *);

/* Places in one mapping. Fields live as long as the process: whoever still holds memory of one may
   let it go at any time. */
struct place {
    int64_t offset, bytes;
    int taken;
};

struct field {
    char *base;
    int64_t bytes, count;
    int64_t least; /* bytes of a place */
    struct field *next;
    struct place places[];
};

static allocate_t allocate;
static release_t release;
static struct field *fields;

/* What a thread is about, between `begin` and `end`. */
static __thread struct {
    struct field *field;
    const int32_t *order; /* the place for each request in its turn, or -1 */
    int64_t *log; /* takes the address that each got */
    int64_t ordered, room, turn;
} now;

static int is_of_a_place(const struct field *field, int64_t bytes) {
    if (bytes < field->least) return 0;
    for (int64_t i = 0; i < field->count; i++)
        if (field->places[i].bytes == bytes) return 1;
    return 0;
}

static void *placed(struct field *field, int64_t number, size_t alignment, int64_t bytes) {
    struct place *place = field->places + number;
    char *address;
    if (number < 0 || number >= field->count || place->bytes != bytes) return 0;
    address = field->base + place->offset;
    if ((uintptr_t)address % alignment) return 0;
    return __atomic_exchange_n(&place->taken, 1, __ATOMIC_ACQ_REL) ? 0 : address;
}

static int give(void **to, size_t alignment, size_t bytes) {
    struct field *field = now.field;
    int failed = 0;
    void *found;
    if (!field || !is_of_a_place(field, (int64_t)bytes)) return allocate(to, alignment, bytes);
    found = placed(field, now.turn < now.ordered ? now.order[now.turn] : -1, alignment,
                   (int64_t)bytes);
    if (found)
        *to = found;
    else
        failed = allocate(to, alignment, bytes);
    if (!failed && now.turn < now.room) now.log[now.turn] = (int64_t)(uintptr_t)*to;
    now.turn++;
    return failed;
}

static void take_back(void *memory) {
    char *address = memory;
    for (struct field *field = __atomic_load_n(&fields, __ATOMIC_ACQUIRE); field;
         field = field->next) {
        if (address < field->base || address >= field->base + field->bytes) continue;
        for (int64_t i = 0; i < field->count; i++)
            if (field->base + field->places[i].offset == address)
                __atomic_store_n(&field->places[i].taken, 0, __ATOMIC_RELEASE);
        return;
    }
    release(memory);
}

#define MOST_ENTRIES 8

/* Where in a library's tables the addresses of two functions of others stand. */
struct tables {
    void **allocate, **release[MOST_ENTRIES];
    int releases;
    uintptr_t sealed, unsealed; /* what is not to be written, from and to */
    int lazy;                   /* no address yet, but of what would find it */
};

static uintptr_t page_of(uintptr_t address) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    return address / page * page;
}

static uintptr_t entry_of(const ElfW(Dyn) *dynamic, ElfW(Sxword) tag) {
    for (; dynamic->d_tag != DT_NULL; dynamic++)
        if (dynamic->d_tag == tag) return dynamic->d_un.d_val;
    return 0;
}

static void search(struct tables *tables, uintptr_t base, const ElfW(Dyn) *dynamic, uintptr_t start,
                   uintptr_t bytes) {
    const ElfW(Rela) *entry = (const ElfW(Rela) *)start;
    const ElfW(Sym) *symbols = (const ElfW(Sym) *)entry_of(dynamic, DT_SYMTAB);
    const char *names = (const char *)entry_of(dynamic, DT_STRTAB);
    for (uintptr_t i = 0; i < bytes / sizeof *entry; i++) {
        const char *name = names + symbols[ELF64_R_SYM(entry[i].r_info)].st_name;
        void **slot = (void **)(base + entry[i].r_offset);
        if (!strcmp(name, "posix_memalign")) tables->allocate = slot;
        if (!strcmp(name, "free") && tables->releases < MOST_ENTRIES)
            tables->release[tables->releases++] = slot;
    }
}

static int look_at(struct dl_phdr_info *library, size_t size, void *to) {
    const char *name = strrchr(library->dlpi_name, '/');
    const ElfW(Dyn) *dynamic = 0;
    struct tables *tables = to;
    (void)size;
    if (strcmp(name ? name + 1 : library->dlpi_name, TORCH)) return 0;
    for (int i = 0; i < library->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &library->dlpi_phdr[i];
        uintptr_t start = library->dlpi_addr + part->p_vaddr;
        if (part->p_type == PT_DYNAMIC) dynamic = (const ElfW(Dyn) *)start;
        if (part->p_type == PT_GNU_RELRO) {
            tables->sealed = page_of(start);
            tables->unsealed = page_of(start + part->p_memsz);
        }
    }
    if (!dynamic || entry_of(dynamic, DT_PLTREL) != DT_RELA) return 1;
    search(tables, library->dlpi_addr, dynamic, entry_of(dynamic, DT_JMPREL),
           entry_of(dynamic, DT_PLTRELSZ));
    search(tables, library->dlpi_addr, dynamic, entry_of(dynamic, DT_RELA),
           entry_of(dynamic, DT_RELASZ));
    for (int i = 0; tables->allocate && i < library->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &library->dlpi_phdr[i];
        uintptr_t found = (uintptr_t)*tables->allocate - library->dlpi_addr;
        if (part->p_type == PT_LOAD && found >= part->p_vaddr &&
            found < part->p_vaddr + part->p_memsz)
            tables->lazy = 1;
    }
    return 1;
}

static int replace(const struct tables *tables, void **slot, void *function) {
    uintptr_t page = page_of((uintptr_t)slot);
    size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
    if (mprotect((void *)page, bytes, PROT_READ | PROT_WRITE)) return 0;
    __atomic_store_n(slot, function, __ATOMIC_RELEASE);
    if (page >= tables->sealed && page < tables->unsealed)
        mprotect((void *)page, bytes, PROT_READ);
    return 1;
}

static int64_t taken(const struct field *field) {
    int64_t found = 0;
    for (int64_t i = 0; i < field->count; i++)
        found += __atomic_load_n(&field->places[i].taken, __ATOMIC_ACQUIRE);
    return found;
}

static int part(struct field *field) {
    size_t bytes = (size_t)field->bytes;
    char *copy = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if ((void *)copy == MAP_FAILED) return 0;
    for (int64_t i = 0; i < field->count; i++) { /* what nobody holds takes no memory */
        const struct place *place = field->places + i;
        if (__atomic_load_n(&place->taken, __ATOMIC_ACQUIRE))
            memcpy(copy + place->offset, field->base + place->offset, (size_t)place->bytes);
    }
    return mremap(copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, field->base) != MAP_FAILED;
}

/* A forked child is in the middle of what its parent is about. The slot is not the child's: it is
   given no places, and what it holds in some it holds for itself. */
static void leave(void) {
    now.field = 0;
    for (struct field *field = fields; field; field = field->next)
        if (taken(field)) part(field);
}

/* Replace torch's two calls; tell whether that is done. Called once tensors have been made, so that
   their addresses are there. What frees is replaced first: it may see what the other one gave. */
int64_t phalanx_place_hook(void) {
    struct tables tables = {0};
    if (allocate) return 1;
    dl_iterate_phdr(look_at, &tables);
    if (!tables.allocate || !tables.releases || tables.lazy) return 0;
    if (!release && pthread_atfork(0, 0, leave)) return 0;
    for (int i = 0; i < tables.releases; i++)
        if (*tables.release[i] != *tables.release[0]) return 0;
    if (!release) memcpy(&release, tables.release[0], sizeof release);
    for (int i = 0; i < tables.releases; i++)
        if (!replace(&tables, tables.release[i], (void *)take_back)) return 0;
    memcpy(&allocate, tables.allocate, sizeof allocate);
    if (replace(&tables, tables.allocate, (void *)give)) return 1;
    allocate = 0;
    return 0;
}

/* Map a file of so many bytes; return the field, or 0. */
int64_t phalanx_place_field(int64_t file, int64_t bytes, const int64_t *offsets,
                            const int64_t *sizes, int64_t count) {
    struct field *field = calloc(1, sizeof *field + (size_t)count * sizeof *field->places);
    void *base;
    if (!field) return 0;
    base = mmap(0, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, (int)file, 0);
    if (base == MAP_FAILED) {
        free(field);
        return 0;
    }
    field->base = base;
    field->bytes = bytes;
    field->count = count;
    field->next = fields;
    field->least = bytes;
    for (int64_t i = 0; i < count; i++) {
        field->places[i] = (struct place){offsets[i], sizes[i], 0};
        if (sizes[i] < field->least) field->least = sizes[i];
    }
    __atomic_store_n(&fields, field, __ATOMIC_RELEASE);
    return (int64_t)(uintptr_t)field;
}

int64_t phalanx_place_base(int64_t field) {
    return (int64_t)(uintptr_t)((struct field *)field)->base;
}

/* From now on what this thread asks for is given in its place. */
void phalanx_place_begin(int64_t field, const int32_t *order, int64_t ordered, int64_t *log,
                         int64_t room) {
    now.order = order;
    now.ordered = ordered;
    now.log = log;
    now.room = room;
    now.turn = 0;
    now.field = (struct field *)field;
}

/* No longer; return how many requests there were. */
int64_t phalanx_place_end(void) {
    now.field = 0;
    return now.turn;
}

/* How many places are in use. */
int64_t phalanx_place_taken(int64_t field) { return taken((const struct field *)field); }

/* Let the field have its bytes for itself; tell whether that could be. Whoever holds memory there
   keeps it, and what is written to the file from now on is not seen there. */
int64_t phalanx_place_part(int64_t field) { return part((struct field *)field); }
