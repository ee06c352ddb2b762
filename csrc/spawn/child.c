/* spawn/child.c: what a child does between clone and exec.
 *
 * The child may share its parent's memory until its exec (CLONE_VM), and the thread-local errno
 * with it. So everything here is raw system calls on data from before the clone. No libc wrapper
 * (it would write the parent's errno), no allocation, no lock, nothing from other files. See
 * signal-safety(7), and musl's posix_spawn for the same rule. */
#include "spawn/spawn.h"
#include "sys/lease.h"
#include "sys/raw.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/prctl.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#ifndef CLOSE_RANGE_UNSHARE
#define CLOSE_RANGE_UNSHARE 2
#endif

/* The kernel's own sigaction, not libc's: for SIG_DFL only the zeroes matter. */
struct kernel_sigaction {
    unsigned long handler, flags, restorer, mask;
};

/* A shell's codes for a program that does not exist or is not executable; 1 for an infini-run
 * error. */
_Noreturn static void child_fail(struct slot *slot, int step, long result) {
    int code = step != IR_STEP_EXEC ? 1 : result == -ENOENT ? 127 : 126;
    slot->error = (int)-result;
    slot->step = step;
    for (;;) (void)raw(SYS_exit_group, code, 0, 0, 0, 0);
}

/* First of all: the parent loses what the child closes of the shared table, and waits for that
 * (window.c). Where a sandbox refuses the one, the other copies all. */
static void child_leave_table(struct slot *slot) {
    long r = raw(SYS_close_range, slot->table_end, 0xffffffffL, CLOSE_RANGE_UNSHARE, 0, 0);
    if (r < 0) r = raw(SYS_unshare, CLONE_FILES, 0, 0, 0, 0);
    if (r < 0) child_fail(slot, IR_STEP_DESCRIPTORS, r);
    slot->shares_table = 0;
    (void)raw(SYS_futex, (long)&slot->shares_table, FUTEX_WAKE, 1, 0, 0);
}

static long child_write_file(const char *path, const char *text, size_t size) {
    long fd = raw(SYS_openat, AT_FDCWD, (long)path, O_WRONLY | O_CLOEXEC, 0, 0);
    if (fd < 0) return fd;
    long result = raw(SYS_write, fd, (long)text, (long)size, 0, 0);
    (void)raw(SYS_close, fd, 0, 0, 0, 0);
    return result < 0 ? result : 0;
}

/* A /proc that shows the new PID namespace, seen by nobody outside it (pid_namespaces(7)). */
static void child_isolate(struct slot *slot) {
    long r = 0;
    if (slot->uid_map != NULL) {
        (void)child_write_file("/proc/self/setgroups", "deny", 4); /* absent before Linux 3.19 */
        r = child_write_file("/proc/self/uid_map", slot->uid_map, slot->uid_map_size);
        if (r == 0) r = child_write_file("/proc/self/gid_map", slot->gid_map, slot->gid_map_size);
        if (r < 0) child_fail(slot, IR_STEP_USER_NAMESPACE, r);
    }
    r = raw(SYS_mount, (long)"none", (long)"/", 0, MS_REC | MS_PRIVATE, 0);
    if (r == 0)
        r = raw(SYS_mount, (long)"proc", (long)"/proc", (long)"proc",
                MS_NOSUID | MS_NODEV | MS_NOEXEC, 0);
    if (r < 0) child_fail(slot, IR_STEP_PROC, r);
}

/* In another PID namespace getppid says 0. There a pipe shows it, after the close of this copy of
 * its other end. A process closes its descriptors before it sends the parent-death signal. */
static bool child_is_orphan(struct slot *slot) {
    long parent = raw(SYS_getppid, 0, 0, 0, 0, 0);
    if (slot->lifeline[0] < 0) return parent != 0 && parent != slot->parent;
    const struct timespec now = {0, 0};
    struct pollfd lifeline = {slot->lifeline[0], 0, 0};
    (void)raw(SYS_close, slot->lifeline[1], 0, 0, 0, 0);
    return raw(SYS_ppoll, (long)&lifeline, 1, (long)&now, 0, 0) > 0;
}

