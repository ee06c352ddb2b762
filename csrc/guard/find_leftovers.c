/* guard/find_leftovers.c: kills all that a launcher has left, after its death or the end of its
 * ranks' lease.
 *
 * A leftover came to the same parent as the guard, in the launcher's session. Also, it has the
 * launch's mark in its environment or is in a worker's process group. The descendants of these
 * are leftovers, too; nothing older than the launch is one. Whole looks at /proc find what
 * stays; the chase finds what forks and exits. Where /proc does not show this PID namespace,
 * only members of the workers' process groups count as leftovers. */
#include "guard/find_leftovers.h"
#include "guard/arguments.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BORN_MS 200 /* for a worker to write its number, while somebody else holds the pipe open */
#define EMPTY_SCANS 3
#define GENERATIONS 16 /* that fork and have not exited yet */

/* Those who have started meanwhile, too, where the launcher lives. A child that a library's host forked may hold the
 * other end open. */
static void read_workers(struct launch *launch) {
    char *end = (char *)launch->workers + launch->n * sizeof *launch->workers;
    ssize_t n;
    if (fcntl(0, F_SETFL, O_NONBLOCK) < 0) return;
    do n = read(0, end, sizeof launch->workers - (size_t)(end - (char *)launch->workers));
    while (n < 0 && errno == EINTR);
    if (n > 0) launch->n += (size_t)n / sizeof *launch->workers;
}

/* Without /proc the launcher takes back the number of a process group that it knows to be empty. */
static bool is_taken_back(const struct launch *launch, pid_t worker) {
    for (size_t i = 0; i < launch->n; i++)
        if (launch->workers[i] == -worker) return true;
    return false;
}

/* A number is its group's as long as anybody is in that. If its leader lives, that shows the
 * session (getsid(2)). */
static void kill_groups(const struct launch *launch) {
    for (size_t i = 0; i < launch->n; i++) {
        const pid_t worker = launch->workers[i];
        if (worker <= 1 || is_taken_back(launch, worker)) continue;
        const pid_t session = getsid(worker);
        if (session < 0 || session == launch->session) (void)kill(-worker, SIGKILL);
    }
}

static bool is_lasting(int error) {
    return error == -ENOENT || error == -EXDEV || error == -EACCES || error == -EPERM;
}

/* The parent, and of a host program that lives all its ancestors, and process 1: somebody may
 * have entered a PID namespace from outside. */
static void find_adopters(struct launch *launch) {
    struct process ancestor = {.parent = launch->host};
    launch->adopters[0] = getppid();
    launch->adopters_n = 1;
    if (launch->host != 0) launch->adopters[launch->adopters_n++] = 1;
    while (ancestor.parent > 0 && launch->adopters_n < ADOPTERS) {
        if (!process_read(ancestor.parent, &ancestor)) return;
        launch->adopters[launch->adopters_n++] = ancestor.pid;
    }
}

static bool is_adopter(const struct launch *launch, pid_t pid) {
    for (size_t i = 0; i < launch->adopters_n; i++)
        if (launch->adopters[i] == pid) return true;
    return false;
}

static bool is_worker(const struct launch *launch, pid_t pid) {
    for (size_t i = 0; i < launch->n; i++)
        if (launch->workers[i] == pid) return true;
    return false;
}

static bool is_in_worker_group(const struct launch *launch, const struct process *p) {
    return p->session == launch->session && is_worker(launch, p->group);
}

/* The guard of a launch inside this one: it has its own to end, and then ends itself. */
static bool is_guard(pid_t pid) {
    char path[32], ours[PATH_MAX], theirs[PATH_MAX];
    (void)snprintf(path, sizeof path, "/proc/%d/exe", (int)pid);
    ssize_t n = readlink("/proc/self/exe", ours, sizeof ours);
    return n > 0 && readlink(path, theirs, sizeof theirs) == n &&
           memcmp(ours, theirs, (size_t)n) == 0;
}

/* A guard has this name before its exec, too; but anybody may call himself so. Wait until its
 * exec, or for GIVE_UP_MS after the first such process. */
