/* group/stop_state.c: the stop's timetable: what happens in each state for each cause, with no blank cell.
 *
 *   RUNNING   the workers live                      STOP: end gracefully
 *   LEADING   leaders have the stop signal (mixed)  KILL: end at once
 *   STOPPING  groups have the stop signal           TIMEOUT: the state's time is up
 *   KILLING   groups have SIGKILL                   GONE: no worker is left
 *   SWEEPING  leftovers have the stop signal        CLEAR: no leftover remains
 *   PURGING   leftovers have SIGKILL                FLUSHED: the last output has left
 *   DRAINING  nothing lives; output leaves
 *   ENDED */
#include "group/group.h"

#include <errno.h>
#include <sys/epoll.h>

static enum state stay(struct ir_group *g) {
    return g->state;
}

static enum state finish_output(struct ir_group *g) {
    pump_close(g);
    sink_flush_all(g);
    timer_set(g, g->signalled ? IR_CONSOLE_WAIT_MS : GIVE_UP_MS);
    return DRAINING;
}

/* Written in the table for pairs that cannot be: a cause that belongs to another state. */
static enum state impossible(struct ir_group *g) {
    return g->state;
}

static void mark_stop_sent(struct ir_group *g) {
    for (uint32_t i = 0; i < g->started; i++)
        if (!g->workers[i].reaped) g->workers[i].stop_sent = true;
}

/* Process 1, at the end of the command: the kernel ends whatever still exists together with it. */
static bool is_the_end(const struct ir_group *g) {
    return g->self == 1 && (g->config.flags & IR_OWN_PROCESS) && (g->config.flags & IR_LAST);
}

/* As stray_signal. At the very end of a process 1, after the cgroup and the search of /proc,
 * kill(-1) reaches the rest. These are processes that fork as fast as the core kills, and those
 * that it cannot look for. */
static uint32_t signal_strays(struct ir_group *g, int sig, bool report) {
    const bool end = is_the_end(g), reaches_all = end && g->proc_error < 0;
    uint32_t n = stray_signal(g, reaches_all ? 0 : sig, report, !end);
    if (!end || !(reaches_all ? wait_has_children(g) : sig == SIGKILL && n > 0)) return n;
    if (sig == SIGKILL) guard_dismiss(g);
    (void)kill(-1, sig);
    return n + 1;
}

static enum state kill_workers(struct ir_group *g) {
    mark_stop_sent(g);
    if (!g->immediate) g->overrun_ms = g->grace_ms;
    group_signal_groups(g, SIGKILL);
    if (g->immediate) (void)signal_strays(g, SIGKILL, true);
    timer_set(g, GIVE_UP_MS);
    return KILLING;
}

static enum state stop_groups(struct ir_group *g) {
    group_signal_groups(g, g->stop_with);
    group_signal_groups(g, SIGCONT);
    int64_t grace_ms = g->grace_ms;
    if (g->config.stop_scope == IR_SCOPE_MIXED) grace_ms -= grace_ms / 2;
    timer_set(g, grace_ms);
    return STOPPING;
}

static enum state stop_leaders(struct ir_group *g) {
    (void)group_signal_leaders(g, g->stop_with);
    (void)group_signal_leaders(g, SIGCONT);
    bool mixed = g->config.stop_scope == IR_SCOPE_MIXED;
    timer_set(g, mixed ? g->grace_ms / 2 : g->grace_ms);
    return mixed ? LEADING : STOPPING;
}

static enum state sweep(struct ir_group *g);

static enum state stop_workers(struct ir_group *g) {
    tty_loan_ended(g);                  /* or a second Ctrl-C would reach one worker alone */
    if (g->alive == 0) return sweep(g); /* the group stayed: what workers left gets one signal */
    mark_stop_sent(g);
    if (g->grace_ms == 0) return kill_workers(g);
    return g->config.stop_scope == IR_SCOPE_GROUP ? stop_groups(g) : stop_leaders(g);
}

static enum state kill_now(struct ir_group *g) {
    g->immediate = true;
    return kill_workers(g);
}

