/* sys/procfs.c: what /proc says of a process: its parent, its start, its name, its environment. */
#include "sys/sys.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif

#define EXEC_READS 500 /* at a process in an execve, 200 us apart: no event reports its end */
#define STAT_SIZE 1280 /* of a line: 52 numbers of at most 20 digits, and a name */
#define STAT_VSIZE 23  /* fields of proc_pid_stat(5) */
#define STAT_START_CODE 26
#define STAT_ENV_START 50
#define FLAG_EXITING 4u /* PF_EXITING, include/linux/sched.h */
#define FLAG_FORKED 64u /* PF_FORKNOEXEC */

/* A file of /proc is one of many: an interrupted read must not look as if the file had gone. */
static ssize_t read_again(int fd, char *buffer, size_t size) {
    ssize_t n;
    do n = read(fd, buffer, size);
    while (n < 0 && errno == EINTR);
    return n;
}

/* The file's first bytes, ended by a NUL; how many, or -errno: -ESRCH also for what is empty. */
ssize_t process_file(const char *path, char *buffer, size_t size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -errno;
    ssize_t n = read_again(fd, buffer, size - 1);
    if (n < 0) n = -errno;
    (void)close(fd);
    if (n > 0) buffer[n] = '\0';
    return n == 0 ? -ESRCH : n;
}

/* proc_pid_stat(5): the name is in parentheses and may itself contain any of them. -ESRCH: what
 * is no such line. */
static int stat_parse(char *stat, pid_t pid, struct process *ret) {
    char *open_paren = strchr(stat, '('), *close_paren = strrchr(stat, ')');
    unsigned long long start;
    unsigned flags;
    *ret = (struct process){.pid = pid};
    if (open_paren == NULL || close_paren == NULL ||
        sscanf(close_paren + 1,
               " %c %d %d %d %*d %*d %u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %d %*d %llu",
               &ret->state, &ret->parent, &ret->group, &ret->session, &flags, &ret->threads,
               &start) != 7)
        return -ESRCH;
    ret->start_ticks = start;
    ret->exiting = (flags & FLAG_EXITING) != 0;
    ret->forked = (flags & FLAG_FORKED) != 0;
    *close_paren = '\0';
    (void)snprintf(ret->name, sizeof ret->name, "%.15s", open_paren + 1);
    return 0;
}

/* One that exists and is unreadable gets a second look. Its parent may be about to die as a
 * leftover, and nothing shows it any more once it is an orphan without the mark. */
static int process_read_stat(pid_t pid, struct process *ret) {
    char path[32], stat[STAT_SIZE];
    (void)snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    ssize_t size = process_file(path, stat, sizeof stat);
    if (size < 0 && size != -ESRCH && size != -ENOENT) size = process_file(path, stat, sizeof stat);
    return size < 0 ? (int)size : stat_parse(stat, pid, ret);
}

bool process_read(pid_t pid, struct process *ret) {
    return process_read_stat(pid, ret) == 0;
}

/* Its first thread can be a zombie while others still give back memory and files. */
bool process_has_ended(const struct process *process) {
    return process->state == 'X' || (process->state == 'Z' && process->threads <= 1);
}

void process_describe(pid_t pid, char *ret_state, char ret_name[16]) {
    struct process process;
    if (!process_read(pid, &process)) return;
    *ret_state = process.state;
    memcpy(ret_name, process.name, sizeof process.name);
}