static bool may_become_guard(struct launch *launch, const struct process *p) {
    if (p->state == 'Z' || strcmp(p->name, GUARD_NAME) != 0) return false;
    if (is_worker(launch, p->pid)) return false;
    if (launch->awaits_until_ns == 0) launch->awaits_until_ns = clock_ns() + GIVE_UP_MS * NS_PER_MS;
    if (clock_ns() > launch->awaits_until_ns) return false;
    launch->awaits = true;
    return true;
}

static bool is_killed(const struct launch *launch, const struct process *p) {
    for (size_t i = 0; i < launch->killed.n; i++)
        if (launch->killed.at[i].pid == p->pid &&
            launch->killed.at[i].start_ticks == p->start_ticks)
            return true;
    return false;
}

/* Once each: a killed process cannot fork any more, and may take a while to go. */
static void kill_one(struct launch *launch, const struct process *p) {
    if (p->state == 'X' || is_killed(launch, p)) return;
    if (is_guard(p->pid)) {
        launch->unsure = true;
        return;
    }
    if (may_become_guard(launch, p)) return;
    int pidfd = process_open(p->pid);
    (void)process_signal(p, pidfd, SIGKILL);
    if (pidfd >= 0) (void)close(pidfd);
    if (!processes_add(&launch->killed, p))
        launch->unsure = true; /* it gets another SIGKILL: no harm */
    launch->found = true;
}

/* Killed at first sight: it may continue to fork. The orphans of a launch come to where the
 * guard has. A process that has the mark and a parent elsewhere is somebody's who looks at the
 * launch. This reads no environment of what it already killed: a process that hangs in the
 * kernel may hold its memory's lock. */
static void classify(struct process *p, void *with) {
    struct launch *launch = with;
    bool never = p->start_ticks < launch->since || p->pid == getpid() || is_adopter(launch, p->pid);
    p->ours = !never && is_killed(launch, p);
    if (!never && !p->ours && is_adopter(launch, p->parent)) {
        p->ours = is_in_worker_group(launch, p);
        if (!p->ours && !launch->groups_only) {
            enum mark found = process_mark(p->pid, launch->mark);
            p->ours = found == MARK_FOUND;
            launch->found |= found == MARK_UNKNOWN;
        }
    }
    p->decided = never || p->ours;
    if (p->ours) kill_one(launch, p);
}

/* Its parent has the mark, too, and so on up to one that came to where the guard has. It forks,
 * and has not exited yet. */
static bool descends_from_ours(const struct launch *launch, struct process p) {
    for (int i = 0; i < GENERATIONS; i++) {
        struct process parent;
        if (is_adopter(launch, p.parent)) return true;
        if (!process_read(p.parent, &parent)) { /* gone meanwhile: who has taken its child? */
            if (!process_read(p.pid, &p)) return false;
        } else if (process_mark(parent.pid, launch->mark) != MARK_FOUND) {
            return false;
        } else {
            p = parent;
        }
    }
    return false;
}

static enum chased classify_young(pid_t pid, void *with) {
    struct launch *launch = with;
    struct process p;
    if (!process_read(pid, &p) || process_has_ended(&p)) return CHASED_GONE;
    launch->found = false;
    classify(&p, launch);
    if (!p.decided) {
        enum mark found = process_mark(pid, launch->mark);
        if (found == MARK_UNKNOWN) return CHASED_GONE;
        if (found == MARK_FOUND && descends_from_ours(launch, p)) kill_one(launch, &p);
    }
    return launch->found ? CHASED_KILLED : CHASED_OTHER;
}

static void await(int fd, int64_t end_ns) {
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    int64_t left_ms = (end_ns - clock_ns()) / NS_PER_MS;
    while (left_ms > 0 && poll(&ready, 1, (int)left_ms) < 0 && errno == EINTR)
        left_ms = (end_ns - clock_ns()) / NS_PER_MS;
}

