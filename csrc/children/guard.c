/* children/guard.c: the process that ends what survives a SIGKILL of the launcher.
 *
 * Nobody can catch SIGKILL. The parent-death signal reaches direct children only, and not those
 * of another thread than the main one. So a small program (guard/main.c) starts before the first
 * worker. It sleeps in one system call until the launcher is dead or a host program has executed
 * another one, then ends what the launch has left. Once nothing survives, the core ends it. The
 * command as process 1 needs none, except for a lease (lease.c): the kernel ends its namespace
 * with it, and it executes nothing. */
#include "group/group.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* After unshare(CLONE_NEWPID) the first child is process 1 of a new namespace. That must be a
 * worker, and when it ends the kernel ends the others. Until there is one, the link does not
 * exist (Linux 4.12). */
static bool children_are_elsewhere(void) {
    struct stat ours, theirs;
    if (stat("/proc/self/ns/pid", &ours) < 0) return false;
    return stat("/proc/self/ns/pid_for_children", &theirs) < 0 || ours.st_ino != theirs.st_ino;
}

/* Without it, a folder that is a minute old may go during the launch, with the message of an
 * error file. */
static void folder_hold(struct ir_group *g) {
    if (g->config.folder == NULL) return;
    int fd = fd_new(open(g->config.folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (fd < 0) return;
    g->guard.folder_fd = fd;
    (void)flock(fd, LOCK_SH | LOCK_NB); /* where locks are not to be had, nobody gets one */
}

/* A record lock (fcntl(2)) is the process's, and no fork inherits it. So the lock goes when this
 * process closes its close-on-exec descriptors, by its death or by an exec that succeeds. It
 * goes whatever has copies of the pipe. */
static bool pipe_lock(int fd) {
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    return fcntl(fd, F_SETLK, &whole) == 0;
}

/* A host program that is process 1 may execute another one, and lives on as that. */
static bool guard_is_needless(const struct ir_group *g) {
    const bool is_command = (g->config.flags & (IR_OWN_PROCESS | IR_GIVEN_MASK)) != 0;
    return g->self == 1 && is_command && g->config.lease_ms == 0;
}

int guard_open(struct ir_group *g) {
    struct guard *guard = &g->guard;
    folder_hold(g);
    if (g->config.guard == NULL || guard_is_needless(g) || children_are_elsewhere()) return 0;
    guard->program = strdup(g->config.guard);
    guard->folder = g->config.folder != NULL ? strdup(g->config.folder) : NULL;
    if (guard->program == NULL || (g->config.folder != NULL && guard->folder == NULL))
        return -ENOMEM;
    int r = fd_pipe(guard->pipe, 1);
    guard->locked = r == 0 && pipe_lock(guard->pipe[1]);
    return r;
}

/* Its arguments, in the order of guard/arguments.h. */
const char *const *guard_argv(struct ir_group *g) {
    struct guard *guard = &g->guard;
    (void)snprintf(guard->parent, sizeof guard->parent, "%d", (int)g->self);
    (void)snprintf(guard->session, sizeof guard->session, "%d", (int)getsid(0));
    (void)snprintf(guard->since, sizeof guard->since, "%llu", (unsigned long long)g->spawn_ticks);
    guard->argv[GUARD_SELF] = GUARD_NAME;
    guard->argv[GUARD_PARENT] = guard->parent;
    guard->argv[GUARD_SESSION] = guard->session;
    guard->argv[GUARD_SINCE] = guard->since;
    guard->argv[GUARD_MARK] = g->mark;
    guard->argv[GUARD_FOLDER] = guard->folder != NULL ? guard->folder : "";
    guard->argv[GUARD_CGROUP] = g->cgroup.path != NULL ? g->cgroup.path : "";
    if (g->config.guard_wait_ms > 0)
        (void)snprintf(guard->wait, sizeof guard->wait, "%d", (int)g->config.guard_wait_ms);
    guard->argv[GUARD_WAIT] = guard->wait;
    guard->argv[GUARD_LOCK] = guard->locked ? GUARD_LOCKED : "";
    guard->argv[GUARD_LEASE] = g->lease.deadline_ns == NULL         ? ""
                               : (g->config.flags & IR_OWN_PROCESS) ? GUARD_LEASE_OWN
                                                                    : GUARD_LEASE_HOST;
    return guard->argv;
}

static void guard_lost(struct ir_group *g, int step, int error) {
    if (g->lease.deadline_ns != NULL) {
        lease_guard_lost(g, error);
        return;
    }
    struct ir_event *event = event_push(g, IR_UNGUARDED, -1, g->guard.pid);
    event->code = step;
    event->signal = error;
}

/* Return why the guard ended before it held the lease: its exit code is the error, unless its
 * exec failed. */
int guard_failure(struct ir_group *g) {
    siginfo_t info;
    if (g->guard.pid != 0) guard_note(g);
    if (g->guard.error != 0) return -g->guard.error;
    if (g->guard.pid == 0) return -ESRCH;
    int r = child_reap(g, g->guard.pid, g->guard.pidfd, &info, WEXITED | WNOWAIT, NULL);
    return r == 0 && info.si_code == CLD_EXITED && info.si_status != 0 ? -info.si_status : -ESRCH;
}

/* Until its exec the guard has this process's environment and executable. Only its name, which
 * it inherits from this thread, shows the guard of a launch around this one that it is no
 * leftover. */
static pid_t guard_create(struct ir_group *g) {
    char name[16]; /* PR_GET_NAME(2const) */
    const bool named = prctl(PR_GET_NAME, name, 0, 0, 0) == 0;
    if (named) (void)prctl(PR_SET_NAME, GUARD_NAME, 0, 0, 0);
    pid_t pid = child_create(g, &g->slots[g->n], g->n, &g->guard.pidfd);
    if (named) (void)prctl(PR_SET_NAME, name, 0, 0, 0);
    return pid;
}

/* A launch without a guard is worth more than none, unless it has a lease: it continues, with an
 * event. */
void guard_start(struct ir_group *g) {
    struct guard *guard = &g->guard;
    if (guard->program == NULL) return;
    pid_t pid = guard_create(g);
    if (pid < 0) {
        guard_lost(g, IR_STEP_CLONE, -pid);
        return;
    }
    guard->pid = pid;
    if (guard->pidfd < 0) guard->pidfd = pidfd_open_of(g, pid);
    if (guard->pidfd >= 0) (void)fd_watch(g, guard->pidfd, EPOLLIN, WATCH_GUARD, 0);
}

/* For a worker that cannot do it itself (child_register): the caller forked it, or it does not know its pid here. */
void guard_add_worker(const struct ir_group *g, pid_t worker) {
    if (g->guard.pid == 0) return;
    ssize_t written = write(g->guard.pipe[1], &worker, sizeof worker);
    (void)written;
}

/* The core reaped it, and its process group is empty. Another process may get the number soon,
 * and without /proc the guard could not see that. */
void guard_drop_worker(const struct ir_group *g, const struct worker *w) {
    if (g->proc_error == 0 || group_is_left(g, w)) return;
    guard_add_worker(g, -w->pid);
}

/* Its failure, while the memory of it exists. */
void guard_note(struct ir_group *g) {
    if (g->slots == NULL || g->guard.program == NULL) return;
    g->guard.step = g->slots[g->n].step;
    g->guard.error = g->slots[g->n].error;
}

static void guard_clear(struct ir_group *g) {
    g->guard.pid = 0;
    g->guard.pidfd = fd_release(g, g->guard.pidfd);
}

/* Somebody has reaped it; the core wanted that only after a dismissal. */
void guard_reaped(struct ir_group *g) {
    guard_note(g);
    if (!g->guard.dismissed) guard_lost(g, g->guard.step, g->guard.error);
    guard_clear(g);
}

void guard_gone(struct ir_group *g) {
    siginfo_t info;
    if (g->guard.pid == 0) return;
    int r = child_reap(g, g->guard.pid, g->guard.pidfd, &info, WEXITED | WNOHANG, NULL);
    if (r < 0 || info.si_pid != 0) guard_reaped(g);
    else fd_unwatch(g, g->guard.pidfd); /* a tracer holds it */
}

/* Nothing is left that it would have to end. guard_stop reaps it; meanwhile there is other work. */
void guard_dismiss(struct ir_group *g) {
    if (g->guard.pid == 0) return;
    g->guard.dismissed = true;
    (void)child_signal(g, g->guard.pid, g->guard.pidfd, SIGKILL);
}

void guard_stop(struct ir_group *g) {
    struct guard *guard = &g->guard;
    if (guard->pid == 0) return;
    guard_dismiss(g);
    struct pollfd dead = {.fd = guard->pidfd, .events = POLLIN};
    if (guard->pidfd >= 0)
        while (poll(&dead, 1, GIVE_UP_MS) < 0 && errno == EINTR) continue;
    siginfo_t info;
    (void)child_reap(g, guard->pid, guard->pidfd, &info,
                     WEXITED | (guard->pidfd >= 0 ? WNOHANG : 0), NULL);
    guard_clear(g);
}

void guard_close(struct ir_group *g) {
    guard_stop(g);
    for (int i = 0; i < 2; i++) g->guard.pipe[i] = fd_close(g->guard.pipe[i]);
    free(g->guard.program);
    free(g->guard.folder);
}
