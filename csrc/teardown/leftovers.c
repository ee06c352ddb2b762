/* teardown/leftovers.c: descendants that outlive the workers: double-forked, setsid'ed, daemonized.
 *
 * Own process: orphans come to it (it is their subreaper), so a leftover is any descendant by
 * the chain of parents. Children from before the spawn, and theirs, stay untouched. Library, and
 * an own process that a sandbox or an emulator does not let be a subreaper: what carries the
 * mark of this launch in its environment (/proc/PID/environ). */
#include "group/group.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/wait.h>
#include <unistd.h>

#define GENERATIONS 64 /* between a leftover and this process, that have not exited */
#define CHILDREN_LOOKS                                                                             \
    64 /* in a row; then the group's loop has its turn, and a death wakes it again */

static void mark_descendants(const struct ir_group *g, struct processes *all) {
    for (size_t i = 0; i < all->n; i++) {
        struct process *p = &all->at[i];
        bool never = child_is_foreign(g, p->pid) || p->start_ticks < g->spawn_ticks;
        p->ours = !never && p->parent == g->self;
        p->decided = never || p->ours;
    }
    processes_spread(all);
}

/* Orphans go up: to the nearest ancestor that adopts, init at the last. To this process only if
 * the host program adopts; else a child of it that is no worker is the host's own. */
static bool is_orphan(const struct ir_group *g, const struct processes *all,
                      const struct process *p) {
    if (p->parent == 0) return false; /* somebody brought it into this PID namespace from outside */
    if (p->parent == g->self) return stray_adopts(g);
    const struct process *ancestor = process_find(all, g->self);
    while (ancestor != NULL && ancestor->pid != p->parent)
        ancestor = process_find(all, ancestor->parent);
    return ancestor != NULL || process_find(all, p->parent) == NULL;
}

static struct stray *stray_find(const struct ir_group *g, const struct process *p) {
    for (uint32_t i = 0; i < g->strays_alive; i++)
        if (g->strays[i].pid == p->pid && g->strays[i].start_ticks == p->start_ticks)
            return &g->strays[i];
    return NULL;
}

/* One that exits gives its memory back, and the mark with it, before it closes its files; until then it may hold a GPU.
 * An earlier look found it, or its process group shows it. The number of that may be a stranger's
 * by now; but then he is exiting, and no signal does him any harm. */
static bool is_ours_without_mark(const struct ir_group *g, const struct process *p) {
    return stray_find(g, p) != NULL || (is_worker_group(g, p->group) && process_is_exiting(p->pid));
}

/* The mark alone is not enough: whoever looks at a launch with its variables has it, too, but he has
 * parents of his own. */
static bool mark_marked(const struct ir_group *g, struct processes *all) {
    bool whole = true;
    for (size_t i = 0; i < all->n; i++) {
        struct process *p = &all->at[i];
        bool never = p->pid == g->self || p->start_ticks < g->spawn_ticks;
        p->ours = !never && child_is_worker(g, p->pid);
        if (!never && !p->ours && !process_has_ended(p) && is_orphan(g, all, p)) {
            const enum mark found = process_mark_after_exec(p->pid, g->mark);
            p->ours = found == MARK_FOUND || is_ours_without_mark(g, p);
            whole = whole && found != MARK_UNKNOWN;
        }
        p->decided = never || p->ours;
    }
    processes_spread(all);
    for (size_t i = 0; i < all->n; i++) /* a dead one is its parent's to reap: another's */
        if (process_has_ended(&all->at[i])) all->at[i].ours = false;
    return whole;
}

/* -errno: there may be more. /proc is another namespace's (process_sees_itself) or unreadable,
 * or one is in the middle of an execve (-EAGAIN). */
