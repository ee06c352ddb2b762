/* children/terminal_loan.c: the terminal for a worker that asks for it.
 *
 * SIGTTIN or SIGTTOU stops a worker that reads the terminal, or changes its modes, without the
 * foreground. It gets the foreground, and continues. It keeps that while it reads and while it has
 * changed the modes; so Ctrl-C reaches all workers again after the answer to a prompt.
 *
 * No event reports that somebody has read a line. But a typed line sends SIGIO to the launcher:
 * some time later there is nothing more to read. (An edge of epoll is lost if the worker reads first.)
 * Then the core takes the foreground back, and stops and continues the worker. A read in
 * progress begins anew (n_tty.c), so that it asks once more; a worker that does not read notices
 * EINTR at most (signal(7)). */
#include "group/group.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define LOOK_FIRST_MS 100 /* after a line, and after the worker continued */
#define LOOK_MOST_MS 1000
#define READER_FIRST_MS 1000 /* a read may end without a line: by a timeout, by a signal */
#define READER_MOST_MS 5000
#define ANSWER_MS 250     /* for the holder to ask once more, if it reads */
#define SECRET_MS 1000    /* the same while the echo is off: nobody is to see what it reads */
#define ASKS_AGAIN_MS 100 /* sooner than anybody can type `bg`: nobody has stopped the launcher */

static void loan_timer(const struct ir_group *g, int64_t delay_ms) {
    timer_arm(g->terminal.timer_fd, delay_ms * NS_PER_MS);
}

