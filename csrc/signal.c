/* signal.c: signals of an own process, and signals to workers.
 *
 * All signals are blocked and read from one signalfd, so that none is lost and none has a handler.
 * Workers are signalled through their pidfds (pidfd.c), which also name a process group whose leader has ended. */
#include "core.h"

#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <unistd.h>

enum policy {
    PASS, /* to each worker's leader: a trainer asked for it, its helpers would die of it */
    PASS_TO_GROUP, /* what a terminal sends to a whole job */
    STOPS,         /* ends the job: a request, or a fault signal from outside */
    SUSPENDS,
    REAPS,
    DROPPED, /* the kernel's answer to something that we did */
};

static enum policy policy_of(const struct ir_group *g, int sig) {
    if (sig == SIGCHLD) return REAPS;
    if (sig <= 64 && (g->config.entry.ignored & SIGNAL_BIT(sig))) return DROPPED;
    switch (sig) {
    case SIGTERM:
    case SIGINT:
    case SIGQUIT:
    case SIGILL:
    case SIGTRAP:
    case SIGABRT:
    case SIGBUS:
    case SIGFPE:
    case SIGSEGV:
    case SIGSYS: return STOPS;
    case SIGTSTP: return SUSPENDS;
    case SIGPIPE:
    case SIGTTIN:
    case SIGTTOU: return DROPPED;
    case SIGHUP:
    case SIGWINCH:
    case SIGCONT: return PASS_TO_GROUP;
    default: return PASS;
    }
}

int signal_open(struct ir_group *g) {
    sigset_t all;
    (void)sigfillset(&all);
    g->signal_fd = fd_new(signalfd(-1, &all, SFD_CLOEXEC | SFD_NONBLOCK));
    if (g->signal_fd < 0) return g->signal_fd;
    return fd_watch(g, g->signal_fd, EPOLLIN, WATCH_SIGNALS, 0);
}

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

/* timeout(1) sends a signal to the process, and then to its group. A terminal's signals are the kernel's. */
static bool is_echo(const struct ir_group *g, const struct signalfd_siginfo *info) {
    return g->heard_ns != 0 && info->ssi_code != SI_KERNEL &&
           info->ssi_signo == g->told_by.ssi_signo && info->ssi_code == g->told_by.ssi_code &&
           info->ssi_pid == g->told_by.ssi_pid && clock_ns() - g->heard_ns < ECHO_MS * NS_PER_MS;
}

/* The first one asks, the second one insists. Ctrl-C and Ctrl-\ reach the workers as what they
 * are; TERM and faults as the stop signal that was asked for. Who died before is told before: a
 * signalfd hands out the lowest number first, TERM before the CHLD that came earlier. */
static void signal_stops(struct ir_group *g, const struct signalfd_siginfo *info) {
    const int sig = (int)info->ssi_signo;
    wait_any(g);
    if (is_echo(g, info)) return;
    bool again = g->told;
    if (!again) {
        g->told_by = *info;
        g->heard_ns = clock_ns();
    }
    if (!again || event_room(g)) event_push(g, IR_TOLD, -1, 0)->signal = sig;
    g->told = true;
    if (again) ir_group_kill(g);
    else ir_group_stop(g, sig == SIGINT || sig == SIGQUIT ? sig : 0, true);
}

static void signal_take(struct ir_group *g, const struct signalfd_siginfo *info) {
    const int sig = (int)info->ssi_signo;
    switch (policy_of(g, sig)) {
    case REAPS:
        wait_any(g);
        tty_check_stopped(g);
        return;
    case STOPS: signal_stops(g, info); return;
    case SUSPENDS:
        if (g->config.flags & IR_TELL_TSTP && event_room(g)) (void)event_push(g, IR_SUSPEND, -1, 0);
        else if (g->config.asked_fd < 0) tty_suspend(g);
        else (void)group_signal_leaders(g, sig); /* it knows whom to stop first, and asks back */
        return;
    case PASS: (void)group_signal_leaders(g, sig); break;
    case PASS_TO_GROUP:
        if (sig == SIGCONT) tty_hand_over(g);
        group_signal_groups(g, sig);
        if (sig == SIGCONT) input_resume(g);
        break;
    case DROPPED: return;
    }
    if (event_room(g)) event_push(g, IR_PASSED, -1, 0)->signal = sig;
}

void signal_ready(struct ir_group *g) {
    struct signalfd_siginfo info[16];
    for (;;) {
        ssize_t n = read(g->signal_fd, info, sizeof info);
        if (n <= 0) return;
        for (size_t i = 0; i < (size_t)n / sizeof *info; i++) signal_take(g, &info[i]);
    }
}