static int strays_find(struct ir_group *g, struct processes *all) {
    *all = (struct processes){0};
    if (g->mark[0] == '\0' && !g->adopts) return 0;
    int r = process_sees_itself(g->self); /* each time: a mount may cover it meanwhile */
    if (r < 0) return r;
    r = processes_scan(all, NULL, NULL);
    if (g->adopts) mark_descendants(g, all);
    else if (!mark_marked(g, all)) r = -EAGAIN;
    cgroup_mark(g, all);
    for (size_t i = 0; i < all->n; i++)
        if (all->at[i].ours && child_is_worker(g, all->at[i].pid)) all->at[i].ours = false;
    return r;
}

/* Looking again would find no more. */
static bool is_lasting(int error) {
    return error == -ENOENT || error == -EXDEV || error == -EACCES || error == -EPERM;
}

/* Invisible ones, without adoption. */
static void strays_report_unseen(struct ir_group *g, int error) {
    if (g->unseen_reported) return;
    g->unseen_reported = true;
    struct ir_event *event = event_push(g, IR_UNSEEN, -1, 0);
    event->code = g->adopts ? 0 : 1;
    event->signal = -error;
}

void stray_foresee(struct ir_group *g) {
    const bool matters = g->adopts ? g->guard.pid != 0 : g->mark[0] != '\0';
    if (g->proc_error < 0 && matters) strays_report_unseen(g, g->proc_error);
}

/* A library learns of a leftover's end by its pidfd (fd; negative: there is none), which serves
 * the next signal, too. `known`: its place, if it has one. */
static void stray_keep(struct ir_group *g, const struct process *p, struct stray *known, int fd) {
    struct process now;
    const bool is_its = process_read(p->pid, &now) && now.start_ticks == p->start_ticks;
    if (fd >= 0 && (!is_its || fd_watch(g, fd, EPOLLIN, WATCH_STRAY, (uint32_t)fd) < 0)) {
        (void)close(fd);
        fd = -1;
    }
    if (known == NULL) {
        struct stray *grown = realloc(g->strays, (g->strays_alive + 1) * sizeof *grown);
        if (grown != NULL) g->strays = grown;
        if (grown != NULL) known = &grown[g->strays_alive++];
    }
    if (known != NULL)
        *known =
            (struct stray){.pid = p->pid, .start_ticks = p->start_ticks, .fd = fd < 0 ? -1 : fd};
    else if (fd >= 0) (void)fd_release(g, fd);
}

/* Whether some without a pidfd live: no event reports their end. Drops those that are gone. */
bool stray_has_unwatched(struct ir_group *g) {
    bool any = false;
    for (uint32_t i = 0; i < g->strays_alive; i++) {
        struct process now;
        const struct stray *stray = &g->strays[i];
        if (stray->fd >= 0) continue;
        if (process_read(stray->pid, &now) && now.start_ticks == stray->start_ticks &&
            !process_has_ended(&now))
            any = true;
        else g->strays[i--] = g->strays[--g->strays_alive];
    }
    return any;
}

/* Where the host program adopts orphans (it is process 1, or a subreaper) a leftover has become
 * its child, which it knows nothing of. The number alone is not enough: whose child it is by now
 * is unknown. */
static void stray_reap(const struct ir_group *g, const struct stray *stray) {
    siginfo_t info;
    if (!(g->config.flags & IR_OLD_PIDFD))
        (void)child_wait(BY_PIDFD, stray->fd, &info, WEXITED | WNOHANG | __WALL, NULL);
}

void stray_gone(struct ir_group *g, int fd) {
    for (uint32_t i = 0; i < g->strays_alive; i++)
        if (g->strays[i].fd == fd) {
            stray_reap(g, &g->strays[i]);
            (void)fd_release(g, fd);
            g->strays[i] = g->strays[--g->strays_alive];
            return;
        }
}

void stray_close(struct ir_group *g) {
    while (g->strays_alive > 0) (void)fd_close(g->strays[--g->strays_alive].fd);
    free(g->strays);
    g->strays = NULL;
    free(g->strays_by_pid);
    g->strays_by_pid = NULL;
}

