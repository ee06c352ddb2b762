/* children/terminal.c: the terminal's foreground and Ctrl-Z.
 *
 * Workers are in process groups of their own. A single worker gets the terminal's foreground, as a
 * shell's job would, but only if it is ours to give: started in the background we take nothing.
 * All signals are blocked here, so tcsetpgrp from the background raises no SIGTTOU. */
#include "group/group.h"

#include <errno.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

int tty_prepare(struct ir_group *g) {
    if (g->terminal_fd >= 0 || !isatty(0)) return 0;
    int fd = fd_duplicate(0);
    if (fd < 0) return fd;
    g->terminal_fd = fd;
    return 0;
}

bool tty_is_ours(const struct ir_group *g) {
    return g->terminal_fd >= 0 && tcgetpgrp(g->terminal_fd) == getpgrp();
}

void tty_hand_over(struct ir_group *g) {
    if (tty_is_ours(g) && g->started > 0 && !g->workers[0].reaped)
        (void)tcsetpgrp(g->terminal_fd, g->workers[0].pid);
}

/* Only from our own worker: the foreground may be the shell's again, or another job's. */
void tty_restore(struct ir_group *g) {
    if (g->terminal_fd >= 0 && g->started > 0 && tcgetpgrp(g->terminal_fd) == g->workers[0].pid)
        (void)tcsetpgrp(g->terminal_fd, getpgrp());
}

static bool tty_belongs_to_worker(const struct ir_group *g) {
    return g->started > 0 && tcgetpgrp(g->terminal_fd) == g->workers[0].pid;
}

/* Process 1 of a PID namespace is stopped from outside only (pid_namespaces(7)). SIGCONT will come from
 * there, too, and continue the workers. */
static bool stop_is_asked_for(const struct ir_group *g) {
    return g->config.suspend_write_fd >= 0 && write(g->config.suspend_write_fd, "z", 1) == 1;
}

/* Stops ourselves the way an unblocked SIGTSTP would: the kernel knows about orphaned process
 * groups, which nobody could continue, and drops it there. Returns when we are continued. */
static bool stop_self(void) {
    sigset_t only, before, pending;
    (void)sigemptyset(&only);
    (void)sigaddset(&only, SIGTSTP);
    (void)kill(getpid(), SIGTSTP);
    (void)pthread_sigmask(SIG_UNBLOCK, &only, &before);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return sigpending(&pending) == 0 && sigismember(&pending, SIGCONT) == 1;
}

void tty_suspend(struct ir_group *g) {
    group_signal_groups(g, SIGSTOP);
    tty_restore(g);
    if (stop_is_asked_for(g)) return;
    bool stopped = stop_self();
    tty_hand_over(g);
    if (!stopped && g->terminal_fd >= 0 && !tty_belongs_to_worker(g))
        return; /* it would only stop again */
    group_signal_groups(g, SIGCONT);
}

void ir_group_suspend(struct ir_group *g) {
    if (g == NULL) return;
    tty_suspend(g);
}

/* Our worker is a launcher, too: it has stopped what it started and asks for the same. */
void tty_asked(struct ir_group *g) {
    char byte;
    if (read(g->config.suspend_read_fd, &byte, 1) == 1) tty_suspend(g);
    else fd_unwatch(g, g->config.suspend_read_fd);
}

/* Ctrl-Z reaches only the worker that has the foreground: we follow it, so that the shell sees. */
void tty_check_stopped(struct ir_group *g) {
    if (g->terminal_fd < 0 || g->started == 0 || g->workers[0].reaped) return;
    siginfo_t info = {0};
    if (waitid(P_PID, (id_t)g->workers[0].pid, &info, WSTOPPED | WNOHANG) < 0) return;
    if (info.si_pid == 0 || info.si_code != CLD_STOPPED || info.si_status == SIGSTOP) return;
    tty_suspend(g);
}
