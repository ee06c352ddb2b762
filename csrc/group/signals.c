/* group/signals.c: signals that an own process gets, and what each of them means.
 *
 * The launcher blocks all signals and reads them from one signalfd. So it loses none, and none has a handler. */
#include "group/group.h"

#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <unistd.h>

int ir_signal_meaning(int sig) {
    switch (sig) {
    case SIGCHLD: return IR_SIGNAL_REAPS;
    case SIGTERM:
    case SIGINT:
    case SIGQUIT:
    case SIGILL:
    case SIGTRAP:
    case SIGABRT:
    case SIGBUS:
    case SIGFPE:
    case SIGSEGV:
    case SIGSYS: return IR_SIGNAL_STOPS;
    case SIGTSTP: return IR_SIGNAL_SUSPENDS;
    case SIGPIPE:
    case SIGXFSZ: /* a log beyond RLIMIT_FSIZE */
    case SIGTTIN:
    case SIGTTOU: return IR_SIGNAL_DROPPED;
    case SIGHUP:
    case SIGWINCH:
    case SIGCONT: return IR_SIGNAL_FORWARD_TO_GROUP;
    default: return IR_SIGNAL_FORWARD;
    }
}

static bool was_ignored_at_entry(const struct ir_group *g, int sig) {
    return sig != SIGCHLD && sig <= 64 && (g->config.entry.ignored & SIGNAL_BIT(sig)) != 0;
}

int signal_open(struct ir_group *g) {
    sigset_t all;
    (void)sigfillset(&all);
    g->signal_fd = fd_new(signalfd(-1, &all, SFD_CLOEXEC | SFD_NONBLOCK));
    if (g->signal_fd < 0) return g->signal_fd;
    return fd_watch(g, g->signal_fd, EPOLLIN, WATCH_SIGNALS, 0);
}

/* timeout(1) sends a signal to the process, and then to its group. A terminal's signals are the kernel's. */
static bool is_echo(const struct ir_group *g, const struct signalfd_siginfo *info) {
    const struct signalfd_siginfo *first = &g->stopped_by;
    return g->signalled_ns != 0 && info->ssi_code != SI_KERNEL &&
           info->ssi_signo == first->ssi_signo && info->ssi_code == first->ssi_code &&
           info->ssi_pid == first->ssi_pid && clock_ns() - g->signalled_ns < ECHO_MS * NS_PER_MS;
}

/* The first one asks, the second one insists. Ctrl-C and Ctrl-\ reach the workers unchanged;
 * TERM and faults become the configured stop signal. The event of an earlier death comes first:
 * a signalfd returns the lowest number first, TERM before the CHLD that came earlier. */
static void signal_stops(struct ir_group *g, const struct signalfd_siginfo *info) {
    const int sig = (int)info->ssi_signo;
    wait_any(g);
    if (is_echo(g, info)) return;
    bool again = g->signalled;
    if (!again) {
        g->stopped_by = *info;
        g->signalled_ns = clock_ns();
    }
    if (!again || event_room(g)) {
        struct ir_event *event = event_push(g, IR_SIGNALLED, -1, 0);
        event->signal = sig;
        event->code = info->ssi_code == SI_KERNEL; /* a key of the terminal */
    }
    g->signalled = true;
    if (again) ir_group_kill(g);
    else ir_group_stop(g, sig == SIGINT || sig == SIGQUIT ? sig : 0, true);
}

static void signal_handle(struct ir_group *g, const struct signalfd_siginfo *info) {
    const int sig = (int)info->ssi_signo;
    if (sig == SIGIO && g->terminal.typed_fd >= 0 && info->ssi_pid == 0) { /* of the terminal */
        tty_typed(g);
        return;
    }
    if (sig == SIGTTIN || sig == SIGTTOU) g->terminal.others_stopped = g->terminal.lent;
    if (was_ignored_at_entry(g, sig)) return;
    switch (ir_signal_meaning(sig)) {
    case IR_SIGNAL_REAPS:
        wait_any(g);
        tty_check_stopped(g);
        return;
    case IR_SIGNAL_STOPS: signal_stops(g, info); return;
    case IR_SIGNAL_SUSPENDS:
        if (g->config.flags & IR_REPORT_TSTP && event_room(g))
            (void)event_push(g, IR_SUSPEND, -1, 0);
        else if (g->config.suspend_read_fd < 0) tty_suspend(g, false);
        else (void)group_signal_leaders(g, sig); /* it knows whom to stop first, and asks back */
        return;
    case IR_SIGNAL_FORWARD: (void)group_signal_leaders(g, sig); break;
    case IR_SIGNAL_FORWARD_TO_GROUP:
        if (sig == SIGCONT) tty_clear_asks(g);
        if (sig == SIGCONT) tty_hand_over(g);
        group_signal_groups(g, sig);
        if (sig == SIGCONT) input_resume(g);
        break;
    case IR_SIGNAL_DROPPED: return;
    }
    if (event_room(g)) event_push(g, IR_FORWARDED, -1, 0)->signal = sig;
}

void signal_ready(struct ir_group *g) {
    struct signalfd_siginfo info[16];
    for (;;) {
        ssize_t n = read(g->signal_fd, info, sizeof info);
        if (n <= 0) return;
        for (size_t i = 0; i < (size_t)n / sizeof *info; i++) signal_handle(g, &info[i]);
    }
}