/* The guard of a launch inside this one, until its exec: it has that launch to end, and then
 * ends. With adoption that launch has nothing that the search misses. */
static bool stray_may_become_guard(const struct ir_group *g, const struct process *stray) {
    return !g->adopts && strcmp(stray->name, GUARD_NAME) == 0;
}

static void stray_send(struct ir_group *g, const struct process *stray, int sig) {
    struct stray *known = stray_find(g, stray);
    const bool has_pidfd = known != NULL && known->fd >= 0;
    int fd = has_pidfd ? known->fd : pidfd_open_of(g, stray->pid);
    /* a kept pidfd had its look when it opened, and /proc may fail now */
    if (sig != 0 && !(has_pidfd && pidfd_send(fd, sig, 0) == 0))
        (void)process_signal(stray, fd, sig);
    if (g->adopts && !has_pidfd && fd >= 0) (void)close(fd);
    if (!g->adopts && !has_pidfd && fd != -ESRCH) stray_keep(g, stray, known, fd);
}

static int by_number(const void *a, const void *b) {
    pid_t one = *(const pid_t *)a, other = *(const pid_t *)b;
    return (one > other) - (one < other);
}

/* It counts each once, though one may get a stop and then SIGKILL. Without memory for that, one
 * that appears twice counts twice. */
static bool stray_is_new(struct ir_group *g, pid_t pid, uint32_t known) {
    if (known > 0 && bsearch(&pid, g->strays_by_pid, known, sizeof pid, by_number) != NULL)
        return false;
    if ((g->strays_known & (g->strays_known - 1)) == 0) { /* 0 or a power of two: it is full */
        size_t capacity = g->strays_known == 0 ? 1 : (size_t)g->strays_known * 2;
        pid_t *grown = realloc(g->strays_by_pid, capacity * sizeof *grown);
        if (grown == NULL) return true;
        g->strays_by_pid = grown;
    }
    g->strays_by_pid[g->strays_known++] = pid;
    return true;
}

static void stray_report(struct ir_group *g, const struct process *stray, int kind) {
    struct ir_event *event = event_push(g, kind, -1, stray->pid);
    memcpy(event->name, stray->name, sizeof event->name);
    event->code = (unsigned char)stray->state;
}

/* It is about to exit, unless the others had their time to end and it has not: then somebody
 * holds its pipe. */
static bool is_ending_tracker(const struct ir_group *g, pid_t pid) {
    const bool has_grace = !g->immediate && g->grace_ms > 0;
    if (g->state == SWEEPING && has_grace) return false;
    if (process_is_tracker(pid)) return true;
    /* the core names one that stays after the grace */
    return has_grace && process_starts_tracker(pid);
}

/* Whether only trackers are left, which end with their workers, and children of workers that may
 * become one. */
bool strays_are_trackers(struct ir_group *g) {
    struct processes all;
    bool are = strays_find(g, &all) == 0, any = false;
    for (size_t i = 0; are && i < all.n; i++) {
        const struct process *p = &all.at[i];
        if (!p->ours || process_has_ended(p)) continue;
        any = true;
        are = process_is_tracker(p->pid) ||
              (is_worker_group(g, p->group) && process_starts_tracker(p->pid));
    }
    free(all.at);
    return are && any;
}

/* The first few by name, all of them by number. Not the guard of a launch within this one, which
 * has another launch to end. Not what is ending by the signal to its worker's group (0: none is
 * it), and no tracker that goes with its rank. */
static void strays_note(struct ir_group *g, const struct processes *all, int sig) {
    uint32_t known = g->strays_known;
    for (size_t i = 0; i < all->n; i++) {
        if (!all->at[i].ours || strcmp(all->at[i].name, GUARD_NAME) == 0) continue;
        if (sig != 0 && process_is_ending(all->at[i].pid, sig)) continue;
        if (is_ending_tracker(g, all->at[i].pid)) continue;
        if (!stray_is_new(g, all->at[i].pid, known)) continue;
        if (g->strays_seen++ < STRAYS_NAMED) stray_report(g, &all->at[i], IR_LEFTOVER);
    }
    if (g->strays_known > known)
        qsort(g->strays_by_pid, g->strays_known, sizeof *g->strays_by_pid, by_number);
}