static enum state purge(struct ir_group *g) {
    const uint32_t n = signal_strays(g, SIGKILL, true);
    if (n == 0 && g->strays_alive == 0) return finish_output(g);
    timer_set(g, GIVE_UP_MS);
    return PURGING;
}

static enum state purge_now(struct ir_group *g) {
    g->immediate = true;
    return purge(g);
}

static bool is_clear(struct ir_group *g) {
    if (g->started == 0 && !g->adopts) return true; /* a search may find no descriptor, too */
    if (!g->adopts) return !stray_has_unwatched(g) && g->strays_alive == 0 && stray_count(g) == 0;
    if (!wait_has_children(g)) return true;
    return (g->foreign_count > 0 || g->abandoned > 0) && stray_count(g) == 0;
}

/* Whoever stops the launcher by a signal kills it soon after: leftovers have what workers left
 * of the grace, and a little in any case. */
static int64_t strays_grace_ms(const struct ir_group *g) {
    if (g->grace_began_ns == 0) return g->grace_ms;
    const int64_t left_ms = g->grace_ms - (clock_ns() - g->grace_began_ns) / NS_PER_MS;
    const int64_t least_ms = g->grace_ms < STRAYS_LEAST_MS ? g->grace_ms : STRAYS_LEAST_MS;
    return left_ms > least_ms ? left_ms : least_ms;
}

/* The stop signal that workers got, but for INT and QUIT. What a shell starts in the background
 * ignores both (POSIX, 2.11), and would take all of its grace. */
static int strays_signal(const struct ir_group *g) {
    const int sig = g->stop_with != 0 ? g->stop_with : g->config.stop_signal;
    return sig == SIGINT || sig == SIGQUIT ? SIGTERM : sig;
}

/* Do not touch the slot itself: the child may still be reading it. */
void worker_close_child_ends(struct worker *w) {
    for (int i = 0; i < 3; i++) w->child_ends[i] = fd_close(w->child_ends[i]);
}

/* None of them starts any more: their output ends. */
static void drop_held(struct ir_group *g) {
    for (uint32_t i = 0; g->held > 0 && i < g->started; i++) {
        if (!g->workers[i].held) continue;
        worker_close_child_ends(&g->workers[i]);
        g->workers[i].held = false;
        g->held--;
    }
}

/* The workers are gone; so must be everything that they left. */
static enum state sweep(struct ir_group *g) {
    drop_held(g);
    groups_release(g);
    if (is_clear(g)) return finish_output(g);
    if (!g->immediate && g->grace_ms == 0 && strays_are_trackers(g)) {
        timer_set(g, TRACKERS_MS);
        return SWEEPING;
    }
    if (g->immediate || g->grace_ms == 0) return purge(g);
    timer_set(g, strays_grace_ms(g));
    if (signal_strays(g, strays_signal(g), true) == 0 && g->strays_alive == 0)
        return finish_output(g);
    (void)signal_strays(g, SIGCONT, false);
    return SWEEPING;
}

/* SIGKILL did not end them in time (uninterruptible sleep, a tracer): named, and left. */
static enum state abandon_workers(struct ir_group *g) {
    for (uint32_t i = 0; i < g->started; i++) {
        struct worker *w = &g->workers[i];
        if (w->pid == 0 || w->reaped) continue;
        struct ir_event *event = event_push(g, IR_STUCK, (int)i, w->pid);
        char state = '?';
        process_describe(w->pid, &state, event->name);
        event->code = (unsigned char)state;
        w->reaped = true; /* should it die after all, its pidfd must not wake the core for ever */
        if (w->pidfd >= 0) (void)epoll_ctl(g->exits_fd, EPOLL_CTL_DEL, w->pidfd, NULL);
        g->abandoned++;
    }
    g->alive = 0;
    g->immediate = true;
    return sweep(g);
}

/* The last may have died since the last look, on a machine that gave the core no turn. */
static enum state abandon_strays(struct ir_group *g) {
    (void)signal_strays(g, SIGKILL, false);
    if (g->adopts) wait_any(g);
    /* a child without a name counts all the same */
    if (!is_clear(g) && stray_name_stuck(g) == 0 && g->adopts && !is_clear(g)) {
        struct ir_event *event = event_push(g, IR_STUCK, -1, 0);
        event->name[0] = '?';
        event->code = '?';
    }
    return finish_output(g);
}

