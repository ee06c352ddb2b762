/* spawn/clone.c: one process, in the best way that the kernel, or a sandbox, allows.
 *
 * clone3 into a cgroup; clone, with shared memory until the exec; a fork. After one refusal,
 * there is no second try. */
#include "group/group.h"

#include <errno.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef CLONE_PIDFD
#define CLONE_PIDFD 0x1000
#endif
#ifndef SYS_clone3
#define SYS_clone3 435
#endif
#define INTO_CGROUP UINT64_C(0x200000000) /* CLONE_INTO_CGROUP, Linux 5.7 */

/* clone3(2), for what clone(2) cannot do: CLONE_INTO_CGROUP. */
struct clone3_args {
    uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid,
        set_tid_size, cgroup;
};

/* The child begins with its parent's registers on a separate stack, or after a fork on a copy of
 * the parent's. */
static long clone3_call(const struct clone3_args *args, struct slot *slot) {
#if defined(__x86_64__)
    long result;
    register void *r12 __asm__("r12") = slot;
    register int (*r13)(void *) __asm__("r13") = child_main;
    __asm__ volatile("syscall\n"
                     "test %%rax, %%rax\n"
                     "jnz 1f\n"
                     "xor %%ebp, %%ebp\n"
                     "mov %%r12, %%rdi\n"
                     "call *%%r13\n"
                     "1:"
                     : "=a"(result)
                     : "a"((long)SYS_clone3), "D"(args), "S"(sizeof *args), "r"(r12), "r"(r13)
                     : "rcx", "r11", "memory");
    return result;
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = SYS_clone3;
    register long x0 __asm__("x0") = (long)args;
    register long x1 __asm__("x1") = sizeof *args;
    register void *x19 __asm__("x19") = slot;
    register int (*x20)(void *) __asm__("x20") = child_main;
    __asm__ volatile("svc 0\n"
                     "cbnz x0, 1f\n"
                     "mov x29, xzr\n"
                     "mov x0, x19\n"
                     "blr x20\n"
                     "1:"
                     : "+r"(x0)
                     : "r"(x8), "r"(x1), "r"(x19), "r"(x20)
                     : "memory", "x30");
    return x0;
#else
    (void)args, (void)slot;
    return -ENOSYS;
#endif
}

/* The kernel clears the word when the child leaves this memory; the child does so itself before
 * (window.c). */
static unsigned table_flags(const struct slot *slot) {
    return slot->shares_table ? CLONE_FILES | CLONE_CHILD_CLEARTID : 0;
}

static pid_t child_bear(const struct ir_group *g, struct slot *slot, uint32_t index, int leaf,
                        int *ret_pidfd) {
    struct clone3_args args = {
        .flags = CLONE_PIDFD | INTO_CGROUP,
        .pidfd = (uint64_t)(uintptr_t)ret_pidfd,
        .exit_signal = SIGCHLD,
        .cgroup = (uint64_t)leaf,
    };
    if (!(g->config.flags & IR_USE_FORK)) {
        args.flags |= CLONE_VM;
        args.stack = (uint64_t)(uintptr_t)arena_stack(g, index) - STACK_SIZE;
        args.stack_size = STACK_SIZE;
        args.flags |= table_flags(slot);
        args.child_tid = (uint64_t)(uintptr_t)&slot->shares_table;
    }
    pid_t pid = (pid_t)clone3_call(&args, slot);
    if (pid >= 0) *ret_pidfd = fd_above_stdio(*ret_pidfd);
    return pid;
}

static pid_t child_clone(struct ir_group *g, struct slot *slot, uint32_t index, int *ret_pidfd) {
    int flags = SIGCHLD;
    if (!(g->config.flags & IR_NO_PIDFD) && !g->no_clone_pidfd) flags |= CLONE_PIDFD;
    if (slot->flags & IR_WORKER_ISOLATE)
        flags |= CLONE_NEWPID | CLONE_NEWNS | (slot->uid_map != NULL ? CLONE_NEWUSER : 0);
    int leaf = (slot->flags & IR_WORKER_ISOLATE) ? -1 : cgroup_leaf(g, index);
    if (leaf >= 0) {
        pid_t born = child_bear(g, slot, index, leaf, ret_pidfd);
        (void)close(leaf);
        bool refused = born == -ENOSYS || born == -EPERM || born == -EINVAL ||
                       born == -EOPNOTSUPP || born == -EBUSY;
        if (!refused || g->started > g->held) return born;
        cgroup_close(
            g); /* a sandbox without clone3, a cgroup that takes no processes: without, then */
    }
    *ret_pidfd = -1; /* and so it stays before Linux 5.2, which ignores CLONE_PIDFD */
    pid_t pid;
    if (g->config.flags & IR_USE_FORK) {
        pid = (pid_t)syscall(SYS_clone, (long)flags, NULL, ret_pidfd, NULL, NULL);
        if (pid == 0) (void)child_main(slot);
    } else {
        flags |= CLONE_VM | (int)table_flags(slot);
        pid = clone(child_main, arena_stack(g, index), flags, slot, ret_pidfd, NULL,
                    &slot->shares_table);
    }
    if (pid < 0) return -errno;
    *ret_pidfd = fd_above_stdio(*ret_pidfd);
    return pid;
}

/* A sandbox or an emulator may refuse a flag that the kernel knows: then without it, then a fork. */
pid_t child_create(struct ir_group *g, struct slot *slot, uint32_t index, int *ret_pidfd) {
    pid_t pid = child_clone(g, slot, index, ret_pidfd);
    bool refused = pid == -EINVAL || pid == -EPERM || pid == -ENOSYS;
    bool is_first = g->started == g->held && g->guard.pid == 0;
    if (!refused || !is_first || (slot->flags & IR_WORKER_ISOLATE)) return pid;
    g->no_clone_pidfd = true;
    pid = child_clone(g, slot, index, ret_pidfd);
    if (pid >= 0 || (g->config.flags & IR_USE_FORK)) return pid;
    int r = arena_share(g);
    if (r < 0) return r;
    g->config.flags |= IR_USE_FORK;
    return child_clone(g, slot, index, ret_pidfd);
}