/* The parent-death signal covers a SIGKILL of the launcher, if that did not come before the prctl. */
static void child_tie(struct slot *slot) {
    long r = raw(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (r < 0) child_fail(slot, IR_STEP_PARENT, r);
    if (child_is_orphan(slot))
        for (;;) (void)raw(SYS_exit_group, 128 + SIGKILL, 0, 0, 0, 0);
}

static void child_stdio(struct slot *slot) {
    for (int i = 0; i < 3; i++) {
        if (slot->stdio[i] == IR_FD_INHERIT) continue;
        long r = raw(SYS_dup3, slot->stdio[i], i, 0, 0, 0);
        if (r < 0) child_fail(slot, IR_STEP_STDIO, r);
    }
}

/* Handlers first, the mask last: no handler of the parent may ever run in shared memory. */
static void child_signals(struct slot *slot) {
    struct kernel_sigaction action = {0, 0, 0, 0};
    for (int sig = 1; sig <= 64; sig++) {
        if (!(slot->defaults & SIGNAL_BIT(sig))) continue;
        long r = raw(SYS_rt_sigaction, sig, (long)&action, 0, 8, 0);
        if (r < 0) child_fail(slot, IR_STEP_SIGNALS, r);
    }
    uint64_t mask = slot->blocked;
    long r = raw(SYS_rt_sigprocmask, SIG_SETMASK, (long)&mask, 0, 8, 0);
    if (r < 0) child_fail(slot, IR_STEP_SIGNALS, r);
}

/* Memory comes from beside the CPUs anyway while there is any. So a sandbox that refuses the
 * policy (Docker's default does) is an event only. `maxnode`: get_nodes() in mm/mempolicy.c
 * takes one off. */
static void child_place(struct slot *slot) {
    long r = raw(SYS_sched_setaffinity, 0, (long)slot->cpu_words * 8, (long)slot->cpus, 0, 0);
    if (r < 0) child_fail(slot, IR_STEP_AFFINITY, r);
    if (slot->nodes == NULL) return;
    long maxnode = (long)slot->node_words * 64 + 1;
    r = raw(SYS_set_mempolicy, slot->memory_policy, (long)slot->nodes, maxnode, 0, 0);
    if (r < 0) slot->memory_error = (int)-r;
}

/* By this number the guard finds this process group after a SIGKILL of the launcher. That could
 * come before the launcher wrote the number. A full pipe holds 16384 of them; the mark in their
 * environment still finds others. */
static void child_register(struct slot *slot) {
    pid_t self = (pid_t)raw(SYS_getpid, 0, 0, 0, 0, 0);
    long r = raw(SYS_write, slot->guard_fd, (long)&self, sizeof self, 0, 0);
    if (r < 0 && slot->lease != NULL) child_fail(slot, IR_STEP_LEASE, r);
}

/* After that: a child that the guard did not know of when it ended the launch finds that the launcher has gone. The
 * guard has a lock, too, but for reading. */
static void child_check_launcher(struct slot *slot) {
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET};
    long r = raw(SYS_fcntl, slot->guard_fd, F_GETLK, (long)&lock, 0, 0);
    if (r >= 0 && lock.l_type == F_UNLCK)
        for (;;) (void)raw(SYS_exit_group, 128 + SIGKILL, 0, 0, 0, 0);
}

/* As that: a child that the guard did not know of when it ended the lease finds the lease over. */
static void child_check_lease(struct slot *slot) {
    struct timespec now = {0, 0};
    long r = raw(SYS_clock_gettime, CLOCK_BOOTTIME, (long)&now, 0, 0, 0);
    if (r >= 0 && lease_deadline(slot->lease) <= (int64_t)now.tv_sec * 1000000000LL + now.tv_nsec)
        r = -ETIME;
    if (r < 0) child_fail(slot, IR_STEP_LEASE, r);
}

int child_main(void *argument) {
    struct slot *slot = argument;
    if (slot->table_end > 0) child_leave_table(slot);
    long r = slot->own_session ? raw(SYS_setsid, 0, 0, 0, 0, 0) : raw(SYS_setpgid, 0, 0, 0, 0, 0);
    if (r < 0) child_fail(slot, IR_STEP_GROUP, r);
    if (slot->flags & IR_WORKER_DIES_WITH_US) child_tie(slot);
    if (slot->flags & IR_WORKER_ISOLATE) child_isolate(slot);
    if (slot->cwd != NULL) {
        r = raw(SYS_chdir, (long)slot->cwd, 0, 0, 0, 0);
        if (r < 0) child_fail(slot, IR_STEP_CWD, r);
    }
    if (slot->terminal_fd >= 0) { /* this process blocks all signals: no SIGTTOU */
        pid_t self = (pid_t)raw(SYS_getpid, 0, 0, 0, 0, 0);
        r = raw(SYS_ioctl, slot->terminal_fd, TIOCSPGRP, (long)&self, 0, 0);
        if (r < 0) child_fail(slot, IR_STEP_TERMINAL, r);
    }
    child_stdio(slot);
    if (slot->nofile_hard != 0) {
        uint64_t limit[2] = {slot->nofile_soft, slot->nofile_hard};
        r = raw(SYS_prlimit64, 0, RLIMIT_NOFILE, (long)limit, 0, 0);
        if (r < 0) child_fail(slot, IR_STEP_LIMIT, r);
    }
    if (slot->cpus != NULL) child_place(slot);
    child_signals(slot);
    if (slot->guard_fd >= 0) child_register(slot);
    if (slot->guard_fd >= 0 && slot->guard_locked) child_check_launcher(slot);
    if (slot->lease != NULL) child_check_lease(slot);
    r = raw(SYS_execve, (long)slot->program, (long)slot->argv, (long)slot->envp, 0, 0);
    child_fail(slot, IR_STEP_EXEC, r);
}