/* Whether there was anything new and invisible that may show later, or that may become a guard. */
static bool scan_and_kill(struct launch *launch) {
    struct processes all = {0};
    const pid_t last = chase_begin(NULL);
    launch->found = launch->awaits = false;
    read_workers(launch);
    int error = process_sees_itself(getpid());
    if (error == 0) {
        find_adopters(launch);
        error = processes_scan(&all, classify, launch);
    }
    if (error < 0) kill_groups(launch);
    if (is_lasting(error)) {
        launch->unsure = true;
        free(all.at);
        await(0, clock_ns() + BORN_MS * NS_PER_MS);
        return false;
    }
    if (error < 0) launch->found = true;
    processes_spread(&all);
    for (size_t i = 0; i < all.n; i++)
        if (all.at[i].ours) kill_one(launch, &all.at[i]);
    free(all.at);
    const bool found = launch->found;
    const bool chased = !launch->groups_only && chase(last, chase_begin, classify_young, launch);
    return chased || found || launch->awaits;
}

/* A rank that became another user (sudo) cannot be killed from here, and /proc may hide it
 * (hidepid). */
static bool is_foreign_left(const struct launch *launch) {
    for (size_t i = 0; i < launch->n; i++)
        if (launch->workers[i] > 1 && kill(-launch->workers[i], 0) < 0 && errno == EPERM)
            return true;
    return false;
}

/* SIGKILL does not end at once what hangs in the kernel. */
static bool are_dead(const struct processes *killed, int64_t end_ns) {
    bool all = true;
    for (size_t i = 0; i < killed->n; i++) {
        const struct process *p = &killed->at[i];
        struct process now;
        const int pidfd = process_open(p->pid);
        if (pidfd >= 0 && process_read(p->pid, &now) && now.start_ticks == p->start_ticks)
            await(pidfd, end_ns);
        all = all && (process_read(p->pid, &now)
                          ? now.start_ticks != p->start_ticks || process_has_ended(&now)
                          : kill(p->pid, 0) < 0 && errno == ESRCH);
        if (pidfd >= 0) (void)close(pidfd);
    }
    return all;
}

/* First those that need no read that may hang. Then all, until several looks in a
 * row find nobody: one alone may have missed who was forking just then. After a wait for what
 * may become a guard, the time for all others begins anew. Returns whether all are known to be
 * dead. */
bool end_launch(struct launch *launch) {
    int64_t end_ns = clock_ns() + GIVE_UP_MS * NS_PER_MS;
    int empty = 0;
    launch->awaits_until_ns = 0;
    launch->unsure = false;
    launch->groups_only = true;
    (void)scan_and_kill(launch);
    launch->groups_only = false;
    do {
        empty = scan_and_kill(launch) ? 0 : empty + 1;
        if (launch->awaits) {
            end_ns = clock_ns() + GIVE_UP_MS * NS_PER_MS;
            (void)sched_yield(); /* it may need this processor */
        }
    } while (empty < EMPTY_SCANS && clock_ns() <= end_ns);
    return empty >= EMPTY_SCANS && !launch->unsure && !is_foreign_left(launch) &&
           are_dead(&launch->killed, clock_ns() + GIVE_UP_MS * NS_PER_MS);
}

/* Whether that number is still the worker's. Without /proc its session and group decide. */
static bool is_there(const struct launch *launch, pid_t pid, struct process *ret_worker) {
    *ret_worker = (struct process){.pid = pid, .group = getpgid(pid), .session = getsid(pid)};
    if (process_sees_itself(getpid()) == 0 &&
        (!process_read(pid, ret_worker) || ret_worker->start_ticks < launch->since))
        return false;
    return pid > 1 && is_in_worker_group(launch, ret_worker);
}

/* Each has until the end of the time to exit. Without pidfds there is no event, so SIGKILL comes
 * at once. One from just before the launcher's death has not written its number yet. */
void end_workers(struct launch *launch, int wait_ms) {
    const int64_t end_ns = clock_ns() + wait_ms * NS_PER_MS;
    await(0, end_ns);
    read_workers(launch);
    for (size_t i = 0; i < launch->n; i++) {
        struct process worker, again;
        if (!is_there(launch, launch->workers[i], &worker)) continue;
        int pidfd = process_open(worker.pid);
        if (pidfd >= 0) await(pidfd, end_ns);
        if (is_there(launch, worker.pid, &again) && again.start_ticks == worker.start_ticks)
            (void)process_send(worker.pid, pidfd, SIGKILL);
        if (pidfd >= 0) (void)close(pidfd);
    }
}