static int loan_open(struct ir_group *g) {
    struct terminal *t = &g->terminal;
    if (t->fd < 0) t->fd = tty_open();
    if (t->fd < 0) return t->fd;
    if (t->timer_fd >= 0) return 0;
    /* separate: the open file decides who gets it, and stdin shares that with others */
    t->typed_fd = tty_open();
    if (t->typed_fd < 0) return t->typed_fd;
    (void)fcntl(t->typed_fd, F_SETOWN, getpid());
    t->timer_fd = fd_new(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
    return t->timer_fd < 0 ? t->timer_fd : fd_watch(g, t->timer_fd, EPOLLIN, WATCH_LOAN, 0);
}

/* Each once for a worker: a debugger asks at each of its prompts. False: there is nothing to report. */
static bool loan_report(struct ir_group *g, uint32_t index, bool refused) {
    struct worker *w = &g->workers[index];
    bool *reported = refused ? &w->was_refused : &w->has_asked;
    if (*reported || (g->n == 1 && !refused) || !event_room(g)) return false;
    *reported = true;
    event_push(g, IR_ASKS_TERMINAL, (int)index, w->pid)->code = refused;
    return true;
}

/* First the one that had it last: the core only asked whether it still reads. */
static bool loan_next(const struct ir_group *g, uint32_t *ret_index) {
    for (uint32_t k = 0; k <= g->started; k++) {
        const uint32_t i = k > 0 ? k - 1 : g->terminal.holder_index;
        if (i >= g->started || g->workers[i].asks == 0 || g->workers[i].reaped) continue;
        *ret_index = i;
        return true;
    }
    return false;
}

/* Its owner came to the foreground with the launcher, or will, as a shell's job does. */
static bool is_owner(const struct ir_group *g, pid_t group) {
    return g->terminal.has_owner && group == g->workers[0].pid;
}

/* True: this is a job in the background, which is to be suspended. */
bool tty_asked_for(struct ir_group *g, uint32_t index, pid_t pid, int sig) {
    struct terminal *t = &g->terminal;
    struct worker *w = &g->workers[index];
    const pid_t group = getpgid(pid);
    if (g->state != RUNNING || group <= 0) return false;
    w->asks = group;
    w->asks_to_read = sig == SIGTTIN;
    /* inside --isolate the launcher may give it only if the process outside had it as its stdin */
    const bool may = ((g->config.flags & IR_SHARES_TERMINAL) != 0 || t->has_owner) &&
                     (g->config.suspend_write_fd < 0 || isatty(0));
    if (!may || loan_open(g) < 0) {
        (void)loan_report(g, index, true);
        return false;
    }
    if (t->holder > 0 ? t->lent : tty_is_ours(g)) {
        if (!t->lent && (!t->probed || index == t->holder_index)) loan_timer(g, 0);
        return false;
    }
    if (clock_ns() - t->suspended_ns >= ASKS_AGAIN_MS * NS_PER_MS) return true;
    (void)loan_report(g, index, true);
    return false;
}

void tty_refuse_asks(struct ir_group *g) {
    for (uint32_t i = 0; i < g->started; i++)
        if (g->workers[i].asks > 0) (void)loan_report(g, i, true);
}

void tty_clear_asks(struct ir_group *g) {
    for (uint32_t i = 0; i < g->started; i++) g->workers[i].asks = 0;
}

/* After a probe, a reader that still reads has longer until the next one. */
static void loan_set_patience(struct terminal *t, pid_t group, bool reads) {
    const int64_t doubled_ms = t->look_ms * 2 < READER_MOST_MS ? t->look_ms * 2 : READER_MOST_MS;
    const bool again = group == t->last_group && t->look_ms >= READER_FIRST_MS;
    t->look_ms = !reads ? LOOK_FIRST_MS : again ? doubled_ms : READER_FIRST_MS;
    t->last_group = group;
}

/* The report comes first, so that its line is above the worker's prompt. True: as tty_asked_for. */
static bool loan_begin(struct ir_group *g) {
    struct terminal *t = &g->terminal;
    uint32_t index;
    if (g->state != RUNNING || !loan_next(g, &index)) return false;
    struct worker *w = &g->workers[index];
    const pid_t group = w->asks;
    if (!tty_is_ours(g)) return true; /* meanwhile it is somebody else's */
    if (loan_report(g, index, false)) {
        loan_timer(g, 0);
        return false;
    }
    const struct termios before = t->modes;
    const bool reads_on = t->probed && group == t->last_group;
    w->asks = 0;
    if (!tty_give(g, index, group)) {
        (void)loan_report(g, index, true);
        loan_timer(g, 0);
        return false;
    }
    if (reads_on) t->modes = before; /* and not those of its question */
    t->lent = !is_owner(g, group);
    loan_set_patience(t, group, w->asks_to_read);
    if (t->lent) (void)fcntl(t->typed_fd, F_SETFL, O_RDWR | O_NONBLOCK | O_ASYNC);
    if (t->lent) loan_timer(g, t->look_ms);
    (void)kill(-group, SIGCONT);
    return false;
}

/* Also at the holder's end. */
void tty_loan_ended(struct ir_group *g) {
    struct terminal *t = &g->terminal;
    if (!t->lent) return;
    tty_restore(g);
    (void)fcntl(t->typed_fd, F_SETFL, O_RDWR | O_NONBLOCK);
    t->lent = false;
    t->holder = 0;
    loan_timer(g, 0);
    if (!t->probed) input_resume(g); /* typed meanwhile, and not for the holder */
    if (t->others_stopped) (void)kill(0, SIGCONT);
    t->others_stopped = false;
}

void tty_typed(struct ir_group *g) {
    struct terminal *t = &g->terminal;
    if (!t->lent) return;
    t->look_ms = LOOK_FIRST_MS;
    loan_timer(g, t->look_ms);
}

/* A job of the worker's own may have the foreground: then it is still in use. Of what was typed ahead it may read the
 * next line soon; what it leaves is for stdin. */
static bool loan_is_used(const struct ir_group *g, const struct termios *now) {
    const struct terminal *t = &g->terminal;
    int unread = 0;
    if (tcgetpgrp(t->fd) != t->holder) return !tty_is_ours(g);
    if ((now->c_lflag & ICANON) == 0 && (t->modes.c_lflag & ICANON) != 0) return true; /* keys */
    (void)ioctl(t->fd, FIONREAD, &unread);
    return unread > 0 && t->look_ms < LOOK_MOST_MS;
}

static void loan_check(struct ir_group *g) {
    struct terminal *t = &g->terminal;
    struct termios now = t->modes;
    (void)tcgetattr(t->fd, &now);
    if (loan_is_used(g, &now)) {
        t->look_ms = t->look_ms * 2 < LOOK_MOST_MS ? t->look_ms * 2 : LOOK_MOST_MS;
        loan_timer(g, t->look_ms);
        return;
    }
    const pid_t group = t->holder;
    t->probed = true;
    tty_loan_ended(g);
    loan_timer(g, tty_has_modes_of(g, &t->modes) ? ANSWER_MS : SECRET_MS);
    if (g->state != RUNNING) return;
    (void)kill(-group, SIGSTOP);
    (void)kill(-group, SIGCONT);
}

/* It does not read after a probe: what it left is nobody's choice. A rank that looked at the modes while another one
 * had the echo off restores that. */
static void loan_undo_modes(struct ir_group *g) {
    const struct terminal *t = &g->terminal;
    const bool reads_on = t->holder_index < g->started && g->workers[t->holder_index].asks > 0;
    if (t->probed && !reads_on && t->has_modes && tty_is_ours(g) && !tty_has_modes_of(g, &t->modes))
        (void)tcsetattr(t->fd, TCSANOW, &t->modes);
}

/* True: as tty_asked_for. */
bool tty_loan_due(struct ir_group *g) {
    struct terminal *t = &g->terminal;
    uint64_t count;
    if (read(t->timer_fd, &count, sizeof count) != (ssize_t)sizeof count) return false;
    if (t->lent) {
        loan_check(g);
        return false;
    }
    if (g->event_count > 0) { /* the caller has not seen the report */
        loan_timer(g, 0);
        return false;
    }
    loan_undo_modes(g);
    const bool suspends = loan_begin(g);
    t->probed = false;
    if (!t->lent) input_resume(g);
    return suspends;
}