/* Through parents that are none to spare, up to this process; of one that has gone its child
 * shows its new parent. */
static bool is_descendant(const struct ir_group *g, struct process p) {
    for (int i = 0; i < GENERATIONS; i++) {
        struct process parent;
        if (child_is_foreign(g, p.pid) || p.pid == g->guard.pid) return false;
        if (p.parent == g->self) return true;
        if (process_read(p.parent, &parent)) p = parent;
        else if (!process_read(p.pid, &p)) return false;
    }
    return false;
}

/* wait_any reaps orphans only after the chase; until then thousands of zombies would hold process numbers that
 * the whole machine needs. */
static void orphan_reap(struct ir_group *g, const struct process *p) {
    siginfo_t info;
    if (p->parent != g->self || child_is_worker(g, p->pid) || child_is_foreign(g, p->pid)) return;
    (void)child_wait(P_PID, p->pid, &info, WEXITED | WNOHANG | __WALL, NULL);
}

static enum chased stray_kill_young(pid_t pid, void *with) {
    struct ir_group *g = with;
    struct process p;
    if (!process_read(pid, &p)) return CHASED_GONE;
    if (process_has_ended(&p)) {
        orphan_reap(g, &p);
        return CHASED_GONE;
    }
    if (p.start_ticks < g->spawn_ticks || child_is_worker(g, pid) || !is_descendant(g, p))
        return CHASED_OTHER;
    stray_send(g, &p, SIGKILL);
    return CHASED_KILLED;
}

/* Whether it lives, is none to spare, and got SIGKILL. Its number stays its own until its reaping. */
static bool child_kill(const struct ir_group *g, pid_t pid, struct processes *noted) {
    siginfo_t info = {0};
    struct process p;
    if (child_is_worker(g, pid) || child_is_foreign(g, pid)) return false;
    if (child_wait(P_PID, pid, &info, WEXITED | WNOHANG | WNOWAIT | __WALL, NULL) < 0) return false;
    if (info.si_pid != 0 || !process_read(pid, &p) || p.start_ticks < g->spawn_ticks) return false;
    p.ours = noted != NULL && !process_is_ending(pid, SIGKILL) && !is_ending_tracker(g, pid);
    if (kill(pid, SIGKILL) < 0) return false;
    if (p.ours) (void)processes_add(noted, &p);
    return true;
}

/* Several looks may have killed, and noted, one that was slow to die. */
static void noted_sort(struct processes *noted) {
    size_t n = 0;
    if (noted->n == 0) return;
    qsort(noted->at, noted->n, sizeof *noted->at, by_number);
    for (size_t i = 1; i < noted->n; i++)
        if (noted->at[i].pid != noted->at[n].pid) noted->at[++n] = noted->at[i];
    noted->n = n + 1;
}

/* What forks and exits without end is a child of this process for nearly all its life. Hardly
 * anything comes between this look and its signal, however many others of the machine fork. That
 * holds however seldom this process has a turn: by autogroups (sched(7)) each session has as
 * large a share of the processors. The last of the list are the newest: dead ones that wait for
 * their reaping precede them. Its death brings what a child has just forked. False: there is no
 * readable list. */
static bool children_kill(struct ir_group *g, bool report) {
    struct processes noted = {0};
    bool any = true;
    int r = 0;
    for (int look = 0; r == 0 && any && look < CHILDREN_LOOKS; look++) {
        struct processes all = {0};
        any = false;
        if ((r = children_list(g, &all)) == 0)
            while (all.n > 0) any |= child_kill(g, all.at[--all.n].pid, report ? &noted : NULL);
        free(all.at);
    }
    noted_sort(&noted);
    strays_note(g, &noted, 0);
    free(noted.at);
    return r == 0;
}

