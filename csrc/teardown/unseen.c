/* teardown/unseen.c: what outlives the workers and no look at /proc shows. There is none, it is
 * another PID namespace's, it hides the processes of others (hidepid, proc(5)), or it is unreadable
 * for want of memory.
 *
 * What remains are numbers that cannot be a stranger's. The pidfd of its leader names a worker's
 * process group, after the leader's end, too. A child's number stays its own until its reaping,
 * and waitid(2) knows the children. With adoption, every survivor is a child of this process, or
 * becomes one when its parents die. */
#include "group/group.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define HIGHEST_NUMBER                                                                             \
    (1 << 22) /* PID_MAX_LIMIT (proc_sys_kernel(5)): the machine's own is in /proc */
#define PEEK (WEXITED | WNOHANG | WNOWAIT | __WALL)

bool child_is_foreign(const struct ir_group *g, pid_t pid) {
    for (uint32_t i = 0; i < g->foreign_count; i++)
        if (g->foreign[i] == pid) return true;
    return false;
}

/* Unreaped or abandoned workers are spoken of elsewhere, and the guard nowhere; what they started is. */
bool child_is_worker(const struct ir_group *g, pid_t pid) {
    return pid == g->guard.pid || is_worker_group(g, pid);
}

bool is_worker_group(const struct ir_group *g, pid_t group) {
    for (uint32_t i = 0; i < g->started; i++)
        if (g->workers[i].pid == group) return true;
    return false;
}

bool stray_adopts(const struct ir_group *g) {
    int adopts = 0;
    return g->self == 1 || (prctl(PR_GET_CHILD_SUBREAPER, &adopts) == 0 && adopts != 0);
}

/* ---- what workers have left in their process groups */

/* 0, or -errno: -ESRCH: nobody; -ENOSYS: unknown. Before Linux 6.9 the number is still that of
 * the worker's group if a child is in it. */
static int group_send(const struct ir_group *g, const struct worker *w, int sig) {
    siginfo_t info;
    const int r = child_signal_group(g, w->pid, w->pidfd, true, sig);
    if (r != -ENOSYS || !g->adopts) return r;
    if (child_wait(P_PGID, w->pid, &info, PEEK, NULL) < 0) return -ESRCH;
    return kill(-w->pid, sig) < 0 ? -errno : 0;
}

/* One that the core gave up is still in its group, and a leftover. */
static bool is_reaped(const struct ir_group *g, const struct worker *w) {
    siginfo_t info;
    return w->reaped && child_reap(g, w->pid, w->pidfd, &info, PEEK, NULL) < 0;
}

/* Whether somebody certainly lives in the group of a reaped worker. */
bool group_is_left(const struct ir_group *g, const struct worker *w) {
    const int r = group_send(g, w, 0);
    return r == 0 || r == -EPERM; /* -EPERM: he is another user by now */
}

/* The host program adopts orphans (it is process 1, or a subreaper). So a dead process in that
 * group is its child, which it knows nothing of. This reaps it by its pidfd, and asks whether
 * the group was still the worker's after it has read its number. */
static void group_reap(const struct ir_group *g, const struct worker *w) {
    siginfo_t info;
    while (child_wait(P_PGID, w->pid, &info, PEEK, NULL) == 0 && info.si_pid != 0) {
        int fd = pidfd_open_of(g, info.si_pid);
        const bool is_its = fd >= 0 && getpgid(info.si_pid) == w->pid && group_is_left(g, w);
        const int r =
            is_its ? child_wait(BY_PIDFD, fd, &info, WEXITED | WNOHANG | __WALL, NULL) : -1;
        (void)fd_close(fd);
        if (r < 0 || info.si_pid == 0) return;
    }
}

/* Whether the core can signal a worker's process group only before it reaps the worker: in a
 * library, before Linux 6.9. */
bool group_needs_leader(const struct ir_group *g, const struct worker *w) {
    return g->proc_error < 0 && !g->adopts && g->mark[0] != '\0' &&
           child_signal_group(g, w->pid, w->pidfd, true, 0) == -ENOSYS;
}

/* Those get no grace: nothing would show whether anybody but the leader lives. */
void groups_release(struct ir_group *g) {
    for (uint32_t i = 0; i < g->started; i++) group_release(g, &g->workers[i]);
}

void group_release(struct ir_group *g, struct worker *w) {
    siginfo_t info;
    if (!w->unreaped) return;
    (void)child_signal_group(g, w->pid, w->pidfd, false, SIGKILL);
    (void)child_reap(g, w->pid, w->pidfd, &info, WEXITED | WNOHANG, NULL);
    w->unreaped = false;
}

/* Whether there is somebody in the group of a reaped worker: sends to them. */
bool group_signal_rest(const struct ir_group *g, const struct worker *w, int sig) {
    if (w->pid == 0 || !is_reaped(g, w)) return false;
    if (!g->adopts && stray_adopts(g)) group_reap(g, w);
    const int r = group_send(g, w, sig);
    return r >= 0 || r == -EPERM;
}

