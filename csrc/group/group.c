/* group/group.c: the handle: its birth, its one loop, its end. */
#include "group/group.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define STEP_ROUNDS 64 /* then the caller gets its turn, however much output there is */

static int group_open(struct ir_group *g, uint32_t n) {
    g->workers = calloc(n + 1, sizeof *g->workers);
    g->log_buffer = malloc(STREAM_BUFFER);
    g->mark = strdup(g->config.mark);
    if (!g->workers || !g->log_buffer || !g->mark || events_open(g, n) < 0) return -ENOMEM;
    for (uint32_t i = 0; i < n; i++) {
        g->workers[i].pidfd = g->workers[i].log_fd = g->workers[i].log_open = -1;
        g->workers[i].error_log_fd = -1;
        g->workers[i].notify_fd = g->workers[i].drop_fd = -1;
        g->workers[i].progress = -1;
        g->workers[i].streams[0].fd = g->workers[i].streams[1].fd = -1;
        for (int k = 0; k < 3; k++) g->workers[i].child_ends[k] = -1;
    }
    if ((g->epoll_fd = fd_new(epoll_create1(EPOLL_CLOEXEC))) < 0) return g->epoll_fd;
    if ((g->exits_fd = fd_new(epoll_create1(EPOLL_CLOEXEC))) < 0) return g->exits_fd;
    g->timer_fd = fd_new(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    if (g->timer_fd < 0) return g->timer_fd;
    int r = fd_watch(g, g->exits_fd, EPOLLIN, WATCH_EXITS, 0);
    if (r >= 0) r = fd_watch(g, g->timer_fd, EPOLLIN, WATCH_TIMER, 0);
    if (r >= 0) r = sink_open(g);
    if (r >= 0) r = lines_init(g);
    if (r >= 0) r = guard_open(g);
    if (r >= 0) control_open(g);
    if (r >= 0 && (g->config.flags & IR_OWN_PROCESS)) {
        g->adopts = stray_adopts(g);
        r = signal_open(g);
        window_open(g);
        wait_any(g); /* whose SIGCHLD came before the core took signals */
        if (r >= 0 && wait_has_children(g)) r = stray_foreign(g);
        if (r >= 0 && g->config.suspend_read_fd >= 0)
            r = fd_watch(g, g->config.suspend_read_fd, EPOLLIN, WATCH_ASKED, 0);
    }
    return r;
}

int ir_group_new(const struct ir_config *config, uint32_t n, struct ir_group **ret_group) {
    *ret_group = NULL;
    if (config->mark == NULL || config->grace_ms < 0 || config->signal_grace_ms < 0 ||
        config->stop_signal < 1 || config->stop_signal > SIGRTMAX || n > INT_MAX / 16 ||
        config->lease_ms < 0 || config->lease_ms > LEASE_MOST_MS || config->guard_wait_ms < 0 ||
        config->guard_wait_ms > GUARD_WAIT_MOST_MS ||
        (config->lease_ms > 0 && config->guard_wait_ms > 0) ||
        config->last_word_size > LEASE_WORD_MOST ||
        (config->lease_ms + config->guard_wait_ms > 0 && config->guard == NULL))
        return -EINVAL;
    struct ir_group *g = calloc(1, sizeof *g);
    if (g == NULL) return -ENOMEM;
    g->config = *config;
    g->grace_ms = config->grace_ms;
    if (!CAN_SHARE_MEMORY) g->config.flags |= IR_USE_FORK;
    g->capacity = n;
    g->self = getpid();
    g->proc_error = process_sees_itself(g->self);
    g->epoll_fd = g->exits_fd = g->timer_fd = g->signal_fd = g->execs_fd = -1;
    g->terminal.fd = g->terminal.timer_fd = g->terminal.typed_fd = -1;
    g->rest_fd = g->fold_fd = -1;
    g->input.fd = g->control.fd = -1;
    for (int i = 0; i < CONTROL_CLIENTS; i++) g->control.clients[i].fd = -1;
    for (int i = 0; i < FOLLOWERS; i++) g->followers[i].fd = -1;
    g->cgroup.fd = g->lifeline[0] = g->lifeline[1] = -1;
    g->lease.fd = g->lease.pipe[0] = g->lease.pipe[1] = -1;
    if (config->last_word_size > 0)
        memcpy(g->lease.last_word, config->last_word, config->last_word_size);
    g->guard.folder_fd = g->guard.pidfd = g->guard.pipe[0] = g->guard.pipe[1] = -1;
    int r = group_open(g, n);
    if (r < 0) {
        ir_group_free(&g);
        return r;
    }
    *ret_group = g;
    return 0;
}

int ir_group_wait(const struct ir_group *g, int timeout_ms) {
    if (g == NULL) return 0;
    struct pollfd ready = {.fd = g->epoll_fd, .events = POLLIN};
    int r = poll(&ready, 1, timeout_ms);
    return r < 0 ? -errno : r;
}

static void timer_ready(struct ir_group *g) {
    if (timer_is_due(g)) state_cause(g, TIMEOUT);
}

static void dispatch(struct ir_group *g, uint64_t data) {
    uint32_t index = (uint32_t)data;
    switch ((enum watch)(data >> 32)) {
    case WATCH_EXITS: wait_exits(g); break;
    case WATCH_OUT: pump_ready(g, index, 0); break;
    case WATCH_ERR: pump_ready(g, index, 1); break;
    case WATCH_SIGNALS: signal_ready(g); break;
    case WATCH_TIMER: timer_ready(g); break;
    case WATCH_EXECS: wait_execs(g); break;
    case WATCH_WAITER: waiter_ready(g); break;
    case WATCH_SINK:
        sink_flush(g, &g->sinks[index]);
        pump_resume(g);
        break;
    case WATCH_STRAY: stray_gone(g, (int)index); break;
    case WATCH_SOURCE: input_source_ready(g); break;
    case WATCH_TARGET: input_target_ready(g, index); break;
    case WATCH_GUARD: guard_gone(g); break;
    case WATCH_LEASE: lease_ready(g); break;
    case WATCH_ASKED: tty_asked(g); break;
    case WATCH_LOAN:
        if (tty_loan_due(g)) tty_suspend(g, true);
        break;
    case WATCH_NOTIFY: notify_ready(g, index); break;
    case WATCH_DROPPED: notify_dropped(g, index); break;
    case WATCH_CONTROL: control_ready(g); break;
    case WATCH_CLIENT: client_ready(g, index); break;
    case WATCH_RESTS: rest_ready(g, pump_pass_rest); break;
    case WATCH_FOLD: lines_ready(g); break;
    case WATCH_FOLLOWER: follower_ready(g, index); break;
    }
}

int ir_group_run_once(struct ir_group *g, struct ir_event *ret_events, uint32_t n) {
    if (g == NULL) return 0;
    struct epoll_event ready[64];
    for (int round = 0; round < STEP_ROUNDS && g->state != ENDED; round++) {
        int count = epoll_wait(g->epoll_fd, ready, 64, 0);
        for (int i = 0; i < count; i++) dispatch(g, ready[i].data.u64);
        sink_flush_all(g);
        followers_flush(g);
        state_check(g);
        if (count <= 0 || g->event_count > 0) break;
    }
    if (g->state == ENDED) { /* no later turn would serve these */
        control_close(g);
        followers_close(g);
    }
    return events_pop(g, ret_events, n);
}

/* The bounded end for a caller that does not wait for IR_ENDED itself. */
void ir_group_end(struct ir_group *g) {
    if (g == NULL) return;
    struct ir_event events[64];
    if (getpid() != g->self) return; /* a forked child: the workers are its parent's */
    g->signalled = true;             /* nobody listens: a console without a reader must not block */
    ir_group_kill(g);
    while (g->state != ENDED && g->state != IDLE) {
        while (ir_group_run_once(g, events, 64) == 64) {
        }
        if (g->state != ENDED) (void)ir_group_wait(g, GIVE_UP_MS);
    }
    timer_set(g, 0);
}

/* In a child that the host program forked this is a copy. Nobody in it is that child's, and it
 * shares what the epoll sets watch with the true one. */
static void group_leave_to_parent(struct ir_group *g) {
    g->epoll_fd = fd_close(g->epoll_fd);
    g->exits_fd = fd_close(g->exits_fd);
    g->guard.pid = 0;
    g->guard.pidfd = fd_close(g->guard.pidfd);
    g->cgroup.fd = fd_close(g->cgroup.fd);
    g->state = ENDED;
}

void ir_group_free(struct ir_group **group) {
    struct ir_group *g = *group;
    *group = NULL;
    if (g == NULL) return;
    const bool forked = getpid() != g->self;
    if (forked) group_leave_to_parent(g);
    if (g->state != IDLE && g->state != ENDED) ir_group_end(g);
    input_close(g);
    control_close(g);
    followers_close(g);
    guard_close(g);
    lease_close(g);
    cgroup_close(g);
    window_close(g);
    /* memory that an unkillable child still runs on: never free it */
    if (g->abandoned == 0 && !forked) arena_free(g);
    for (uint32_t i = 0; g->workers != NULL && i < g->n; i++) {
        struct worker *w = &g->workers[i];
        (void)fd_close(w->pidfd);
        for (int k = 0; k < 2; k++) (void)fd_close(w->streams[k].fd);
        for (int k = 0; k < 3; k++) (void)fd_close(w->child_ends[k]);
        notify_close(g, i);
    }
    if (g->workers != NULL) sink_close(g);
    waiter_close(g, forked);
    const int fds[] = {
        g->epoll_fd,        g->exits_fd,          g->timer_fd,         g->signal_fd, g->execs_fd,
        g->terminal.fd,     g->lifeline[0],       g->lifeline[1],      g->rest_fd,   g->fold_fd,
        g->guard.folder_fd, g->terminal.timer_fd, g->terminal.typed_fd};
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++) (void)fd_close(fds[i]);
    if (forked)
        return; /* another thread of the parent may have been in the midst of any of these */
    stray_close(g);
    for (uint32_t i = 0; g->workers != NULL && i < g->n; i++) free(g->workers[i].status);
    control_free(g);
    free(g->input.targets);
    free(g->input.buffer);
    free(g->workers);
    free(g->events);
    free(g->log_buffer);
    free(g->labels);
    free(g->buffers);
    free(g->mark);
    free(g->foreign);
    free(g);
}
