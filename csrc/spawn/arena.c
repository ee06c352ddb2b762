/* spawn/arena.c: the memory that children read between clone and exec: slots, strings, stacks.
 *
 * One mapping per spawn, filled before the first clone and given back when the last child has left.
 * It has copies of all of the caller's strings, so no child reads the caller's memory after the spawn. */
#include "group/group.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* set_mempolicy(2); of several nodes only from Linux 5.15 on */
enum { PREFER_ONE = 1, PREFER_MANY = 5 };

struct arena {
    uint64_t *masks;
    char **pointers;
    char *strings;
};

static size_t list_length(const char *const *list) {
    size_t n = 0;
    while (list[n] != NULL) n++;
    return n;
}

static size_t list_bytes(const char *const *list) {
    size_t bytes = 0;
    for (size_t i = 0; list[i] != NULL; i++) bytes += strlen(list[i]) + 1;
    return bytes;
}

static size_t env_bytes(const struct ir_worker *worker) {
    const char *end = worker->env;
    for (uint32_t i = 0; i < worker->env_count; i++) end += strlen(end) + 1;
    return (size_t)(end - worker->env);
}

static char *arena_string(struct arena *arena, const char *string) {
    size_t size = strlen(string) + 1;
    char *copy = memcpy(arena->strings, string, size);
    arena->strings += size;
    return copy;
}

static uint64_t *arena_mask(struct arena *arena, const uint64_t *mask, uint32_t words) {
    if (mask == NULL) return NULL;
    uint64_t *copy = memcpy(arena->masks, mask, words * sizeof *mask);
    arena->masks += words;
    return copy;
}

static char **arena_list(struct arena *arena, const char *const *list) {
    char **copy = arena->pointers;
    for (size_t i = 0; list[i] != NULL; i++) *arena->pointers++ = arena_string(arena, list[i]);
    *arena->pointers++ = NULL;
    return copy;
}

/* The base environment's strings are here once; each worker has its own pointers to them. */
static char **arena_env(struct arena *arena, char *const *base, const struct ir_worker *worker) {
    char **copy = arena->pointers;
    while (*base != NULL) *arena->pointers++ = *base++;
    const char *string = worker->env;
    for (uint32_t i = 0; i < worker->env_count; i++) {
        *arena->pointers++ = arena_string(arena, string);
        string += strlen(string) + 1;
    }
    *arena->pointers++ = NULL;
    return copy;
}

static int arena_new(struct ir_group *g, const struct ir_worker *workers, uint32_t n,
                     const char *const *guard_argv, struct arena *ret_arena) {
    size_t base = n > 0 ? list_length(workers[0].base_env) + 1 : 0;
    size_t pointers = base;
    size_t strings = n > 0 ? list_bytes(workers[0].base_env) : 0;
    size_t masks = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (workers[i].base_env != workers[0].base_env) return -EINVAL;
        pointers += list_length(workers[i].argv) + 1 + base + workers[i].env_count;
        strings +=
            list_bytes(workers[i].argv) + env_bytes(&workers[i]) + strlen(workers[i].program) + 1;
        if (workers[i].cwd != NULL) strings += strlen(workers[i].cwd) + 1;
        masks += (size_t)workers[i].cpu_words + workers[i].node_words;
    }
    strings += 128;                          /* the maps of a user namespace */
    pointers += list_length(guard_argv) + 2; /* the guard comes after the workers */
    strings +=
        list_bytes(guard_argv) + (g->guard.program != NULL ? strlen(g->guard.program) + 1 : 0);
    size_t slots = (n + 1) * sizeof(struct slot);
    size_t head = slots + masks * sizeof(uint64_t) + pointers * sizeof(char *) + strings;
    head = (head + 4095) & ~(size_t)4095;
    g->arena_size = head + (size_t)(n + 1) * STACK_SIZE;
    /* after a fork the child's failure must reach the parent; what clone(CLONE_VM) shares need
     * not be */
    int sharing = (g->config.flags & IR_USE_FORK) ? MAP_SHARED : MAP_PRIVATE;
    void *memory = mmap(NULL, g->arena_size, PROT_READ | PROT_WRITE,
                        sharing | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return -ENOMEM;
    g->arena = memory;
    g->slots = memory;
    ret_arena->masks = (uint64_t *)(void *)((char *)memory + slots);
    ret_arena->pointers = (char **)(void *)(ret_arena->masks + masks);
    ret_arena->strings = (char *)(ret_arena->pointers + pointers);
    return 0;
}

void arena_free(struct ir_group *g) {
    if (g->arena != NULL) (void)munmap(g->arena, g->arena_size);
    g->arena = NULL;
    g->slots = NULL;
}

/* Handlers must not run in a child that shares this memory. SIGPIPE and SIGXFSZ are what Python
 * ignores for itself, and SIGCHLD ignored would be a trap for the worker as it was for the
 * launcher. A pane of tmux ignores what reports a worker that asks for the terminal: its read
 * would fail with EIO. */
static uint64_t signals_to_default(const struct ir_group *g) {
    uint64_t defaults = SIGNAL_BIT(SIGPIPE) | SIGNAL_BIT(SIGXFSZ) | SIGNAL_BIT(SIGCHLD);
    if (g->config.flags & IR_SHARES_TERMINAL) defaults |= SIGNAL_BIT(SIGTTIN) | SIGNAL_BIT(SIGTTOU);
    for (int sig = 1; sig <= SIGRTMAX; sig++) {
        struct sigaction action;
        if (sigaction(sig, NULL, &action) < 0) continue;
        if (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN)
            defaults |= SIGNAL_BIT(sig);
    }
    return defaults;
}