static void unseen_name(struct ir_group *g, const struct processes *unseen, int kind) {
    if (kind == IR_LEFTOVER) strays_note(g, unseen, 0);
    else
        for (size_t i = 0; i < unseen->n && i < STRAYS_NAMED; i++)
            if (unseen->at[i].ours) stray_report(g, &unseen->at[i], kind);
}

/* What `seen`, a look at /proc, did not show (unseen.c); returns how many there are. What it did show has the signal
 * already. kind: IR_LEFTOVER or IR_STUCK: name them; 0. */
static uint32_t unseen_signal(struct ir_group *g, const struct processes *seen, int sig, int kind) {
    struct processes groups = {0}, found = {0};
    /* else some would get it twice, where that says more than once */
    const bool by_group = sig == SIGKILL || seen->n == 0;
    if (g->adopts) children_find(g, &found);
    const uint32_t groups_left = groups_signal(g, by_group ? sig : 0, &groups);
    for (size_t i = 0; i < found.n; i++) {
        struct process *p = &found.at[i];
        const struct process *shown = process_find(seen, p->pid);
        p->ours = p->state != 'Z' && (shown == NULL || !shown->ours);
        const bool has_it = by_group && sig != SIGKILL && is_worker_group(g, p->group);
        if (p->ours && !has_it) (void)kill(p->pid, sig);
    }
    if (kind == IR_STUCK && !g->adopts) groups_living(g, &groups, &found);
    if (kind != 0) unseen_name(g, found.n > 0 || kind == IR_STUCK ? &found : &groups, kind);
    const uint32_t n = found.n > 0 || kind == IR_STUCK ? (uint32_t)found.n : groups_left;
    free(groups.at);
    free(found.at);
    return n;
}

/* /proc does not show those that it found: their numbers are this process's children's, or
 * nobody's. */
static enum chased unseen_kill_young(pid_t pid, void *with) {
    struct ir_group *g = with;
    siginfo_t info;
    if (pid == g->probe || child_is_worker(g, pid) || child_is_foreign(g, pid)) return CHASED_OTHER;
    if (child_wait(P_PID, pid, &info, WEXITED | WNOHANG | __WALL, NULL) < 0)
        return kill(pid, 0) < 0 && errno == ESRCH ? CHASED_GONE : CHASED_OTHER;
    if (info.si_pid != 0) return CHASED_GONE;
    (void)kill(pid, SIGKILL);
    return CHASED_KILLED;
}

/* How many there are. With adoption, the core knows all children at last. Else it is never 0 while a
 * failed look may have another try: then the timetable continues. */
static uint32_t strays_number(struct ir_group *g, int error, uint32_t n) {
    if (error == 0 || g->adopts || n > 0) return n;
    if (!is_lasting(error)) return 1;
    strays_report_unseen(g, error);
    return 0;
}

/* How many there are, as strays_number says. This keeps those that it sees for the first time,
 * to learn of their end. */
uint32_t stray_count(struct ir_group *g) {
    struct processes all;
    const int error = strays_find(g, &all);
    uint32_t n = 0;
    for (size_t i = 0; i < all.n; i++) {
        if (!all.at[i].ours) continue;
        n++;
        if (!g->adopts && stray_find(g, &all.at[i]) == NULL) stray_send(g, &all.at[i], 0);
    }
    if (error < 0) n += unseen_signal(g, &all, 0, 0);
    free(all.at);
    return strays_number(g, error, n);
}

/* Sends to every leftover that exists; returns how many there are, as stray_count does. report:
 * name the first ones in events. hunts: SIGKILL continues to those that fork meanwhile. */
