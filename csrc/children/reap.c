/* children/reap.c: exits, in the order of death.
 *
 * waitid answers in birth order; an epoll set of pidfds returns them in the order in which they
 * became ready. So pidfds have a separate epoll set (exits_fd), which always comes first.
 * waitid(P_ALL) reaps adopted orphans after that, in an own process only. */
#include "group/group.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* Once: a refusal for one is a refusal for all. */
static void worker_report_unplaced(struct ir_group *g, uint32_t index) {
    int error = g->slots[index].memory_error;
    if (error == 0 || g->unplaced_reported) return;
    g->unplaced_reported = true;
    event_push(g, IR_UNPLACED, (int)index, g->workers[index].pid)->signal = error;
}

/* The arena may be new, for others that restarted (part.c): it says nothing of an earlier start. */
static void worker_note_start(struct ir_group *g, uint32_t index) {
    const struct slot *slot = &g->slots[index];
    if (slot->step != 0) {
        g->workers[index].failed_step = slot->step;
        g->workers[index].failed_errno = slot->error;
    }
    worker_report_unplaced(g, index);
}

static void worker_report_start_failure(struct ir_group *g, uint32_t index) {
    const struct worker *w = &g->workers[index];
    if (g->slots != NULL) worker_note_start(g, index);
    if (w->failed_step == 0 || w->failed_step == IR_STEP_LEASE) return; /* one event for all */
    struct ir_event *event = event_push(g, IR_START_FAILED, (int)index, w->pid);
    event->code = w->failed_step;
    event->signal = w->failed_errno;
}

/* It reads its last output before the event of its end, so that the report has its last words. */
static void worker_finish(struct ir_group *g, uint32_t index, const siginfo_t *info,
                          const struct rusage *usage) {
    struct worker *w = &g->workers[index];
    int64_t now = clock_ns();
    lease_check(g); /* what the guard has killed has not failed */
    w->reaped = true;
    g->alive--;
    if (w->pidfd >= 0) (void)epoll_ctl(g->exits_fd, EPOLL_CTL_DEL, w->pidfd, NULL);
    guard_drop_worker(g, w);
    pump_drain(g, index);
    notify_close(g, index);
    worker_report_start_failure(g, index);
    struct ir_event *event = event_push(g, IR_EXITED, (int)index, w->pid);
    event->time_ns = now;
    if (tty_worker_ended(g, index, info != NULL && info->si_code != CLD_EXITED))
        event->flags |= IR_HAD_TERMINAL;
    if (w->stop_sent) event->flags |= IR_AFTER_STOP;
    if (info == NULL || info->si_code != CLD_EXITED || info->si_status != 0)
        w->failed = g->went_badly = true;
    if (info == NULL) {
        event->flags |= IR_STATUS_LOST;
        return;
    }
    if (info->si_code == CLD_EXITED) event->code = info->si_status;
    else event->signal = info->si_status;
    if (event->signal == SIGKILL) event->value = g->overrun_ms;
    if (info->si_code == CLD_DUMPED) event->flags |= IR_DUMPED_CORE;
    event->user_us = (int64_t)usage->ru_utime.tv_sec * 1000000 + usage->ru_utime.tv_usec;
    event->system_us = (int64_t)usage->ru_stime.tv_sec * 1000000 + usage->ru_stime.tv_usec;
    event->max_rss_kib = usage->ru_maxrss;
}

/* A tracer holds a worker whose pidfd polls readable while waitid says nothing. That lasts until
 * the kernel reports to its real parent, which wakes the pidfd's watch anew. */
void worker_reap(struct ir_group *g, uint32_t index, int options) {
    struct worker *w = &g->workers[index];
    if (w->reaped || w->pid == 0) return;
    siginfo_t info;
    struct rusage usage;
    w->unreaped = group_needs_leader(g, w);
    if (w->unreaped) options |= WNOWAIT;
    int r = child_reap(g, w->pid, w->pidfd, &info, WEXITED | options, &usage);
    if (r < 0) worker_finish(g, index, NULL, NULL); /* ECHILD: the host program took it */
    else if (info.si_pid != 0) worker_finish(g, index, &info, &usage);
}

void worker_exited_wait(struct ir_group *g, uint32_t index) {
    worker_reap(g, index, 0);
}

void wait_exits(struct ir_group *g) {
    struct epoll_event ready[64];
    for (;;) {
        int n = epoll_wait(g->exits_fd, ready, 64, 0);
        if (n <= 0) return;
        for (int i = 0; i < n; i++) worker_reap(g, (uint32_t)ready[i].data.u64, WNOHANG);
    }
}

static uint32_t worker_of(const struct ir_group *g, pid_t pid) {
    for (uint32_t i = 0; i < g->started; i++)
        if (g->workers[i].pid == pid && !g->workers[i].reaped) return i;
    return UINT32_MAX;
}

/* Own process: everything dead, the workers (without pidfds) and adopted orphans. */
void wait_any(struct ir_group *g) {
    wait_exits(g);
    for (;;) {
        siginfo_t info;
        struct rusage usage;
        int r = child_wait(P_ALL, 0, &info, WEXITED | WNOHANG | __WALL, &usage);
        if (r < 0 || info.si_pid == 0) return;
        uint32_t index = worker_of(g, info.si_pid);
        if (index != UINT32_MAX) worker_finish(g, index, &info, &usage);
        else if (info.si_pid == g->guard.pid) guard_reaped(g);
        else foreign_remove(g, info.si_pid);
    }
}

/* The guard is a child, too: then /proc must show whether it is the only one
 * (proc_pid_tid_children(5): exact while nobody reaps, and only the core does). Without that
 * file it must go first. But the workers' process groups go before it: the guard could end those
 * after a SIGKILL of the launcher. */
bool wait_has_children(struct ir_group *g) {
    siginfo_t info;
    if (g->guard.pid != 0) {
        char path[48], list[64];
        (void)snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)g->self);
        const bool is_there = g->proc_error == 0 && !(g->config.flags & IR_NO_CHILDREN);
        ssize_t n = is_there ? process_file(path, list, sizeof list) : -ENOENT;
        if (n > 0) return atoi(list) != g->guard.pid || strchr(list, ' ') != list + n - 1;
        if (groups_signal(g, 0, NULL) > 0) return true;
        guard_stop(g);
    }
    return child_wait(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT | __WALL, NULL) != -ECHILD;
}

/* Every child has left this memory (by exec or by its end): the arena can go, unless workers are
 * still to start from it. */
void wait_execs(struct ir_group *g) {
    for (uint32_t i = 0; i < g->started; i++) worker_note_start(g, i);
    guard_note(g);
    if (g->held == 0) arena_free(g);
    g->execs_fd = fd_release(g, g->execs_fd);
}
