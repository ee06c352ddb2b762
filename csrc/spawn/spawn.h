/* spawn/spawn.h: from the arena to the exec */
#ifndef SPAWN_SPAWN_H
#define SPAWN_SPAWN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "include/irun.h"
#include "sys/sys.h"

struct ir_group;

/* The child's code is raw system calls on these two; elsewhere, and under a sanitizer that keeps
 * shadow state per address space, a plain fork. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
    __has_feature(memory_sanitizer)
#define HAS_SANITIZER 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define HAS_SANITIZER 1
#endif
#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(HAS_SANITIZER)
#define CAN_SHARE_MEMORY true
#else
#define CAN_SHARE_MEMORY false
#endif

#if defined(__x86_64__) || defined(__aarch64__) /* clone3 is a raw call: libc has no wrapper */
#define CAN_BE_BORN_INTO_CGROUP true
#else
#define CAN_BE_BORN_INTO_CGROUP false
#endif

#define STACK_SIZE 16384u /* a child's, until its exec */

/* ---- child.c: everything a child needs, and where it leaves its failure */
struct slot {
    const char *program;
    char *const *argv;
    char *const *envp;
    const char *cwd;
    const char *uid_map; /* NULL: no user namespace */
    const char *gid_map;
    size_t uid_map_size, gid_map_size;
    uint64_t blocked;    /* the mask it gets */
    uint64_t defaults;   /* signals put back to default */
    uint64_t nofile_soft, nofile_hard; /* 0, 0: left alone */
    const uint64_t *cpus; /* NULL: set neither these nor nodes */
    const uint64_t *nodes;
    uint32_t cpu_words, node_words;
    int memory_policy;
    pid_t parent;
    int stdio[3];        /* >= 3, or IR_FD_INHERIT */
    int terminal_fd;     /* -1: the foreground stays */
    int lifeline[2];     /* a pipe of which only the launcher keeps the other end; -1: none */
    uint32_t flags;      /* ir_worker.flags */
    int64_t *lease;      /* sys/lease.h; NULL: none */
    int guard_fd;        /* where it sends the guard its pid before it executes anything; -1: it does not */
    bool guard_locked;   /* the launcher has a lock on that, as long as it is what it was */
    bool own_session;    /* a new session, not only a process group */
    int table_end;       /* its own table has no descriptor from this one on; 0: as in the launcher (window.c) */
    volatile uint32_t shares_table; /* 1: from its clone on, until it has that table, or ends */
    volatile int memory_error; /* out: of the memory policy, without which it continues */
    volatile int step;   /* out: what failed, and why */
    volatile int error;
};
int child_main(void *slot);

/* ---- window.c: what children have of the launcher's descriptors */
#define WINDOW_RANKS 16u
#define WINDOW_PLACES (3 * WINDOW_RANKS + 1)
struct window {
    int end;                   /* nothing that a child needs is here or above; 0: there is no window */
    uint32_t taken;
    int places[WINDOW_PLACES]; /* stdio of each rank, and one for all */
};

/* ---- cgroup.c: the folder of this launch, with a leaf for each worker */
struct cgroup {
    char *path;      /* NULL: none */
    int fd;
    uint32_t leaves;
};

/* arena.c */
int arena_fill(struct ir_group *g, const struct ir_worker *workers, uint32_t n, uint64_t blocked,
               const char *const *guard_argv, int terminal_fd);
void *arena_stack(const struct ir_group *g, uint32_t index);
int arena_share(struct ir_group *g);
void arena_free(struct ir_group *g);

/* clone.c */
pid_t child_create(struct ir_group *g, struct slot *slot, uint32_t index, int *ret_pidfd);

/* window.c */
void window_open(struct ir_group *g);
void window_close(struct ir_group *g);
int window_lay(const struct ir_group *g, int fd);
int window_use(struct ir_group *g, uint32_t index);
int window_await_all(const struct ir_group *g);

/* cgroup.c */
int cgroup_open(struct ir_group *g, uint32_t n);
int cgroup_leaf(const struct ir_group *g, uint32_t index);
void cgroup_kill(const struct ir_group *g);
void cgroup_kill_leaf(const struct ir_group *g, uint32_t index);
void cgroup_mark_leaf(const struct ir_group *g, uint32_t index, struct processes *all);
void cgroup_mark(const struct ir_group *g, struct processes *all);
void cgroup_close(struct ir_group *g);

#endif