uint32_t stray_signal(struct ir_group *g, int sig, bool report, bool hunts) {
    struct processes all;
    const bool chases = sig == SIGKILL && hunts && g->adopts && !children_kill(g, report);
    const pid_t last = chases ? number_newest(g) : 0;
    const int error = strays_find(g, &all);
    if (report) strays_note(g, &all, sig);
    if (sig == SIGKILL) cgroup_kill(g);
    uint32_t n = 0;
    for (size_t i = 0; i < all.n; i++) {
        const struct process *stray = &all.at[i];
        if (!stray->ours) continue;
        n++;
        stray_send(g, stray, stray_may_become_guard(g, stray) ? 0 : sig);
    }
    /* hidepid hides a child that has become another user */
    if (error < 0 || (g->adopts && n == 0 && g->alive == 0))
        n += unseen_signal(g, &all, sig, report ? IR_LEFTOVER : 0);
    if (n > 0 && chases)
        (void)chase(last, number_newest, error < 0 ? unseen_kill_young : stray_kill_young, g);
    free(all.at);
    return strays_number(g, error, n);
}

/* ---- of some workers, while others run */

struct part {
    const uint32_t *workers;
    uint32_t n;
    const char *mark; /* which its processes have beside that of the group */
};

static bool is_group_of(const struct ir_group *g, const struct part *part, pid_t group) {
    for (uint32_t i = 0; i < part->n; i++)
        if (g->workers[part->workers[i]].pid == group) return true;
    return false;
}

static uint32_t number_of(const struct part *part) {
    return part->n > 0 ? part->workers[0] + 1 : 0;
}

/* With adoption, an orphan is a child of this process, and a worker's group has its number still.
 * Without, the number may be a stranger's by now. What exits has no mark any more, and may hold a
 * GPU: a part that may be its own waits for it. */
static enum mark part_owns(const struct ir_group *g, const struct part *part,
                           const struct process *p) {
    const struct stray *known = stray_find(g, p);
    const bool is_member = is_group_of(g, part, p->group);
    if (known != NULL && known->part != 0)
        return known->part == number_of(part) ? MARK_FOUND : MARK_NONE;
    if (g->adopts ? is_member || process_is_exiting(p->pid)
                  : is_member && process_is_exiting(p->pid))
        return MARK_FOUND;
    const enum mark found = process_mark_after_exec(p->pid, g->mark);
    return found == MARK_FOUND ? process_mark(p->pid, part->mark) : found;
}

/* Whatever has a living parent of the launch is that one's. As strays_find. */
static int part_find(const struct ir_group *g, const struct part *part, struct processes *all) {
    *all = (struct processes){0};
    int r = process_sees_itself(g->self);
    if (r < 0) return r;
    r = processes_scan(all, NULL, NULL);
    for (size_t i = 0; i < all->n; i++) {
        struct process *p = &all->at[i];
        const bool never = p->pid == g->self || p->start_ticks < g->spawn_ticks ||
                           child_is_worker(g, p->pid) || child_is_foreign(g, p->pid);
        const bool is_left = g->adopts ? p->parent == g->self : is_orphan(g, all, p);
        if (!never && !process_has_ended(p) && is_left) {
            const enum mark found = part_owns(g, part, p);
            p->ours = found == MARK_FOUND;
            if (found == MARK_UNKNOWN) r = -EAGAIN;
        }
        p->decided = never || p->ours;
    }
    processes_spread(all);
    for (uint32_t i = 0; i < part->n; i++) cgroup_mark_leaf(g, part->workers[i], all);
    for (size_t i = 0; i < all->n; i++)
        if (process_has_ended(&all->at[i]) || child_is_worker(g, all->at[i].pid))
            all->at[i].ours = false;
    return r;
}

/* Its end is an event from now on, and until then it is known. */
static void part_send(struct ir_group *g, const struct part *part, const struct process *p,
                      int sig) {
    stray_send(g, p, sig);
    if (g->adopts && stray_find(g, p) == NULL) {
        const int fd = pidfd_open_of(g, p->pid);
        if (fd != -ESRCH) stray_keep(g, p, NULL, fd);
    }
    struct stray *known = stray_find(g, p);
    if (known != NULL) known->part = number_of(part);
}