/* Sends to all survivors (0: looks); returns in how many groups there is something. Adds them to `ret`, unless
 * that is NULL. */
uint32_t groups_signal(const struct ir_group *g, int sig, struct processes *ret) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < g->started; i++) {
        const struct worker *w = &g->workers[i];
        if (!group_signal_rest(g, w, sig)) continue;
        const struct process group = {
            .pid = w->pid, .group = w->pid, .state = '?', .ours = true, .name = "process group"};
        if (ret != NULL) (void)processes_add(ret, &group);
        n++;
    }
    return n;
}

static bool is_living(const struct ir_group *g, pid_t pid) {
    struct pollfd end = {.fd = pidfd_open_of(g, pid), .events = POLLIN};
    if (end.fd == -ESRCH) return false;
    const bool has_ended = end.fd >= 0 && poll(&end, 1, 0) > 0;
    (void)fd_close(end.fd);
    return !has_ended;
}

/* Who lives in these groups. The dead are in them, too, until somebody reaps them, which not every process 1 does. It
 * takes half a second: for the end. */
void groups_living(const struct ir_group *g, const struct processes *groups,
                   struct processes *ret) {
    for (pid_t pid = 1; groups->n > 0 && pid <= HIGHEST_NUMBER; pid++) {
        const pid_t group = getpgid(pid);
        if (group < 0 || !is_worker_group(g, group) || !is_living(g, pid)) continue;
        const struct process member = {
            .pid = pid, .group = group, .state = '?', .ours = true, .name = "?"};
        for (size_t i = 0; i < groups->n; i++)
            if (groups->at[i].pid == group) (void)processes_add(ret, &member);
    }
}

/* ---- the children */

/* Their numbers (proc_pid_tid_children(5)). -errno: there is no such list (CONFIG_PROC_CHILDREN), or it cannot be read. */
int children_list(const struct ir_group *g, struct processes *ret) {
    char path[48], piece[4096];
    (void)snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)g->self);
    if (g->proc_error < 0 || (g->config.flags & IR_NO_CHILDREN)) return -ENOENT;
    int fd = fd_new(open(path, O_RDONLY | O_CLOEXEC));
    if (fd < 0) return fd;
    int r = 0;
    pid_t pid = 0;
    ssize_t size = 0;
    while (r == 0 && (size = read(fd, piece, sizeof piece)) > 0)
        for (ssize_t i = 0; r == 0 && i < size; i++) {
            if (piece[i] != ' ') {
                pid = pid * 10 + (piece[i] - '0');
                continue;
            }
            if (!processes_add(ret, &(struct process){.pid = pid})) r = -ENOMEM;
            pid = 0;
        }
    if (size < 0) r = -errno;
    (void)fd_close(fd);
    return r;
}

static void child_add(const struct ir_group *g, pid_t pid, struct processes *ret) {
    siginfo_t info;
    if (child_is_worker(g, pid) || child_is_foreign(g, pid)) return;
    const pid_t group = getpgid(pid); /* half the time of waitid, for the many that are not there */
    if (group < 0 || child_wait(P_PID, pid, &info, PEEK, NULL) < 0) return;
    const struct process child = {.pid = pid,
                                  .parent = g->self,
                                  .group = group,
                                  .state = info.si_pid != 0 ? 'Z' : '?',
                                  .name = "?"};
    (void)processes_add(ret, &child);
}

static void *number_of_thread(void *ret_number) {
    *(pid_t *)ret_number = (pid_t)syscall(SYS_gettid);
    return NULL;
}

/* chase_begin's; else a thread's, which comes from the same row as a process's. 0: not known. */
pid_t number_newest(void *group) {
    struct ir_group *g = group;
    pthread_t thread;
    const pid_t number = chase_begin(NULL);
    if (number > 0) return number;
    g->probe = 0;
    if (pthread_create(&thread, NULL, number_of_thread, &g->probe) == 0)
        (void)pthread_join(thread, NULL);
    return g->probe;
}

/* All numbers take half a second: only if some child lives that has none of those given since the first worker's. */
static void children_by_number(struct ir_group *g, struct processes *ret) {
    siginfo_t info;
    pid_t first = HIGHEST_NUMBER;
    for (uint32_t i = 0; i < g->started; i++)
        if (g->workers[i].pid > 0 && g->workers[i].pid < first) first = g->workers[i].pid;
    for (pid_t pid = number_newest(g); pid > first; pid--) child_add(g, pid, ret);
    if (ret->n > 0 || g->alive > 0 || g->guard.pid != 0) return;
    if (child_wait(P_ALL, 0, &info, PEEK, NULL) < 0) return;
    for (pid_t pid = 1; pid <= HIGHEST_NUMBER; pid++) child_add(g, pid, ret);
}

/* Those that live or are not reaped yet, without workers, guard and foreign ones. */
void children_find(struct ir_group *g, struct processes *ret) {
    struct processes listed = {0};
    if (children_list(g, &listed) == 0)
        for (size_t i = 0; i < listed.n; i++) child_add(g, listed.at[i].pid, ret);
    else children_by_number(g, ret);
    free(listed.at);
}