static enum state end(struct ir_group *g) {
    if (g->config.flags & IR_OWN_PROCESS) guard_dismiss(g); /* reaped by ir_group_free, soon */
    else guard_stop(g);
    timer_set(g, 0); /* from now on the group polls ready: nobody waits after the end */
    tty_restore(g);
    event_push(g, IR_ENDED, -1, 0)->code = (int)g->strays_seen;
    return ENDED;
}

static enum state drop_output(struct ir_group *g) {
    struct ir_event *event = event_push(g, IR_OUTPUT_LOST, -1, 0);
    event->signal = ETIMEDOUT;
    return end(g);
}

/* After a stop from outside a reader that does not read must not hold the launch. Otherwise it
 * waits for it as any program in a pipeline does, and reports that once. */
static enum state console_late(struct ir_group *g) {
    if (g->signalled) return drop_output(g);
    event_push(g, IR_CONSOLE_STUCK, -1, 0);
    return DRAINING;
}

/* A signal came while only output remained: from now on its reader has a bound. */
static enum state bound_wait(struct ir_group *g) {
    if (g->signalled) timer_set(g, IR_CONSOLE_WAIT_MS);
    return g->state;
}

typedef enum state (*action)(struct ir_group *);

/* clang-format off */
static const action table[ENDED + 1][CAUSES] = {
    /*             STOP          KILL         TIMEOUT          GONE        CLEAR          FLUSHED */
    [IDLE]     = { stay,         stay,        impossible,      impossible, impossible,    impossible },
    [RUNNING]  = { stop_workers, kill_now,    impossible,      sweep,      impossible,    impossible },
    [LEADING]  = { stay,         kill_now,    stop_groups,     sweep,      impossible,    impossible },
    [STOPPING] = { stay,         kill_now,    kill_workers,    sweep,      impossible,    impossible },
    [KILLING]  = { stay,         kill_now,    abandon_workers, sweep,      impossible,    impossible },
    [SWEEPING] = { stay,         purge_now,   purge,           impossible, finish_output, impossible },
    [PURGING]  = { stay,         purge_now,   abandon_strays,  impossible, finish_output, impossible },
    [DRAINING] = { bound_wait,   drop_output, console_late,    impossible, impossible,    end        },
    [ENDED]    = { stay,         stay,        impossible,      impossible, impossible,    impossible },
};
/* clang-format on */

void state_cause(struct ir_group *g, enum cause cause) {
    g->state = table[g->state][cause](g);
}

/* What has become true since the last look. */
void state_check(struct ir_group *g) {
    const bool stays = g->held > 0 || (g->config.flags & IR_STAYS); /* for a start, or a stop */
    const bool waits = g->state == RUNNING && stays;
    if (g->state >= RUNNING && g->state <= KILLING && g->alive == 0 && !waits) state_cause(g, GONE);
    if (g->state == SWEEPING || g->state == PURGING) {
        const bool clear = is_clear(g);
        if (clear) state_cause(g, CLEAR);
        else if (g->state == PURGING) (void)signal_strays(g, SIGKILL, false);
        if (!clear && !g->adopts && (g->strays_alive == 0 || stray_has_unwatched(g)))
            timer_wake_early(g);
    }
    if (g->state == DRAINING) {
        pump_close(g);
        sink_flush_all(g);
        if (pump_idle(g) && lines_flush_all(g) && sink_finish_all(g)) state_cause(g, FLUSHED);
    }
}

void ir_group_stop(struct ir_group *g, int sig, int by_signal) {
    if (g == NULL) return;
    if (g->state == RUNNING) wait_exits(g); /* an earlier death was not by the stop */
    if (g->state == RUNNING) {
        g->stop_with = sig != 0 ? sig : g->config.stop_signal;
        g->grace_ms = by_signal ? g->config.signal_grace_ms : g->config.grace_ms;
        g->grace_began_ns = by_signal ? clock_ns() : 0;
    }
    state_cause(g, STOP);
    state_check(g);
}

void ir_group_kill(struct ir_group *g) {
    if (g == NULL) return;
    state_cause(g, KILL);
    state_check(g);
}
