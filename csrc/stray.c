/* stray.c: descendants that outlive the workers: double-forked, setsid'ed, daemonised.
 *
 * Own process: orphans are re-parented to us (we are their subreaper), so a stray is any descendant
 * by the chain of parents; children that we had before the spawn, and theirs, are not ours to touch.
 * Library: what carries the mark of this launch in its environment (/proc/PID/environ). */
#include "core.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif

static bool is_foreign(const struct ir_group *g, pid_t pid) {
    for (uint32_t i = 0; i < g->foreign_count; i++)
        if (g->foreign[i] == pid) return true;
    return false;
}

/* Unreaped or abandoned workers are spoken of elsewhere; what they started is not. */
static bool is_worker(const struct ir_group *g, pid_t pid) {
    for (uint32_t i = 0; i < g->started; i++)
        if (g->workers[i].pid == pid) return true;
    return false;
}

static void mark_descendants(const struct ir_group *g, struct processes *all) {
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t i = 0; i < all->n; i++) {
            struct process *p = &all->at[i];
            if (p->ours || is_foreign(g, p->pid) || p->start_ticks < g->spawn_ticks) continue;
            p->ours = p->parent == g->self;
            for (size_t k = 0; !p->ours && k < all->n; k++)
                p->ours = all->at[k].pid == p->parent && all->at[k].ours;
            changed |= p->ours;
        }
    }
}

static void mark_marked(const struct ir_group *g, struct processes *all) {
    for (size_t i = 0; i < all->n; i++) {
        struct process *p = &all->at[i];
        p->ours = p->pid != g->self && p->state != 'Z' && p->start_ticks >= g->spawn_ticks &&
                  process_has_mark(p->pid, g->mark);
    }
}

static void strays_find(struct ir_group *g, struct processes *all) {
    *all = (struct processes){0};
    if (!g->has_proc) return; /* the numbers in there are not ours: they would name strangers */
    processes_scan(all);
    if (g->config.flags & IR_OWN_PROCESS) mark_descendants(g, all);
    else mark_marked(g, all);
    for (size_t i = 0; i < all->n; i++)
        if (all->at[i].ours && is_worker(g, all->at[i].pid)) all->at[i].ours = false;
}

uint32_t stray_count(struct ir_group *g) {
    struct processes all;
    strays_find(g, &all);
    uint32_t n = 0;
    for (size_t i = 0; i < all.n; i++) n += all.at[i].ours;
    free(all.at);
    return n;
}

/* A library hears of a stray's end by its pidfd, which is kept for the next signal, too. */
static int stray_open(struct ir_group *g, pid_t pid) {
    for (uint32_t i = 0; i < g->strays_alive; i++)
        if (g->strays[i].pid == pid) return g->strays[i].fd;
    return pidfd_open_of(g, pid);
}

static void stray_keep(struct ir_group *g, pid_t pid, int fd) {
    for (uint32_t i = 0; i < g->strays_alive; i++)
        if (g->strays[i].fd == fd) return;
    struct stray *grown = realloc(g->strays, (g->strays_alive + 1) * sizeof *grown);
    if (grown != NULL) g->strays = grown;
    if (grown == NULL || fd_watch(g, fd, EPOLLIN, WATCH_STRAY, (uint32_t)fd) < 0) (void)close(fd);
    else g->strays[g->strays_alive++] = (struct stray){.pid = pid, .fd = fd};
}

void stray_gone(struct ir_group *g, int fd) {
    for (uint32_t i = 0; i < g->strays_alive; i++)
        if (g->strays[i].fd == fd) {
            (void)fd_release(g, fd);
            g->strays[i] = g->strays[--g->strays_alive];
            return;
        }
}

void stray_close(struct ir_group *g) {
    while (g->strays_alive > 0) (void)fd_close(g->strays[--g->strays_alive].fd);
    free(g->strays);
    g->strays = NULL;
}

/* By pidfd, with a second look between opening and sending: the number may have been reused. Where a
 * sandbox knows no pidfd_send_signal, by the number. */
static bool stray_send(struct ir_group *g, const struct process *stray, int sig) {
    int fd = stray_open(g, stray->pid);
    struct process now;
    bool same = process_read(stray->pid, &now) && now.start_ticks == stray->start_ticks;
    bool sent = same && fd >= 0 && syscall(SYS_pidfd_send_signal, fd, sig, NULL, 0) == 0;
    if (same && !sent && errno != ESRCH) sent = kill(stray->pid, sig) == 0;
    if (fd < 0) return sent;
    if (g->config.flags & IR_OWN_PROCESS) (void)close(fd);
    else stray_keep(g, stray->pid, fd);
    return sent;
}

/* Once, though it may be told to stop and then be killed. */
static void stray_tell(struct ir_group *g, const struct process *stray, int kind) {
    for (uint32_t i = 0; i < g->strays_told; i++)
        if (g->strays_named[i] == stray->pid) return;
    if (g->strays_told >= STRAYS_TOLD) return;
    g->strays_named[g->strays_told++] = stray->pid;
    struct ir_event *event = event_push(g, kind, -1, stray->pid);
    memcpy(event->name, stray->name, sizeof event->name);
    event->code = (unsigned char)stray->state;
}

/* Sends to every stray there is now; returns how many there are. As process 1 every process that we
 * can see is a stray, and kill(-1) reaches even those that fork as fast as we kill. */
uint32_t stray_signal(struct ir_group *g, int sig, bool tell) {
    struct processes all;
    strays_find(g, &all);
    uint32_t n = 0;
    for (size_t i = 0; i < all.n; i++) {
        const struct process *stray = &all.at[i];
        if (!stray->ours) continue;
        n++;
        if (tell) stray_tell(g, stray, IR_STRAY);
        if (g->self != 1) (void)stray_send(g, stray, sig);
    }
    if (g->self == 1 && (n > 0 || (!g->has_proc && wait_has_children()))) {
        (void)kill(-1, sig);
        n++;
    }
    free(all.at);
    return n;
}

void stray_name_stuck(struct ir_group *g) {
    struct processes all;
    strays_find(g, &all);
    g->strays_told = 0;
    for (size_t i = 0; i < all.n; i++)
        if (all.at[i].ours) stray_tell(g, &all.at[i], IR_STUCK);
    free(all.at);
}

/* The children that the process had before it became ours (inherited across exec). */
int stray_foreign(struct ir_group *g) {
    wait_any(g); /* whose SIGCHLD came before we took signals */
    if (!wait_has_children()) return 0;
    struct processes all;
    processes_scan(&all);
    g->foreign = calloc(all.n + 1, sizeof *g->foreign);
    if (g->foreign == NULL) {
        free(all.at);
        return -ENOMEM;
    }
    for (size_t i = 0; i < all.n; i++)
        if (all.at[i].parent == g->self) g->foreign[g->foreign_count++] = all.at[i].pid;
    free(all.at);
    return 0;
}
