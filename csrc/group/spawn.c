/* group/spawn.c: the clone loop. Everything that can fail comes before the first clone.
 *
 * A child shares this memory until its exec (clone(CLONE_VM) without CLONE_VFORK, each on a
 * separate stack), so that children start side by side without a copy of the page table. What
 * they read is in one arena, which goes when a close-on-exec pipe says that the last one has
 * left. */
#include "group/group.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SPARE_DESCRIPTORS 3 /* /proc, a process's stat, a leftover's pidfd */

static uint64_t mask_of(const sigset_t *set) {
    uint64_t mask = 0;
    for (int sig = 1; sig <= SIGRTMAX; sig++)
        if (sigismember(set, sig) == 1) mask |= SIGNAL_BIT(sig);
    return mask;
}

static const char *label_of(const char *given) {
    return given != NULL ? given : "";
}

/* Labels outlive the spawn; one copy each, and few of them. */
static int labels_copy(struct ir_group *g, const struct ir_worker *workers, uint32_t n) {
    size_t size = 1;
    for (uint32_t i = 0; i < n; i++)
        for (int k = 0; k < 2; k++)
            size += strlen(label_of(workers[i].label[k])) +
                    strlen(label_of(workers[i].label_more[k])) + 2;
    char *at = g->labels = malloc(size);
    if (at == NULL) return -ENOMEM;
    for (uint32_t i = 0; i < n; i++)
        for (int k = 0; k < 2; k++) {
            struct stream *stream = &g->workers[i].streams[k];
            stream->label = strcpy(at, label_of(workers[i].label[k]));
            stream->label_size = (uint32_t)strlen(at);
            at += stream->label_size + 1;
            stream->label_more = strcpy(at, label_of(workers[i].label_more[k]));
            stream->label_more_size = (uint32_t)strlen(at);
            at += stream->label_more_size + 1;
        }
    return 0;
}

/* One block for all, which costs only the pages in use. Without memory for its output, a worker
 * would wait for the launcher forever. So this, too, comes before the first worker. */
static int buffers_make(struct ir_group *g, const struct ir_worker *workers, uint32_t n) {
    size_t size = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (pipes_has(&workers[i], 1)) size += STREAM_BUFFER;
        if (pipes_has(&workers[i], 2)) size += STREAM_BUFFER + TAIL_BUFFER;
    }
    if (size == 0) return 0;
    char *at = g->buffers = malloc(size);
    if (at == NULL) return -ENOMEM;
    for (uint32_t i = 0; i < n; i++) {
        for (int k = 0; k < 2; k++) {
            if (!pipes_has(&workers[i], k + 1)) continue;
            g->workers[i].streams[k].buffer = at;
            at += STREAM_BUFFER;
        }
        if (!pipes_has(&workers[i], 2)) continue;
        g->workers[i].tail = at;
        at += TAIL_BUFFER;
    }
    return 0;
}

static int pipes_make(struct ir_group *g, const struct ir_worker *workers, uint32_t n) {
    uint32_t targets = 0;
    int *target_fds = calloc(n + 1, sizeof *target_fds);
    if (target_fds == NULL) return -ENOMEM;
    int r = 0;
    for (uint32_t i = 0; r >= 0 && i < n; i++) {
        struct worker *w = &g->workers[i];
        w->log_fd = workers[i].log_fd;
        w->error_log_fd = workers[i].error_log_fd;
        w->forked = workers[i].pid;
        w->held = workers[i].flags & IR_WORKER_HELD;
        r = pipes_open(g, &workers[i], i, &target_fds[targets]);
        if (target_fds[targets] >= 0) w->target = ++targets;
    }
    if (r >= 0) r = input_open(g, target_fds, targets);
    else
        for (uint32_t i = 0; i < targets; i++) (void)fd_close(target_fds[i]);
    free(target_fds);
    return r;
}

/* The source of its death: its pidfd; else SIGCHLD in an own process; else a thread.
 * Edge-triggered: a worker that died in the hands of a tracer polls readable long before anybody
 * can reap it. do_notify_parent() wakes the pidfd a second time then. */
