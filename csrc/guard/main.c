/* guard/main.c: irun-guard, which outlives its launcher by the blink in which it ends what that has left.
 *
 *     irun-guard PARENT SESSION SINCE MARK FOLDER CGROUP    (stdin: a pipe that holds the workers' pids)
 *
 * It waits in one system call, on no clock, for the parent-death signal (prctl(2)). That is the
 * spawning thread's: where it comes though the parent lives (getppid says so), it comes again when the
 * parent dies. Ours is what came to the same new parent as we did and carries MARK in its environment or
 * is in a worker's process group, in the launcher's SESSION; and the descendants of these; nothing older
 * than SINCE, in ticks since boot; and all in CGROUP. All of it is killed, until several looks find no
 * more; then FOLDER and CGROUP are removed ("": none). */
#include "../core.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define WORKERS_READ 16384u /* what a pipe holds of them */
#define EMPTY_LOOKS 3

struct launch {
    const char *mark;
    uint64_t since;
    pid_t session;
    pid_t workers[WORKERS_READ];
    size_t n;
    struct processes killed;
    bool groups_only, found;
};

/* The launcher's terminal, mounts and descriptors are none of ours. */
static int settle(void) {
    sigset_t all;
    (void)sigfillset(&all);
    (void)sigprocmask(SIG_SETMASK, &all, NULL);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null < 0 || dup2(null, 1) < 0 || dup2(null, 2) < 0 || chdir("/") < 0) return -errno;
    DIR *dir = opendir("/proc/self/fd");
    if (dir == NULL) return 0;
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        int fd = atoi(entry->d_name);
        if (fd > 2 && fd != dirfd(dir)) (void)close(fd);
    }
    (void)closedir(dir);
    return 0;
}

static int await_death(pid_t parent) {
    sigset_t death;
    (void)sigemptyset(&death);
    (void)sigaddset(&death, SIGUSR1);
    if (prctl(PR_SET_PDEATHSIG, SIGUSR1, 0, 0, 0) < 0) return -errno;
    while (getppid() == parent)
        if (sigwaitinfo(&death, NULL) < 0 && errno != EINTR) return -errno;
    return 0;
}

/* Nobody writes any more, but a child that a library's host forked may hold the other end open. */
static void read_workers(struct launch *launch) {
    if (fcntl(0, F_SETFL, O_NONBLOCK) < 0) return;
    ssize_t n = read(0, launch->workers, sizeof launch->workers);
    launch->n = n > 0 ? (size_t)n / sizeof *launch->workers : 0;
}

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

/* As soon as it is seen, for what forks and exits all the time is gone a moment later. The orphans of a
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

/* Whether there was anything that is new to us, or that we could not see. */
static bool look(struct launch *launch) {
    struct processes all;
    launch->found = false;
    if (processes_scan(&all, judge, launch) < 0) launch->found = true;
    processes_spread(&all);
    for (size_t i = 0; i < all.n; i++)
        if (all.at[i].ours) kill_one(launch, &all.at[i]);
    free(all.at);
    return launch->found;
}

/* First those that are known without reading what may hang; then all, until several looks in a row find
 * nobody: one alone may have missed who was forking just then. */
static void end_launch(struct launch *launch) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    time_t end_s = now.tv_sec + GIVE_UP_MS / 1000;
    launch->groups_only = true;
    (void)look(launch);
    launch->groups_only = false;
    for (int empty = 0; empty < EMPTY_LOOKS && now.tv_sec <= end_s;) {
        empty = look(launch) ? 0 : empty + 1;
        (void)clock_gettime(CLOCK_MONOTONIC, &now);
    }
}

/* The launcher's own folder for error files, in which only ranks write. */
static void remove_folder(const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (dir == NULL) return;
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;)
        (void)unlinkat(fd, entry->d_name, 0);
    (void)closedir(dir);
    (void)rmdir(path);
}

static void kill_cgroup(const char *path) {
    char file[PATH_MAX];
    (void)snprintf(file, sizeof file, "%s/cgroup.kill", path);
    int fd = open(file, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, "1", 1) < 0) return; /* the look into /proc is still to come */
    (void)close(fd);
}

/* The leaves, and those that ranks have made in them. */
static void remove_tree(int at, const char *name) {
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (dir == NULL) return;
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;)
        if (entry->d_type == DT_DIR && entry->d_name[0] != '.') remove_tree(fd, entry->d_name);
    (void)closedir(dir);
    (void)unlinkat(at, name, AT_REMOVEDIR);
}

/* A leaf with the dead in it cannot be removed yet; its cgroup.events says when it can. */
static void remove_cgroup(const char *path) {
    char file[PATH_MAX], events[64];
    (void)snprintf(file, sizeof file, "%s/cgroup.events", path);
    struct pollfd changed = {.fd = open(file, O_RDONLY | O_CLOEXEC), .events = POLLPRI};
    while (pread(changed.fd, events, sizeof events, 0) > 0 &&
           strncmp(events, "populated 1", 11) == 0)
        if (poll(&changed, 1, GIVE_UP_MS) <= 0) break;
    (void)close(changed.fd);
    remove_tree(AT_FDCWD, path);
}

int main(int argc, char **argv) {
    static struct launch launch;
    if (argc != GUARD_WORDS) {
        (void)fprintf(stderr, "%s: started by infini-run, for infini-run\n", argv[GUARD_SELF]);
        return 2;
    }
    launch.mark = argv[GUARD_MARK];
    launch.session = atoi(argv[GUARD_SESSION]);
    launch.since = strtoull(argv[GUARD_SINCE], NULL, 10);
    if (settle() < 0 || await_death(atoi(argv[GUARD_PARENT])) < 0) return 1;
    read_workers(&launch);
    if (argv[GUARD_CGROUP][0] != '\0') kill_cgroup(argv[GUARD_CGROUP]);
    if (process_sees_itself(getpid())) end_launch(&launch);
    if (argv[GUARD_FOLDER][0] != '\0') remove_folder(argv[GUARD_FOLDER]);
    if (argv[GUARD_CGROUP][0] != '\0') remove_cgroup(argv[GUARD_CGROUP]);
    return 0;
}
