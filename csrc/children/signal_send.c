/* children/signal_send.c: signals to workers, through their pidfds (pidfd.c), which also name a
 * process group whose leader is gone. */
#include "group/group.h"

#include <errno.h>
#include <poll.h>
#include <unistd.h>

/* Until its exec a child shares this memory. A dump of core ends those who share it, too, before
 * Linux 5.16 (0258b5fd7c71 in its history): there the child gets TERM instead. */
static int harmless_until_exec(const struct ir_group *g, int sig) {
    const uint64_t dumping = SIGNAL_BIT(SIGQUIT) | SIGNAL_BIT(SIGILL) | SIGNAL_BIT(SIGTRAP) |
                             SIGNAL_BIT(SIGABRT) | SIGNAL_BIT(SIGBUS) | SIGNAL_BIT(SIGFPE) |
                             SIGNAL_BIT(SIGSEGV) | SIGNAL_BIT(SIGXCPU) | SIGNAL_BIT(SIGXFSZ) |
                             SIGNAL_BIT(SIGSYS);
    if (sig < 1 || !(dumping & SIGNAL_BIT(sig)) || (g->config.flags & IR_USE_FORK) ||
        kernel_is(5, 16))
        return sig;
    struct pollfd execs = {.fd = g->execs_fd,
                           .events = POLLIN}; /* its end: the last one has left */
    return g->execs_fd >= 0 && poll(&execs, 1, 0) == 0 ? SIGTERM : sig;
}

/* False: see -ENOSYS of child_signal_group. */
bool worker_signal_group(const struct ir_group *g, const struct worker *w, int sig) {
    if (w->pid == 0) return true;
    if (w->reaped && w->pidfd < 0)
        return true; /* the search after the end of all workers finds the rest of it */
    int r = child_signal_group(g, w->pid, w->pidfd, w->reaped, sig);
    /* a leader that went to another group, maybe just now, still takes signals */
    if (!w->reaped && (r < 0 || getpgid(w->pid) != w->pid))
        (void)child_signal(g, w->pid, w->pidfd, sig);
    return r != -ENOSYS;
}

/* A stop of the group after one of its part: many programs take a second request for "at once". */
static bool has_signal(const struct worker *w, int sig) {
    return sig != 0 && sig != SIGKILL && w->part_signal == sig;
}

void group_signal_groups(struct ir_group *g, int sig) {
    bool all = true;
    sig = harmless_until_exec(g, sig);
    for (uint32_t i = 0; i < g->started; i++)
        if (!has_signal(&g->workers[i], sig)) all &= worker_signal_group(g, &g->workers[i], sig);
    if (!all) stray_signal_groups(g, sig);
}

/* Not those that would only stop again. */
void group_continue(struct ir_group *g) {
    bool all = true;
    for (uint32_t i = 0; i < g->started; i++)
        if (g->workers[i].asks == 0) all &= worker_signal_group(g, &g->workers[i], SIGCONT);
    if (!all) stray_signal_groups(g, SIGCONT);
}

void ir_group_signal_groups(struct ir_group *g, int sig) {
    if (g == NULL) return;
    group_signal_groups(g, sig);
}

int group_signal_leaders(struct ir_group *g, int sig) {
    int reached = 0;
    sig = harmless_until_exec(g, sig);
    for (uint32_t i = 0; i < g->started; i++) {
        const struct worker *w = &g->workers[i];
        if (w->pid == 0 || w->reaped || has_signal(w, sig)) continue;
        if (child_signal(g, w->pid, w->pidfd, sig) == 0) reached++;
    }
    return reached;
}

int ir_group_signal(struct ir_group *g, int worker, int sig) {
    if (g == NULL) return -ESRCH;
    if (sig < 0 || sig > SIGRTMAX || worker >= (int)g->n) return -EINVAL;
    if (worker < 0) return group_signal_leaders(g, sig);
    const struct worker *w = &g->workers[worker];
    if (w->pid == 0 || w->reaped) return -ESRCH;
    int r = child_signal(g, w->pid, w->pidfd, harmless_until_exec(g, sig));
    return r < 0 ? r : 1;
}
