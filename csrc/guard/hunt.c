/* guard/hunt.c: all that a dead launcher has left is killed.
 *
 * Ours is what came to the same new parent as we did and has the launch's mark in its environment or is in
 * a worker's process group, in the launcher's session; and the descendants of these; and nothing that is
 * older than the launch. Whole looks at /proc find what stays; the chase finds what forks and exits. */
#include "hunt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define EMPTY_LOOKS 3
#define CHASE_MS 50 /* that it goes on when it finds nobody, on a machine where others fork, too */
#define NUMBERS_LOOKED 4096 /* at a time, of those given since */
#define GENERATIONS 16

static bool is_in_worker_group(const struct launch *launch, const struct process *p) {
    if (p->session != launch->session) return false;
    for (size_t i = 0; i < launch->n; i++)
        if (launch->workers[i] == p->group) return true;
    return false;
}

/* The guard of a launch inside this one: it has its own to end, and then ends itself. */
static bool is_guard(pid_t pid) {
    char path[32], ours[PATH_MAX], theirs[PATH_MAX];
    (void)snprintf(path, sizeof path, "/proc/%d/exe", (int)pid);
    ssize_t n = readlink("/proc/self/exe", ours, sizeof ours);
    return n > 0 && readlink(path, theirs, sizeof theirs) == n &&
           memcmp(ours, theirs, (size_t)n) == 0;
}

static bool is_killed(const struct launch *launch, const struct process *p) {
    for (size_t i = 0; i < launch->killed.n; i++)
        if (launch->killed.at[i].pid == p->pid &&
            launch->killed.at[i].start_ticks == p->start_ticks)
            return true;
    return false;
}

/* Once each: what was killed cannot fork any more, and may take a while to go. */
static void kill_one(struct launch *launch, const struct process *p) {
    if (p->state == 'X' || is_killed(launch, p) || is_guard(p->pid)) return;
    int pidfd = process_open(p->pid);
    (void)process_signal(p, pidfd, SIGKILL);
    if (pidfd >= 0) (void)close(pidfd);
    (void)processes_add(&launch->killed, p); /* without memory it is killed again: no harm */
    launch->found = true;
}

/* Killed as soon as it is seen: it may go on forking. The orphans of a
 * launch have come to where we have; a process that has the mark and a parent elsewhere is somebody's
 * who looks at the launch. The environment is not read of what is killed already: a process that hangs
 * in the kernel may hold its memory's lock. */
static void judge(struct process *p, void *with) {
    struct launch *launch = with;
    bool never = p->start_ticks < launch->since || p->pid == getpid();
    p->ours = !never && is_killed(launch, p);
    if (!never && !p->ours && p->parent == getppid()) {
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

/* The number that was given last, to a process or a thread of our PID namespace: proc_loadavg(5). */
static pid_t newest_number(void) {
    char text[128];
    if (process_file("/proc/loadavg", text, sizeof text) < 0) return 0;
    const char *last = strrchr(text, ' ');
    return last == NULL ? 0 : atoi(last + 1);
}

/* Its parent has the mark, too, and so on up to one that came to where we have: it forks, and has not exited yet. */
static bool descends_from_ours(const struct launch *launch, struct process p) {
    for (int i = 0; i < GENERATIONS; i++) {
        struct process parent;
        if (p.parent == getppid()) return true;
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

/* False if it has gone: it may have left a child, of a newer number. */
static bool judge_young(struct launch *launch, pid_t pid) {
    struct process p;
    if (!process_read(pid, &p) || p.state == 'Z' || p.state == 'X') return false;
    judge(&p, launch);
    if (p.decided) return true;
    enum mark found = process_mark(pid, launch->mark);
    if (found == MARK_FOUND && descends_from_ours(launch, p)) kill_one(launch, &p);
    return found != MARK_UNKNOWN;
}

static long long now_ms(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / NS_PER_MS;
}

/* What forks and exits without end is gone from where a list of processes says that it is. But each of its
 * generations has a number of its own: those given after `last` are looked at as they come, the newest first,
 * until all are there and none is ours. */
static void chase(struct launch *launch, pid_t last) {
    const bool found_before = launch->found;
    bool found = false;
    for (long long end_ms = now_ms() + CHASE_MS; now_ms() <= end_ms;) {
        const pid_t newest = newest_number();
        bool all_there = true;
        if (newest < last) last = 0; /* the numbers began anew */
        launch->found = false;
        for (pid_t pid = newest; pid > last && newest - pid < NUMBERS_LOOKED; pid--)
            all_there &= judge_young(launch, pid);
        last = newest;
        found |= launch->found;
        if (launch->found) end_ms = now_ms() + CHASE_MS;
        else if (all_there) break;
    }
    launch->found = found_before || found;
}

/* Whether there was anything that is new to us, or that we could not see. */
static bool look(struct launch *launch) {
    struct processes all;
    const pid_t last = newest_number();
    launch->found = false;
    if (processes_scan(&all, judge, launch) < 0) launch->found = true;
    processes_spread(&all);
    for (size_t i = 0; i < all.n; i++)
        if (all.at[i].ours) kill_one(launch, &all.at[i]);
    free(all.at);
    if (!launch->groups_only) chase(launch, last);
    return launch->found;
}

/* First those that are known without reading what may hang; then all, until several looks in a row find
 * nobody: one alone may have missed who was forking just then. */
void end_launch(struct launch *launch) {
    const long long end_ms = now_ms() + GIVE_UP_MS;
    launch->groups_only = true;
    (void)look(launch);
    launch->groups_only = false;
    for (int empty = 0; empty < EMPTY_LOOKS && now_ms() <= end_ms;)
        empty = look(launch) ? 0 : empty + 1;
}
