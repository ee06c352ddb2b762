/* stray.c: descendants that outlive the workers: double-forked, setsid'ed, daemonised.
 *
 * Own process: orphans are re-parented to us (we are their subreaper), so a stray is any descendant
 * by the chain of parents; children that we had before the spawn, and theirs, are not ours to touch.
 * Library: what carries the mark of this launch in its environment (/proc/PID/environ). */
#include "core.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif

#define EXEC_LOOKS 500  /* at a process in an execve, 200 us apart: nothing tells of its end */
#define STAT_VSIZE 23   /* fields of proc_pid_stat(5) */
#define STAT_ENV_START 50

struct process {
    pid_t pid, parent;
    uint64_t start_ticks;
    char state;
    bool ours;
    char name[16];
};

struct processes {
    struct process *at;
    size_t n, capacity;
};

static ssize_t read_file(const char *path, char *buffer, size_t size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t n = read(fd, buffer, size - 1);
    (void)close(fd);
    if (n >= 0) buffer[n] = '\0';
    return n;
}

/* proc_pid_stat(5): the name stands in parentheses and may itself hold any of them. */
static bool process_read(pid_t pid, struct process *ret) {
    char path[32], stat[512];
    (void)snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    if (read_file(path, stat, sizeof stat) <= 0) return false;
    char *open_paren = strchr(stat, '('), *close_paren = strrchr(stat, ')');
    int parent;
    unsigned long long start;
    *ret = (struct process){.pid = pid};
    if (open_paren == NULL || close_paren == NULL ||
        sscanf(close_paren + 1,
               " %c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
               &ret->state, &parent, &start) != 3)
        return false;
    ret->parent = parent;
    ret->start_ticks = start;
    *close_paren = '\0';
    (void)snprintf(ret->name, sizeof ret->name, "%.15s", open_paren + 1);
    return true;
}

void process_describe(pid_t pid, char *ret_state, char ret_name[16]) {
    struct process process;
    if (!process_read(pid, &process)) return;
    *ret_state = process.state;
    memcpy(ret_name, process.name, sizeof process.name);
}

static bool processes_add(struct processes *all, const struct process *process) {
    if (all->n == all->capacity) {
        size_t capacity = all->capacity == 0 ? 256 : all->capacity * 2;
        struct process *grown = realloc(all->at, capacity * sizeof *grown);
        if (grown == NULL) return false;
        all->at = grown;
        all->capacity = capacity;
    }
    all->at[all->n++] = *process;
    return true;
}

/* Every process that we can see; a scan that runs out of memory is a short one. */
static void processes_scan(struct processes *all) {
    *all = (struct processes){0};
    DIR *dir = opendir("/proc");
    if (dir == NULL) return;
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        struct process process;
        pid_t pid = atoi(entry->d_name);
        if (pid > 0 && process_read(pid, &process) && !processes_add(all, &process)) break;
    }
    (void)closedir(dir);
}

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
            if (p->ours || is_foreign(g, p->pid)) continue;
            p->ours = p->parent == g->self;
            for (size_t k = 0; !p->ours && k < all->n; k++)
                p->ours = all->at[k].pid == p->parent && all->at[k].ours;
            changed |= p->ours;
        }
    }
}

/* Whether the environment that a process was started with has the mark. Read in pieces that
 * overlap by the mark's length, so that a mark across two pieces is found. */
static bool read_mark(const struct ir_group *g, pid_t pid, bool *ret_empty) {
    char path[32], buffer[8192];
    size_t size = strlen(g->mark) + 1, kept = 1;
    *ret_empty = false;
    if (size + 1 > sizeof buffer / 2) return false;
    (void)snprintf(path, sizeof path, "/proc/%d/environ", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    buffer[0] = '\0'; /* a string begins after a NUL, the first one too */
    bool found = false;
    *ret_empty = true;
    for (ssize_t n; !found && (n = read(fd, buffer + kept, sizeof buffer - kept)) > 0;) {
        *ret_empty = false;
        size_t filled = kept + (size_t)n;
        for (char *at = buffer; !found && at + size < buffer + filled; at++) {
            at = memchr(at, '\0', (size_t)(buffer + filled - size - at));
            if (at == NULL) break;
            found = memcmp(at + 1, g->mark, size) == 0;
        }
        kept = filled < size + 1 ? filled : size + 1;
        memmove(buffer, buffer + filled - kept, kept);
    }
    (void)close(fd);
    return found;
}

static bool stat_is_zero(const char *stat, int field) {
    const char *at = strrchr(stat, ')');
    for (int i = 2; at != NULL && i < field; i++) at = strchr(at + 1, ' ');
    return at != NULL && strncmp(at, " 0 ", 3) == 0;
}

/* Until an execve has filled the new memory, the environment has no address, and reads as empty.
 * Kernel threads and what is exiting have no memory at all. */
static bool is_executing(pid_t pid) {
    char path[32], stat[512];
    (void)snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    if (read_file(path, stat, sizeof stat) <= 0) return false;
    return stat_is_zero(stat, STAT_ENV_START) && !stat_is_zero(stat, STAT_VSIZE);
}

static bool has_mark(const struct ir_group *g, pid_t pid) {
    const struct timespec pause = {.tv_nsec = 200000};
    bool empty, found = read_mark(g, pid, &empty);
    for (int i = 0; empty && i < EXEC_LOOKS && is_executing(pid); i++) {
        (void)nanosleep(&pause, NULL);
        found = read_mark(g, pid, &empty);
    }
    return found ||
           (empty && read_mark(g, pid, &empty)); /* it may have come between the two looks */
}

static void mark_marked(const struct ir_group *g, struct processes *all) {
    for (size_t i = 0; i < all->n; i++) {
        struct process *p = &all->at[i];
        p->ours = p->pid != g->self && p->state != 'Z' && p->start_ticks >= g->spawn_ticks &&
                  has_mark(g, p->pid);
    }
}

static void strays_find(struct ir_group *g, struct processes *all) {
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

/* By pidfd, with a second look between opening and sending: the number may have been reused. A
 * library hears of a stray's end by that pidfd; an own process by SIGCHLD. */
static bool stray_send(struct ir_group *g, const struct process *stray, int sig) {
    int fd = pidfd_open_of(g, stray->pid);
    if (fd < 0) return kill(stray->pid, sig) == 0;
    struct process now;
    bool own = (g->config.flags & IR_OWN_PROCESS) != 0;
    bool same =
        process_read(stray->pid, &now) &&
        (own ? now.parent == stray->parent || now.parent == g->self : has_mark(g, stray->pid));
    bool sent = same && syscall(SYS_pidfd_send_signal, fd, sig, NULL, 0) == 0;
    if (sent && !own && fd_watch(g, fd, EPOLLIN, WATCH_STRAY, (uint32_t)fd) == 0) g->strays_alive++;
    else (void)close(fd);
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
    if (g->self == 1 && n > 0) (void)kill(-1, sig);
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
