/* group/part.c: some workers end and restart, while the others run on.
 *
 * The caller has the timetable, and the loop of the group runs on. Until they have restarted
 * they are held, so that the group does not end; its stop drops them as it does others. */
#include "group/group.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#define LOOK_MS 1000 /* the time of a look for leftovers: the caller sets its own */

static bool are_workers(const struct ir_group *g, const uint32_t *workers, uint32_t n) {
    for (uint32_t i = 0; i < n; i++)
        if (workers[i] >= g->n) return false;
    return true;
}

/* Before its clone, a held one counts as one that has ended. */
static bool has_ended(const struct worker *w) {
    return w->pid == 0 || w->reaped;
}

int ir_group_part_signal(struct ir_group *g, const uint32_t *workers, uint32_t n, int sig,
                         int leaders) {
    if (g == NULL) return -ESRCH;
    if (sig < 1 || sig > SIGRTMAX || !are_workers(g, workers, n)) return -EINVAL;
    if (g->state != RUNNING) return 0;
    wait_exits(g); /* an earlier death was not by this signal */
    int alive = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct worker *w = &g->workers[workers[i]];
        if (!w->held) g->held++;
        w->held = true;
        w->part_signal = sig;
        if (!has_ended(w)) {
            w->stop_sent = true;
            alive++;
        }
        if (!leaders) (void)worker_signal_group(g, w, sig);
        else if (!has_ended(w)) (void)child_signal(g, w->pid, w->pidfd, sig);
        if (sig == SIGKILL) continue;
        if (!leaders) (void)worker_signal_group(g, w, SIGCONT);
        else if (!has_ended(w)) (void)child_signal(g, w->pid, w->pidfd, SIGCONT);
    }
    return alive;
}

/* Where no event reports the end of one, the timer wakes the caller. */
int ir_group_part_leftovers(struct ir_group *g, const uint32_t *workers, uint32_t n,
                            const char *mark, int sig) {
    if (g == NULL) return -ESRCH;
    if (sig < 0 || sig > SIGRTMAX || !are_workers(g, workers, n)) return -EINVAL;
    if (g->state != RUNNING) return 0;
    const uint32_t left = stray_signal_part(g, workers, n, mark, sig);
    if (left > 0 && (g->strays_alive == 0 || stray_has_unwatched(g))) {
        timer_set(g, LOOK_MS);
        timer_wake_early(g);
    }
    return (int)left;
}

/* What it has open: after its last run, or a start that failed. */
static void worker_close(struct ir_group *g, uint32_t index) {
    struct worker *w = &g->workers[index];
    worker_close_child_ends(w);
    for (int k = 0; k < 2; k++) w->streams[k].fd = fd_release(g, w->streams[k].fd);
    notify_close(g, index);
}

static void worker_renew(struct ir_group *g, uint32_t index, const struct ir_worker *worker) {
    struct worker *w = &g->workers[index];
    group_release(g, w);
    worker_close(g, index);
    pump_renew(g, index);
    w->pidfd = fd_close(w->pidfd);
    w->log_fd = worker->log_fd;
    w->error_log_fd = worker->error_log_fd;
    w->pid = 0;
    w->part_signal = w->failed_step = w->failed_errno = 0;
    w->reaped = w->failed = w->unreaped = w->stop_sent = false;
    w->sent_rights = w->rights_stuck = w->ready = w->triggered = false;
    w->active_ns = w->ping_ns = 0;
    w->progress = -1;
    w->status_size = 0;
    w->asks = 0;
    w->asks_to_read = w->has_asked = w->was_refused = false;
}

/* The arena is made anew, of what all workers have now: some may still wait for their first start. */
static int part_fill(struct ir_group *g, const struct ir_worker *workers, uint64_t blocked) {
    void *arena = g->arena;
    const size_t size = g->arena_size;
    struct slot *slots = g->slots;
    const int terminal_fd = tty_is_ours(g) ? g->terminal.fd : -1;
    int r = arena_fill(g, workers, g->n, blocked, guard_argv(g), terminal_fd);
    if (r < 0) {
        g->arena = arena;
        g->arena_size = size;
        g->slots = slots;
        return r;
    }
    if (arena != NULL) (void)munmap(arena, size);
    for (uint32_t i = 0; i < g->n; i++)
        for (int k = 0; k < 3; k++)
            if (g->workers[i].child_ends[k] >= 0)
                g->slots[i].stdio[k] = g->workers[i].child_ends[k];
    return 0;
}

static int worker_open(struct ir_group *g, uint32_t index, const struct ir_worker *worker,
                       int *ret_step) {
    int target_fd;
    *ret_step = IR_STEP_DESCRIPTORS;
    int r = pipes_open(g, worker, index, &target_fd);
    if (target_fd >= 0) {
        const uint32_t target = g->workers[index].target;
        const int renewed = target > 0 ? input_renew(g, target - 1, target_fd) : -EINVAL;
        if (target == 0) (void)fd_close(target_fd);
        if (r >= 0) r = renewed;
    }
    if (r < 0) return r;
    *ret_step = IR_STEP_NOTIFY;
    return notify_open_worker(g, worker, index);
}

/* Before its first start all of it is open since the spawn. */
static bool is_open(const struct worker *w) {
    const int *ends = w->child_ends;
    return w->pid == 0 && (ends[0] >= 0 || ends[1] >= 0 || ends[2] >= 0);
}

static int part_check(struct ir_group *g, const struct ir_worker *workers, const uint32_t *which,
                      uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        const struct worker *w = &g->workers[which[i]];
        if (!w->held || !has_ended(w)) return -EBUSY;
        if (workers[which[i]].pid > 0) return -EINVAL;
        if (w->pid == 0) continue;
        pump_close_worker(g, which[i]);
        if (!pump_is_idle(g, which[i])) return -EAGAIN;
    }
    return 0;
}

int part_prepare(struct ir_group *g, const struct ir_worker *workers, const uint32_t *which,
                 uint32_t n, uint64_t blocked, struct ir_failure *ret_failure) {
    ret_failure->step = IR_STEP_STDIO;
    int r = part_check(g, workers, which, n);
    if (r < 0) return r;
    ret_failure->step = IR_STEP_MEMORY;
    if ((r = part_fill(g, workers, blocked)) < 0) return r;
    uint32_t i = 0;
    for (; r >= 0 && i < n; i++) {
        ret_failure->worker = (int32_t)which[i];
        if (is_open(&g->workers[which[i]])) continue;
        worker_renew(g, which[i], &workers[which[i]]);
        r = worker_open(g, which[i], &workers[which[i]], &ret_failure->step);
    }
    if (r < 0)
        while (i > 0) worker_close(g, which[--i]);
    else ret_failure->step = IR_STEP_CLONE;
    return r;
}
