/* process.c: what /proc says of a process: its parent, its start, its name, its environment. */
#include "core.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define EXEC_LOOKS 500 /* at a process in an execve, 200 us apart: nothing tells of its end */
#define STAT_VSIZE 23  /* fields of proc_pid_stat(5) */
#define STAT_ENV_START 50

static ssize_t read_file(const char *path, char *buffer, size_t size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t n = read(fd, buffer, size - 1);
    (void)close(fd);
    if (n >= 0) buffer[n] = '\0';
    return n;
}

/* proc_pid_stat(5): the name stands in parentheses and may itself hold any of them. */
bool process_read(pid_t pid, struct process *ret) {
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
void processes_scan(struct processes *all) {
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

/* False without /proc, and where it is another PID namespace's. */
bool process_sees_itself(pid_t self) {
    char link[16];
    ssize_t n = readlink("/proc/self", link, sizeof link - 1);
    if (n <= 0) return false;
    link[n] = '\0';
    return atoi(link) == self;
}

/* Whether the environment that a process was started with has the mark. Read in pieces that
 * overlap by the mark's length, so that a mark across two pieces is found. */
static bool read_mark(pid_t pid, const char *mark, bool *ret_empty) {
    char path[32], buffer[8192];
    size_t size = strlen(mark) + 1, kept = 1;
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
            found = memcmp(at + 1, mark, size) == 0;
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

bool process_has_mark(pid_t pid, const char *mark) {
    const struct timespec pause = {.tv_nsec = 200000};
    bool empty, found = read_mark(pid, mark, &empty);
    for (int i = 0; empty && i < EXEC_LOOKS && is_executing(pid); i++) {
        (void)nanosleep(&pause, NULL);
        found = read_mark(pid, mark, &empty);
    }
    return found ||
           (empty && read_mark(pid, mark, &empty)); /* it may have come between the two looks */
}
