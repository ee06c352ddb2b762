/* sys/pidfd.c: a child, as itself and not as a number, for waits and signals.
 *
 * A host program may reap the core's children (waitpid(-1) in a thread, SIGCHLD ignored), and
 * their numbers may be another process's by the time of their use. A pidfd names one process for
 * ever: signals go through it (Linux 5.1), its process group's too (6.9), and a wait can reap by
 * it (5.4). Before that the core uses a number only while it is that of a child which nobody has
 * reaped. An own process reaps its children itself, so there a number is a child's until then. */
#include "group/group.h"

#include <errno.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif
#define TO_GROUP 4u /* PIDFD_SIGNAL_PROCESS_GROUP, Linux 6.9 */

int pidfd_open_of(const struct ir_group *g, pid_t pid) {
    if (g->config.flags & IR_NO_PIDFD) return -ENOSYS;
    long fd = syscall(SYS_pidfd_open, pid, 0);
    return fd < 0 ? -errno : fd_above_stdio((int)fd);
}

/* The system call, not libc's waitid: it also gives the resource usage, as wait4 does. */
int child_wait(int type, pid_t pid, siginfo_t *ret_info, int options, struct rusage *ret_usage) {
    for (;;) {
        memset(ret_info, 0, sizeof *ret_info);
        if (syscall(SYS_waitid, type, pid, ret_info, options, ret_usage) >= 0) return 0;
        if (errno != EINTR) return -errno;
    }
}

/* child_wait for one child; -ECHILD: somebody else has reaped it. pidfd: -1 where there is none. */
int child_reap(const struct ir_group *g, pid_t pid, int pidfd, siginfo_t *ret_info, int options,
               struct rusage *ret_usage) {
    int r = -EINVAL;
    if (pidfd >= 0 && !(g->config.flags & IR_OLD_PIDFD))
        r = child_wait(BY_PIDFD, pidfd, ret_info, options, ret_usage);
    return r == -EINVAL ? child_wait(P_PID, pid, ret_info, options, ret_usage) : r;
}

/* Whether the number is still the child's: it is until somebody reaps it. */
bool child_is_ours(const struct ir_group *g, pid_t pid, int pidfd) {
    siginfo_t info;
    if (g->config.flags & IR_OWN_PROCESS) return true;
    return child_reap(g, pid, pidfd, &info, WEXITED | WNOHANG | WNOWAIT, NULL) == 0;
}

int pidfd_send(int pidfd, int sig, unsigned flags) {
    return syscall(SYS_pidfd_send_signal, pidfd, sig, NULL, flags) < 0 ? -errno : 0;
}

/* 0, or -errno: -ESRCH where it is gone. A sandbox may know no pidfd_send_signal. */
int child_signal(const struct ir_group *g, pid_t pid, int pidfd, int sig) {
    int r = pidfd < 0 ? -ENOSYS : pidfd_send(pidfd, sig, 0);
    if (r == 0 || r == -ESRCH || r == -EINVAL) return r; /* -EINVAL: there is no such signal */
    if (!child_is_ours(g, pid, pidfd)) return -ESRCH;
    return kill(pid, sig) < 0 ? -errno : 0;
}

/* To the process group that a child leads, or led until its reaping; 0, or -errno. -ESRCH: it is
 * gone. -ENOSYS: the kernel does not find it through the pidfd, and its number may be another's;
 * only single members are certain. */
int child_signal_group(const struct ir_group *g, pid_t pid, int pidfd, bool reaped, int sig) {
    if (pidfd >= 0 && !(g->config.flags & IR_OLD_PIDFD)) {
        int r = pidfd_send(pidfd, sig, TO_GROUP);
        if (r == 0 || r == -ESRCH) return r;
    }
    if (reaped || !child_is_ours(g, pid, pidfd)) return -ENOSYS;
    return kill(-pid, sig) < 0 ? -errno : 0;
}