bool processes_add(struct processes *all, const struct process *process) {
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

static int by_pid(const void *a, const void *b) {
    const struct process *one = a, *other = b;
    return (one->pid > other->pid) - (one->pid < other->pid);
}

/* NULL: there is none of that number. */
struct process *process_find(const struct processes *all, pid_t pid) {
    const struct process wanted = {.pid = pid};
    if (all->n == 0) return NULL;
    return bsearch(&wanted, all->at, all->n, sizeof *all->at, by_pid);
}

static bool has_gone_or_is_hidden(int error) {
    return error == -ESRCH || error == -ENOENT || error == -EACCES || error == -EPERM;
}

/* Every visible process, by pid; `seen` (or NULL) gets each at once. -errno: some existing ones
 * may be missing, for want of descriptors or memory, say. Those that go meanwhile, or that this
 * user may not look at, are not missing. */
int processes_scan(struct processes *all, void (*seen)(struct process *, void *), void *with) {
    *all = (struct processes){0};
    DIR *dir = opendir("/proc");
    if (dir == NULL) return -errno;
    int r = 0;
    for (struct dirent *entry; errno = 0, (entry = readdir(dir)) != NULL;) {
        struct process process;
        pid_t pid = atoi(entry->d_name);
        int error = pid > 0 ? process_read_stat(pid, &process) : -ESRCH;
        if (error == 0 && seen != NULL) seen(&process, with);
        if (error == 0 && !processes_add(all, &process)) error = -ENOMEM;
        if (error < 0 && !has_gone_or_is_hidden(error)) r = error;
    }
    if (errno != 0) r = -errno;
    (void)closedir(dir);
    if (all->n > 0) qsort(all->at, all->n, sizeof *all->at, by_pid);
    return r;
}

/* Does the chain of parents lead to a leftover? The first ancestor with a decision speaks for
 * all below. A circle, which a table may hold if numbers came up again during the read, ends
 * where it began. */
static bool leads_to_ours(const struct processes *all, struct process *p) {
    for (; p != NULL; p = process_find(all, p->parent)) {
        if (p->decided) return p->ours;
        p->decided = true;
    }
    return false;
}

/* A leftover makes its children leftovers, and theirs, but none with a decision. This looks at
 * every process once, however deep the tree. */
void processes_spread(const struct processes *all) {
    for (size_t i = 0; i < all->n; i++) {
        if (!leads_to_ours(all, &all->at[i])) continue;
        for (struct process *p = &all->at[i]; p != NULL && !p->ours;
             p = process_find(all, p->parent))
            p->ours = true;
    }
}

/* Its pidfd; -errno. */
int process_open(pid_t pid) {
    long fd = syscall(SYS_pidfd_open, pid, 0);
    return fd < 0 ? -errno : (int)fd;
}

/* Through its pidfd (-errno: there is none). Where a sandbox knows no pidfd_send_signal, by the number. */
bool process_send(pid_t pid, int pidfd, int sig) {
    if (pidfd == -ESRCH) return false;
    if (pidfd >= 0 && syscall(SYS_pidfd_send_signal, pidfd, sig, NULL, 0) == 0) return true;
    return !(pidfd >= 0 && errno == ESRCH) && kill(pid, sig) == 0;
}

/* With a second look between opening the pidfd and sending: another process may have the number. */
bool process_signal(const struct process *process, int pidfd, int sig) {
    struct process now;
    if (pidfd == -ESRCH || !process_read(process->pid, &now) ||
        now.start_ticks != process->start_ticks)
        return false;
    return process_send(process->pid, pidfd, sig);
}

/* Each line of a file, however long the file is: its first LINE_SIZE - 1 bytes, with a NUL at
 * the end and without the newline. -errno: it is unreadable. */
int process_lines(const char *path, void (*on_line)(const char *line, void *with), void *with) {
    char piece[1024], line[LINE_SIZE];
    size_t size = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -errno;
    ssize_t n;
    while ((n = read_again(fd, piece, sizeof piece)) > 0) {
        for (ssize_t i = 0; i < n; i++) {
            if (piece[i] != '\n') {
                if (size < sizeof line - 1) line[size++] = piece[i];
                continue;
            }
            line[size] = '\0';
            on_line(line, with);
            size = 0;
        }
    }
    const int r = n < 0 ? -errno : 0;
    (void)close(fd);
    return r;
}

static void nspid_line(const char *line, void *with) {
    int *namespaces = with;
    if (strncmp(line, "NSpid:", 6) != 0) return;
    for (const char *at = strchr(line, '\t'); at != NULL; at = strchr(at + 1, '\t')) ++*namespaces;
}

/* Whether /proc shows this PID namespace: 0, or -errno. -ENOENT: it does not exist. -EXDEV: it
 * is another's, where a number is a stranger's here. There this process's number may be the same
 * by chance, but NSpid has one per namespace down to its own (proc_pid_status(5), Linux 4.1). */
int process_sees_itself(pid_t self) {
    char link[16];
    int namespaces = 0;
    ssize_t n = readlink("/proc/self", link, sizeof link - 1);
    if (n < 0) return -errno;
    link[n] = '\0';
    if (atoi(link) != self) return -EXDEV;
    int r = process_lines("/proc/self/status", nspid_line, &namespaces);
    return r < 0 ? r : namespaces > 1 ? -EXDEV : 0;
}

/* What proc_pid_status(5) says of its signals; a line of that file can be as long as a user has groups. */
struct status {
    uint64_t pending, blocked, held; /* held: blocked, ignored, or caught */
    bool has_memory;
};

static void status_line(const char *line, void *with) {
    struct status *status = with;
    const char *colon = strchr(line, ':');
    if (colon == NULL) return;
    const size_t size = (size_t)(colon - line);
    const uint64_t mask = size == 6 ? strtoull(colon + 1, NULL, 16) : 0;
    if (strncmp(line, "SigPnd:", 7) == 0 || strncmp(line, "ShdPnd:", 7) == 0)
        status->pending |= mask;
    if (strncmp(line, "SigBlk:", 7) == 0 || strncmp(line, "SigIgn:", 7) == 0 ||
        strncmp(line, "SigCgt:", 7) == 0)
        status->held |= mask;
    if (strncmp(line, "SigBlk:", 7) == 0) status->blocked = mask;
    if (strncmp(line, "VmSize:", 7) == 0) status->has_memory = true;
}

static bool status_read(pid_t pid, struct status *ret) {
    char path[32];
    *ret = (struct status){0};
    (void)snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    return process_lines(path, status_line, ret) == 0;
}

/* A signal that ends it is pending and nothing blocks it, or it is on its way out. */
bool process_is_ending(pid_t pid, int sig) {
    struct status status;
    if (!status_read(pid, &status)) return true;
    return (status.pending & (SIGNAL_BIT(SIGKILL) | (SIGNAL_BIT(sig) & ~status.held))) != 0 ||
           !status.has_memory; /* an exiting process has given its memory back */
}

/* It has given its memory back. */
bool process_is_exiting(pid_t pid) {
    struct status status;
    return status_read(pid, &status) && !status.has_memory;
}

/* What exits by itself once everything that holds its pipe is gone: Python's resource tracker
 * (multiprocessing/resource_tracker.py, and loky's), which ignores TERM, and its fork server
 * (multiprocessing/forkserver.py). The forks of that server have its arguments, but only the
 * server has called exec. Of the arguments the first piece is enough. */
bool process_is_tracker(pid_t pid) {
    static const char tracker[] = "resource_tracker import main";
    static const char server[] = "forkserver import main";
    char path[32], arguments[1024];
    struct process process;
    (void)snprintf(path, sizeof path, "/proc/%d/cmdline", (int)pid);
    ssize_t size = process_file(path, arguments, sizeof arguments);
    if (size <= 0) return false;
    if (memmem(arguments, (size_t)size, tracker, sizeof tracker - 1) != NULL) return true;
    return memmem(arguments, (size_t)size, server, sizeof server - 1) != NULL &&
           process_read(pid, &process) && !process.forked;
}

/* It may be a resource tracker whose start has not reached its exec: Python blocks both signals
 * around the fork, and does not wait for the exec (ResourceTracker.ensure_running). */
bool process_starts_tracker(pid_t pid) {
    const uint64_t both = SIGNAL_BIT(SIGINT) | SIGNAL_BIT(SIGTERM);
    struct status status;
    return status_read(pid, &status) && (status.blocked & both) == both;
}

/* Whether a process started with the mark in its environment. It reads pieces that overlap by
 * the mark's length, to find a mark across two pieces. MARK_UNKNOWN: the memory was empty, or an
 * execve or an exit took it away, from when on every read is an end of file. */
static enum mark read_mark(pid_t pid, const char *mark) {
    char path[32], buffer[8192];
    size_t size = strlen(mark) + 1, kept = 1;
    if (size + 1 > sizeof buffer / 2) return MARK_NONE;
    (void)snprintf(path, sizeof path, "/proc/%d/environ", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return MARK_NONE;
    buffer[0] = '\0'; /* a string begins after a NUL, the first one too */
    bool found = false;
    for (ssize_t n; !found && (n = read_again(fd, buffer + kept, sizeof buffer - kept)) > 0;) {
        size_t filled = kept + (size_t)n;
        for (char *at = buffer; !found && at + size < buffer + filled; at++) {
            at = memchr(at, '\0', (size_t)(buffer + filled - size - at));
            if (at == NULL) break;
            found = memcmp(at + 1, mark, size) == 0;
        }
        kept = filled < size + 1 ? filled : size + 1;
        memmove(buffer, buffer + filled - kept, kept);
    }
    const bool is_whole = kept > 1 && pread(fd, buffer, 1, 0) > 0;
    (void)close(fd);
    return found ? MARK_FOUND : is_whole ? MARK_NONE : MARK_UNKNOWN;
}

static unsigned long long stat_number(const char *stat, int field) {
    const char *at = strrchr(stat, ')');
    for (int i = 2; at != NULL && i < field; i++) at = strchr(at + 1, ' ');
    return at == NULL ? 0 : strtoull(at, NULL, 10);
}

/* A process that got an empty one, has gone, or has no memory: a kernel thread, a process that
 * exits. Until an execve has filled the new memory, the environment there reads as empty, too.
 * The address of the code is the last that it sets. */
static bool has_no_environment(pid_t pid) {
    char path[32], stat[STAT_SIZE];
    (void)snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    if (process_file(path, stat, sizeof stat) < 0) return true;
    if (stat_number(stat, STAT_VSIZE) == 0) return true;
    return stat_number(stat, STAT_START_CODE) != 0 &&
           stat_number(stat, STAT_ENV_START) == stat_number(stat, STAT_ENV_START + 1);
}

enum mark process_mark(pid_t pid, const char *mark) {
    enum mark found = read_mark(pid, mark);
    return found == MARK_UNKNOWN && has_no_environment(pid) ? MARK_NONE : found;
}

enum mark process_mark_after_exec(pid_t pid, const char *mark) {
    const struct timespec pause = {.tv_nsec = 200000};
    enum mark found = process_mark(pid, mark);
    for (int i = 0; found == MARK_UNKNOWN && i < EXEC_READS; i++) {
        (void)nanosleep(&pause, NULL);
        found = process_mark(pid, mark);
    }
    return found;
}