static int worker_watch(struct ir_group *g, uint32_t index) {
    struct worker *w = &g->workers[index];
    if (w->pidfd < 0) w->pidfd = pidfd_open_of(g, w->pid);
    if (w->pidfd >= 0) {
        struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u64 = index};
        if (epoll_ctl(g->exits_fd, EPOLL_CTL_ADD, w->pidfd, &event) == 0) return 0;
        w->pidfd = fd_close(w->pidfd);
    }
    if (g->config.flags & IR_OWN_PROCESS) return 0;
    return waiter_start(g, index);
}

static int worker_start(struct ir_group *g, uint32_t index) {
    struct worker *w = &g->workers[index];
    struct slot *slot = &g->slots[index];
    int r = w->forked > 0 ? 0 : window_use(g, index);
    if (r < 0) return r;
    int64_t now = clock_ns();
    pid_t pid = w->forked > 0 ? w->forked : child_create(g, slot, index, &w->pidfd);
    if (pid < 0) return pid;
    w->pid = pid;
    if (slot->terminal_fd >= 0) tty_owner_started(g, pid);
    (void)setpgid(pid, pid); /* both sides call it; EACCES once it has exec'ed */
    if (w->forked > 0 || slot->guard_fd < 0) guard_add_worker(g, pid);
    worker_close_child_ends(w);
    if (w->held) g->held--;
    else g->started++;
    w->held = false;
    g->alive++;
    event_push(g, IR_STARTED, (int)index, pid)->time_ns = now;
    r = worker_watch(g, index);
    if (r == 0) return 0;
    (void)child_signal(g, pid, w->pidfd,
                       SIGKILL); /* nobody would ever learn of its end: it must not continue */
    worker_exited_wait(g, index);
    return r;
}

/* A caller's fork is older than the spawn: what it starts is of this launch all the same. */
static void spawn_date(struct ir_group *g, const struct ir_worker *workers, uint32_t n) {
    struct process p;
    for (uint32_t i = 0; i < n; i++)
        if (workers[i].pid > 0 && process_read(workers[i].pid, &p) &&
            p.start_ticks < g->spawn_ticks)
            g->spawn_ticks = p.start_ticks;
}

static int spawn_prepare(struct ir_group *g, const struct ir_worker *workers, uint32_t n,
                         uint64_t blocked, int *ret_step) {
    *ret_step = IR_STEP_STDIO;
    for (uint32_t i = 0; i < n; i++)
        for (int k = 0; k < 3; k++)
            if (workers[i].stdio[k] >= 0 && workers[i].stdio[k] < 3) return -EINVAL;
    for (uint32_t i = 0; i < n; i++)
        if ((workers[i].flags & IR_WORKER_HELD) && workers[i].pid > 0) return -EINVAL;
    for (uint32_t i = 0; i < n; i++) /* in a new PID namespace it cannot send the guard its pid */
        if ((workers[i].flags & IR_WORKER_ISOLATE) && g->config.lease_ms > 0) return -EINVAL;
    *ret_step = IR_STEP_TERMINAL;
    for (uint32_t i = 0; i < n; i++) {
        int r = (workers[i].flags & IR_WORKER_FOREGROUND) ? tty_prepare(g) : 0;
        if (r < 0) return r;
    }
    *ret_step = IR_STEP_DESCRIPTORS;
    for (uint32_t i = 0; i < n; i++) {
        bool first = (workers[i].flags & IR_WORKER_ISOLATE) && g->lifeline[0] < 0;
        int r = first ? fd_pipe(g->lifeline, 1) : 0;
        if (r < 0) return r;
    }
    spawn_date(g, workers, n);
    *ret_step = IR_STEP_LEASE;
    int r = lease_open(g, ir_group_kill);
    if (r < 0) return r;
    *ret_step = IR_STEP_MEMORY;
    r = cgroup_open(g, n);
    if (r >= 0)
        r = arena_fill(g, workers, n, blocked, guard_argv(g), tty_is_ours(g) ? g->terminal.fd : -1);
    if (r >= 0) r = labels_copy(g, workers, n);
    if (r >= 0) r = buffers_make(g, workers, n);
    return r;
}