static void slot_place(struct slot *slot, struct arena *arena, const struct ir_worker *worker) {
    int nodes = 0;
    for (uint32_t i = 0; i < worker->node_words; i++)
        nodes += __builtin_popcountll(worker->nodes[i]);
    slot->cpus = arena_mask(arena, worker->cpus, worker->cpu_words);
    slot->nodes = arena_mask(arena, worker->nodes, worker->node_words);
    slot->cpu_words = worker->cpu_words;
    slot->node_words = worker->node_words;
    slot->memory_policy = nodes == 1 ? PREFER_ONE : PREFER_MANY;
}

static void slots_fill(struct ir_group *g, const struct ir_worker *workers, uint32_t n,
                       struct arena *arena, uint64_t blocked, int terminal_fd) {
    char **base = n > 0 ? arena_list(arena, workers[0].base_env) : NULL;
    uint64_t defaults = signals_to_default(g);
    char **argv = NULL;
    for (uint32_t i = 0; i < n; i++) {
        const struct ir_worker *worker = &workers[i];
        struct slot *slot = &g->slots[i];
        if (i == 0 || worker->argv != workers[i - 1].argv) argv = arena_list(arena, worker->argv);
        *slot = (struct slot){
            .program = arena_string(arena, worker->program),
            .argv = argv,
            .envp = arena_env(arena, base, worker),
            .cwd = worker->cwd != NULL ? arena_string(arena, worker->cwd) : NULL,
            .blocked =
                (g->config.flags & (IR_OWN_PROCESS | IR_GIVEN_MASK)) ? g->config.blocked : blocked,
            .defaults = defaults,
            .nofile_soft = g->config.entry.nofile_soft,
            .nofile_hard = g->config.entry.nofile_hard,
            .parent = g->self,
            .stdio = {worker->stdio[0], worker->stdio[1], worker->stdio[2]},
            .terminal_fd = (worker->flags & IR_WORKER_FOREGROUND) ? terminal_fd : -1,
            .lifeline = {(worker->flags & IR_WORKER_ISOLATE) ? g->lifeline[0] : -1, g->lifeline[1]},
            .flags = worker->flags,
            .lease = g->lease.deadline_ns,
            /* in a new PID namespace it does not know the pid that the guard sees */
            .guard_fd = (worker->flags & IR_WORKER_ISOLATE) ? -1 : g->guard.pipe[1],
            .guard_locked = g->guard.locked,
        };
        slot_place(slot, arena, worker);
    }
}

/* No signal ends it but SIGKILL, and nothing in its environment makes it one of the launch. */
static void slot_fill_guard(struct ir_group *g, struct arena *arena, const char *const *argv) {
    struct slot *slot = &g->slots[g->n];
    const bool leased = g->lease.deadline_ns != NULL;
    *slot = (struct slot){
        .program = arena_string(arena, g->guard.program),
        .argv = arena_list(arena, argv),
        .envp = arena->pointers,
        .blocked = ~UINT64_C(0),
        .parent = g->self,
        .stdio = {g->guard.pipe[0], leased ? g->lease.pipe[1] : IR_FD_INHERIT,
                  leased ? g->lease.fd : IR_FD_INHERIT},
        .terminal_fd = -1,
        .guard_fd = -1,
        .lifeline = {-1, -1},
        .own_session = true,
    };
    *arena->pointers++ = NULL;
}

static void slot_add_user_namespace(struct slot *slot, struct arena *arena) {
    char map[64];
    (void)snprintf(map, sizeof map, "%u %u 1", (unsigned)geteuid(), (unsigned)geteuid());
    slot->uid_map = arena_string(arena, map);
    slot->uid_map_size = strlen(map);
    (void)snprintf(map, sizeof map, "%u %u 1", (unsigned)getegid(), (unsigned)getegid());
    slot->gid_map = arena_string(arena, map);
    slot->gid_map_size = strlen(map);
}

/* blocked: the mask of signals that the caller had; guard_argv: of the guard, or empty; terminal_fd: whose
 * foreground a worker may have, -1: none. */
int arena_fill(struct ir_group *g, const struct ir_worker *workers, uint32_t n, uint64_t blocked,
               const char *const *guard_argv, int terminal_fd) {
    struct arena arena = {0};
    int r = arena_new(g, workers, n, guard_argv, &arena);
    if (r < 0) return r;
    slots_fill(g, workers, n, &arena, blocked, terminal_fd);
    for (uint32_t i = 0; i < n; i++)
        if ((workers[i].flags & IR_WORKER_ISOLATE) && geteuid() != 0)
            slot_add_user_namespace(&g->slots[i], &arena);
    if (g->guard.program != NULL) slot_fill_guard(g, &arena, guard_argv);
    return 0;
}

/* Stacks grow down; each child's begins where the next one's ends. */
void *arena_stack(const struct ir_group *g, uint32_t index) {
    return (char *)g->arena + g->arena_size - (size_t)index * STACK_SIZE;
}

/* Before the first child: a plain fork follows after all, so what it leaves must reach the
 * parent. This replaces the mapping in place, and every pointer into it stays true. */
int arena_share(struct ir_group *g) {
    void *copy = malloc(g->arena_size);
    if (copy == NULL) return -ENOMEM;
    memcpy(copy, g->arena, g->arena_size);
    void *memory = mmap(g->arena, g->arena_size, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    int r = memory == MAP_FAILED ? -errno : 0;
    if (r == 0) memcpy(memory, copy, g->arena_size);
    free(copy);
    return r;
}