/* Sends to what workers have left that have all ended; returns how many there are. Without /proc
 * that is what their process groups show. */
uint32_t stray_signal_part(struct ir_group *g, const uint32_t *workers, uint32_t n,
                           const char *mark, int sig) {
    const struct part part = {.workers = workers, .n = n, .mark = mark};
    struct processes all;
    const int error = part_find(g, &part, &all);
    uint32_t left = 0;
    if (sig != 0) strays_note(g, &all, sig);
    for (uint32_t i = 0; i < n && sig == SIGKILL; i++) cgroup_kill_leaf(g, workers[i]);
    for (size_t i = 0; i < all.n; i++) {
        if (!all.at[i].ours) continue;
        left++;
        part_send(g, &part, &all.at[i], stray_may_become_guard(g, &all.at[i]) ? 0 : sig);
    }
    free(all.at);
    if (error < 0 && is_lasting(error))
        for (uint32_t i = 0; i < n; i++) left += group_signal_rest(g, &g->workers[workers[i]], sig);
    return error < 0 && !is_lasting(error) && left == 0 ? 1 : left; /* another look shows it */
}

/* To members of process groups without a leader, where the kernel cannot signal such a group as one. */
void stray_signal_groups(struct ir_group *g, int sig) {
    struct processes all;
    (void)strays_find(g, &all);
    for (size_t i = 0; i < all.n; i++)
        if (all.at[i].ours && is_worker_group(g, all.at[i].group)) stray_send(g, &all.at[i], sig);
    free(all.at);
}

/* Killed once more: they may have been out of sight until now, or spared for a guard's name. Returns how many. */
uint32_t stray_name_stuck(struct ir_group *g) {
    struct processes all;
    const int error = strays_find(g, &all);
    uint32_t named = 0;
    for (size_t i = 0; i < all.n; i++) {
        if (!all.at[i].ours) continue;
        stray_send(g, &all.at[i], SIGKILL);
        if (stray_may_become_guard(g, &all.at[i])) continue;
        if (named++ < STRAYS_NAMED) stray_report(g, &all.at[i], IR_STUCK);
    }
    if (error < 0 || (g->adopts && named == 0)) named += unseen_signal(g, &all, SIGKILL, IR_STUCK);
    if (error < 0 && !g->adopts) strays_report_unseen(g, error);
    free(all.at);
    return named;
}

/* The children from before the process became an own one (inherited across exec). */
int stray_foreign(struct ir_group *g) {
    struct processes all = {0};
    int r = 0;
    if (g->proc_error < 0) children_find(g, &all);
    else r = processes_scan(&all, NULL, NULL);
    if (r == 0) g->foreign = calloc(all.n + 1, sizeof *g->foreign);
    if (r == 0 && g->foreign == NULL) r = -ENOMEM;
    for (size_t i = 0; r == 0 && i < all.n; i++)
        if (all.at[i].parent == g->self) g->foreign[g->foreign_count++] = all.at[i].pid;
    free(all.at);
    return r;
}

/* Its number may be another's soon, and that one may be a leftover. */
void foreign_remove(struct ir_group *g, pid_t pid) {
    for (uint32_t i = 0; i < g->foreign_count; i++)
        if (g->foreign[i] == pid) {
            g->foreign[i] = g->foreign[--g->foreign_count];
            return;
        }
}

int ir_group_spare(struct ir_group *g, int pid, int spared) {
    if (g == NULL) return -ESRCH;
    foreign_remove(g, pid);
    if (!spared) return 0;
    pid_t *grown = realloc(g->foreign, (g->foreign_count + 1) * sizeof *grown);
    if (grown == NULL) return -ENOMEM;
    g->foreign = grown;
    g->foreign[g->foreign_count++] = pid;
    return 0;
}