/* How many of so many numbers from `first` on are free: poll(2) says that of each (POLLNVAL). */
static int fds_count_free(struct pollfd *fds, uint32_t first, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) fds[i] = (struct pollfd){.fd = (int)(first + i)};
    int r, count = 0;
    while ((r = poll(fds, n, 0)) < 0 && errno == EINTR) continue;
    if (r < 0) return -errno;
    for (uint32_t i = 0; i < n; i++) count += (fds[i].revents & POLLNVAL) != 0;
    return count;
}

/* A descriptor for each worker is still to come, and in the end a few to look for leftovers
 * with. Without those a leftover would outlive the launch. Holes and a stranger's high
 * descriptor count right. */
static int spawn_check_limit(const struct ir_group *g, uint32_t n) {
    const uint32_t wanted = (g->config.flags & IR_NO_PIDFD ? 0 : n) + SPARE_DESCRIPTORS;
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) < 0) return -errno;
    const int lowest = fd_duplicate(g->execs_fd);
    if (lowest < 0) return lowest;
    (void)fd_close(lowest);
    struct pollfd *fds = calloc(wanted, sizeof *fds);
    if (fds == NULL) return -ENOMEM;
    uint32_t at = (uint32_t)lowest, count = 0;
    int r = 0;
    while (r >= 0 && count < wanted) {
        const rlim_t left = limit.rlim_cur > at ? limit.rlim_cur - at : 0;
        const uint32_t size = left < wanted ? (uint32_t)left : wanted;
        r = size == 0 ? -EMFILE : fds_count_free(fds, at, size);
        count += r > 0 ? (uint32_t)r : 0;
        at += size;
    }
    free(fds);
    return r < 0 ? r : 0;
}

/* After the start of the guard. A copy of a pipe's end in it would, until its exec, be one more
 * writer. Ranks that end at once would seem to have left it to somebody. */
static int spawn_open(struct ir_group *g, const struct ir_worker *workers, uint32_t n,
                      int *ret_step) {
    *ret_step = IR_STEP_DESCRIPTORS;
    int r = pipes_make(g, workers, n);
    if (r >= 0) r = rest_open(g, workers, n);
    if (r >= 0) r = lines_open(g, workers, n);
    if (r < 0) return r;
    *ret_step = IR_STEP_NOTIFY;
    r = notify_open(g, workers, n);
    if (r < 0) return r;
    *ret_step = IR_STEP_DESCRIPTORS;
    return spawn_check_limit(g, n);
}

/* The read end of a pipe whose write end only the children hold, until they exec. */
static int spawn_open_execs(struct ir_group *g) {
    int fds[2];
    int r = fd_pipe(fds, 0);
    if (r < 0) return r;
    g->execs_fd = fds[0];
    r = fd_watch(g, fds[0], EPOLLIN, WATCH_EXECS, 0);
    if (r < 0) {
        (void)fd_close(fds[1]);
        return r;
    }
    return fds[1];
}

static int spawn_all(struct ir_group *g, uint32_t n, int32_t *ret_worker) {
    for (uint32_t i = 0; i < n; i++) {
        /* SIGCHLD may be that of a caller's fork, which is unknown before all of them have
         * started */
        if (g->signal_fd >= 0 && g->workers[i].forked <= 0) signal_ready(g);
        if (g->state != RUNNING) break;
        if (g->workers[i].held) {
            g->started++;
            g->held++;
            continue;
        }
        *ret_worker = (int32_t)i;
        int r = worker_start(g, i);
        if (r < 0) return r;
    }
    return (int)(g->started - g->held);
}

/* A worker may end, and its output be read, before the next one starts: its heading comes first. */
static int spawn_held(struct ir_group *g, const struct ir_worker *anew, const uint32_t *workers,
                      uint32_t n, int32_t *ret_worker) {
    int started = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (g->signal_fd >= 0) signal_ready(g);
        if (g->state != RUNNING) break;
        if (!g->workers[workers[i]].held || g->workers[workers[i]].pid != 0) continue;
        *ret_worker = (int32_t)workers[i];
        int r = worker_start(g, workers[i]);
        if (r < 0) return r;
        if (anew != NULL) pump_log_heading(g, workers[i], anew[workers[i]].heading);
        started++;
    }
    return started;
}

