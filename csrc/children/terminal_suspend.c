/* children/terminal_suspend.c: Ctrl-Z, and workers that stop for the terminal.
 *
 * The key reaches only who has the foreground; a shell must see that the whole job stops, and
 * continues the launcher alone. */
#include "group/group.h"

#include <sys/wait.h>
#include <unistd.h>

void tty_hand_over(struct ir_group *g) {
    const struct terminal *t = &g->terminal;
    if (tty_is_ours(g) && g->started > 0) {
        if (t->has_owner && !g->workers[0].reaped) (void)tty_give(g, 0, g->workers[0].pid);
        else if (t->holder > 0) (void)tty_give(g, t->holder_index, t->holder);
    }
    if (!tty_is_held(g)) tty_loan_ended(g);
}

/* A program that exits unasked has chosen the modes that it leaves, as `stty` has. */
bool tty_worker_ended(struct ir_group *g, uint32_t index, bool by_signal) {
    const struct terminal *t = &g->terminal;
    g->workers[index].asks = 0;
    if (t->holder <= 0 || t->holder_index != index) return false;
    const bool held = tty_is_held(g);
    if ((by_signal || t->lent) && t->has_modes && (held || tty_is_ours(g)) &&
        !tty_has_modes_of(g, &t->modes))
        (void)tcsetattr(t->fd, TCSANOW, &t->modes);
    tty_loan_ended(g);
    return held;
}

/* Only a process outside of a PID namespace can stop its process 1 (pid_namespaces(7)). SIGCONT will come from
 * there, too, and continue the workers. */
static bool stop_is_asked_for(const struct ir_group *g) {
    return g->config.suspend_write_fd >= 0 && write(g->config.suspend_write_fd, "z", 1) == 1;
}

/* Stops this process as an unblocked SIGTSTP would: the kernel knows about orphaned process
 * groups, which nobody could continue, and drops it there. Returns after SIGCONT. The rest of
 * this process group stops, too, where a worker alone had what stops it: a pipeline, the script
 * that runs the launcher. */
static bool stop_self(bool whole_group) {
    sigset_t only, before, pending;
    (void)sigemptyset(&only);
    (void)sigaddset(&only, SIGTSTP);
    (void)kill(whole_group ? 0 : getpid(), SIGTSTP);
    (void)pthread_sigmask(SIG_UNBLOCK, &only, &before);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return sigpending(&pending) == 0 && sigismember(&pending, SIGCONT) == 1;
}

/* A worker that asks for the terminal would only stop again where nobody could bring the
 * launcher to the foreground. */
void tty_suspend(struct ir_group *g, bool whole_group) {
    g->terminal.suspended_ns = clock_ns();
    group_signal_groups(g, SIGSTOP);
    (void)lines_flush_all(g); /* before the shell's prompt */
    sink_flush_all(g);
    tty_restore(g);
    if (stop_is_asked_for(g)) return;
    bool stopped = stop_self(whole_group);
    if (stopped) g->terminal.suspended_ns = 0;
    tty_hand_over(g);
    if (stopped || tty_is_held(g)) tty_clear_asks(g);
    else tty_refuse_asks(g);
    group_continue(g);
}

void ir_group_suspend(struct ir_group *g) {
    if (g == NULL) return;
    tty_suspend(g, false);
}

/* This worker is a launcher, too: it has stopped what it started and asks for the same. Or a key
 * of the terminal has stopped its job, and as process 1 it cannot end by that signal. */
void tty_asked(struct ir_group *g) {
    unsigned char byte;
    if (read(g->config.suspend_read_fd, &byte, 1) != 1) {
        fd_unwatch(g, g->config.suspend_read_fd);
    } else if (byte != SIGINT && byte != SIGQUIT) {
        tty_suspend(g, true);
    } else if (event_room(g)) {
        struct ir_event *event = event_push(g, IR_SIGNALLED, 0, g->workers[0].pid);
        event->signal = byte;
        event->code = 1;
    }
}

static bool worker_of_stopped(const struct ir_group *g, pid_t pid, uint32_t *ret_index) {
    for (int pass = 0; pass < 2; pass++, pid = getpgid(pid)) /* an orphan of its process group */
        for (uint32_t i = 0; pid > 0 && i < g->started; i++)
            if (g->workers[i].pid == pid && !g->workers[i].reaped) {
                *ret_index = i;
                return true;
            }
    return false;
}

/* Ctrl-Z reaches only the worker that has the foreground: the launcher follows it, so that the
 * shell sees. Whoever sends SIGSTOP will send SIGCONT, too. */
static void worker_stopped(struct ir_group *g, uint32_t index, pid_t pid, int sig) {
    const struct terminal *t = &g->terminal;
    const bool asks = sig == SIGTTIN || sig == SIGTTOU;
    const bool has_key = t->has_owner || (t->holder > 0 && t->holder_index == index);
    if (asks ? tty_asked_for(g, index, pid, sig) : sig == SIGTSTP && has_key) tty_suspend(g, true);
}

/* Called for SIGCHLD, of which one may stand for several. */
void tty_check_stopped(struct ir_group *g) {
    for (;;) {
        siginfo_t info = {0};
        uint32_t index;
        if (waitid(P_ALL, 0, &info, WSTOPPED | WNOHANG) < 0 || info.si_pid == 0) return;
        if (info.si_code == CLD_STOPPED && worker_of_stopped(g, info.si_pid, &index))
            worker_stopped(g, index, info.si_pid, info.si_status);
    }
}
