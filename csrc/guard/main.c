/* guard/main.c: irun-guard, which outlives its launcher by the blink in which it ends what that has left.
 *
 *     irun-guard PARENT SESSION SINCE MARK FOLDER CGROUP    (stdin: a pipe that holds the workers' pids)
 *
 * It waits in one system call, on no clock, for the parent-death signal (prctl(2)). That is the
 * spawning thread's: where it comes though the parent lives (getppid says so), it comes again when the
 * parent dies. Then it ends what the launcher has left (find_leftovers.c) and all in CGROUP, and removes FOLDER
 * and CGROUP ("": none). */
#include "guard/arguments.h"
#include "guard/find_leftovers.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

/* The launcher's terminal, mounts and descriptors are none of ours. */
static int detach_from_launcher(void) {
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

static void kill_cgroup(const char *path) {
    char file[PATH_MAX];
    (void)snprintf(file, sizeof file, "%s/cgroup.kill", path);
    int fd = open(file, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, "1", 1) < 0) return; /* the look into /proc is still to come */
    (void)close(fd);
}

/* A folder and all that ranks have made in it: the launcher's own for error files, or cgroups, whose
 * files go with them. */
static void remove_tree(int at, const char *name) {
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (dir == NULL) return;
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (unlinkat(fd, entry->d_name, 0) < 0 && entry->d_type != DT_REG)
            remove_tree(fd, entry->d_name);
    }
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
    if (argc != GUARD_ARGC) {
        (void)fprintf(stderr, "%s: started by infini-run, for infini-run\n", argv[GUARD_SELF]);
        return 2;
    }
    launch.mark = argv[GUARD_MARK];
    launch.session = atoi(argv[GUARD_SESSION]);
    launch.since = strtoull(argv[GUARD_SINCE], NULL, 10);
    if (detach_from_launcher() < 0 || await_death(atoi(argv[GUARD_PARENT])) < 0) return 1;
    read_workers(&launch);
    if (argv[GUARD_CGROUP][0] != '\0') kill_cgroup(argv[GUARD_CGROUP]);
    if (process_sees_itself(getpid())) end_launch(&launch);
    if (argv[GUARD_FOLDER][0] != '\0') remove_tree(AT_FDCWD, argv[GUARD_FOLDER]);
    if (argv[GUARD_CGROUP][0] != '\0') remove_cgroup(argv[GUARD_CGROUP]);
    return 0;
}
