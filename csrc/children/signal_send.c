/* children/signal_send.c: signals to workers, through their pidfds (pidfd.c), which also name a process group whose leader
 * has ended. */
#include "group/group.h"

#include <errno.h>
#include <poll.h>
#include <unistd.h>

/* Before Linux 5.16 a signal that dumps core also kills everything that shares the memory, and until
 * its exec a child shares ours: it gets TERM instead. */
static int harmless_until_exec(const struct ir_group *g, int sig) {
    const uint64_t dumping = SIGNAL_BIT(SIGQUIT) | SIGNAL_BIT(SIGILL) | SIGNAL_BIT(SIGTRAP) |
                             SIGNAL_BIT(SIGABRT) | SIGNAL_BIT(SIGBUS) | SIGNAL_BIT(SIGFPE) |
                             SIGNAL_BIT(SIGSEGV) | SIGNAL_BIT(SIGXCPU) | SIGNAL_BIT(SIGXFSZ) |
                             SIGNAL_BIT(SIGSYS);
    if (sig < 1 || !(dumping & SIGNAL_BIT(sig)) || (g->config.flags & IR_USE_FORK)) return sig;
    struct pollfd execs = {.fd = g->execs_fd,
                           .events = POLLIN}; /* its end: the last one has left */
    return g->execs_fd >= 0 && poll(&execs, 1, 0) == 0 ? SIGTERM : sig;
}

/* False: see child_signal_group. */
static bool worker_signal_group(const struct ir_group *g, const struct worker *w, int sig) {
    if (w->pid == 0) return true;
    if (w->reaped && w->pidfd < 0)
        return true; /* what is left of it is found when all workers have ended */
    /* a leader that went to another group is still ours to signal */
    if (!w->reaped && getpgid(w->pid) != w->pid) (void)child_signal(g, w->pid, w->pidfd, sig);
    return child_signal_group(g, w->pid, w->pidfd, w->reaped, sig);
}

void group_signal_groups(struct ir_group *g, int sig) {
    bool all = true;
    sig = harmless_until_exec(g, sig);
    for (uint32_t i = 0; i < g->started; i++) all &= worker_signal_group(g, &g->workers[i], sig);
    if (!all) stray_signal_groups(g, sig);
}

void ir_group_signal_groups(struct ir_group *g, int sig) {
    group_signal_groups(g, sig);
}

int group_signal_leaders(struct ir_group *g, int sig) {
    int reached = 0;
    sig = harmless_until_exec(g, sig);
    for (uint32_t i = 0; i < g->started; i++) {
        const struct worker *w = &g->workers[i];
        if (w->pid != 0 && !w->reaped && child_signal(g, w->pid, w->pidfd, sig) == 0) reached++;
    }
    return reached;
}

int ir_group_signal(struct ir_group *g, int worker, int sig) {
    if (sig < 0 || sig > SIGRTMAX || worker >= (int)g->n) return -EINVAL;
    if (worker < 0) return group_signal_leaders(g, sig);
    const struct worker *w = &g->workers[worker];
    if (w->pid == 0 || w->reaped) return -ESRCH;
    int r = child_signal(g, w->pid, w->pidfd, harmless_until_exec(g, sig));
    return r < 0 ? r : 1;
}