/* Earlier children still read the arena. Only a SIGSTOP from outside can hold one before its exec. */
static int spawn_await_execs(struct ir_group *g) {
    struct pollfd execs = {.fd = g->execs_fd, .events = POLLIN};
    if (g->execs_fd < 0) return 0;
    int r;
    while ((r = poll(&execs, 1, GIVE_UP_MS)) < 0 && errno == EINTR) continue;
    if (r <= 0) return r < 0 ? -errno : -ETIMEDOUT;
    wait_execs(g);
    return 0;
}

int ir_group_spawn(struct ir_group *g, const struct ir_worker *workers, uint32_t n,
                   struct ir_failure *ret_failure) {
    if (g == NULL) return -ESRCH;
    *ret_failure = (struct ir_failure){0};
    if (g->state != IDLE || n > g->capacity) return -EINVAL;
    sigset_t all, before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    forks_hold();
    g->n = n;
    g->spawn_ticks = clock_ticks();
    g->state = RUNNING;
    int step = 0;
    int32_t worker = 0;
    int r = spawn_prepare(g, workers, n, mask_of(&before), &step);
    if (r >= 0) step = IR_STEP_DESCRIPTORS;
    int execs_end = r < 0 ? r : spawn_open_execs(g);
    if (execs_end >= 0) guard_start(g);
    if (execs_end >= 0) stray_foresee(g);
    r = execs_end < 0 ? execs_end : spawn_open(g, workers, n, &step);
    if (r == 0) {
        step = IR_STEP_LEASE;
        r = lease_await_guard(g);
        if (r == -ESRCH) r = guard_failure(g);
    }
    if (r == 0) {
        step = IR_STEP_CLONE;
        r = window_lay(g, execs_end);
        if (r >= 0) r = spawn_all(g, n, &worker);
        const int awaited = window_await_all(g);
        if (r >= 0 && awaited < 0) r = awaited;
        input_resume(g);
    }
    window_close(g);
    (void)fd_close(execs_end);
    for (uint32_t i = g->started; i < n; i++) worker_close_child_ends(&g->workers[i]);
    forks_release();
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (step == IR_STEP_LEASE) worker = (int32_t)n; /* the failure is no worker's */
    if (r < 0) *ret_failure = (struct ir_failure){.worker = worker, .step = step, .error = -r};
    return r;
}

/* anew: as to ir_group_part_start; NULL: the arena has what they need. */
static int spawn_later(struct ir_group *g, const struct ir_worker *anew, const uint32_t *which,
                       uint32_t n, struct ir_failure *ret_failure) {
    *ret_failure = (struct ir_failure){0};
    for (uint32_t i = 0; i < n; i++)
        if (which[i] >= g->n) return -EINVAL;
    if (g->state != RUNNING) return 0;
    sigset_t all, before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    forks_hold();
    struct ir_failure failure = {.step = IR_STEP_CLONE};
    int r = spawn_await_execs(g);
    if (r >= 0 && anew != NULL) r = part_prepare(g, anew, which, n, mask_of(&before), &failure);
    int execs_end = r < 0 ? r : spawn_open_execs(g);
    r = execs_end < 0 ? execs_end : spawn_held(g, anew, which, n, &failure.worker);
    (void)fd_close(execs_end);
    if (anew != NULL)
        for (uint32_t i = 0; i < n; i++) worker_close_child_ends(&g->workers[which[i]]);
    input_resume(g);
    forks_release();
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    failure.error = -r;
    if (r < 0) *ret_failure = failure;
    return r;
}

int ir_group_start_held(struct ir_group *g, const uint32_t *workers, uint32_t n,
                        struct ir_failure *ret_failure) {
    if (g == NULL) return -ESRCH;
    return spawn_later(g, NULL, workers, n, ret_failure);
}

int ir_group_part_start(struct ir_group *g, const struct ir_worker *workers, uint32_t n,
                        const uint32_t *which, uint32_t m, struct ir_failure *ret_failure) {
    if (g == NULL) return -ESRCH;
    if (n != g->n) return -EINVAL;
    return spawn_later(g, workers, which, m, ret_failure);
}
