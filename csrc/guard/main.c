/* guard/main.c: irun-guard, which outlives its launcher by the blink in which it ends what that has
 * left.
 *
 * irun-guard PARENT SESSION SINCE MARK FOLDER CGROUP LEASE WAIT LOCK
 * (stdin: a pipe that holds the workers' pids)
 *
 * It waits in one system call, on no clock, for the lock that the launcher has on that pipe
 * (children/guard.c). It gets the lock when the launcher dies, and also when a host program has
 * executed another one. Then the pid lives on, and the workers are children of a program that knows
 * nothing of them. The guard then ends what the launcher has left (find_leftovers.c) and all in
 * CGROUP, and removes FOLDER and CGROUP ("": none). It stays, as they do, a zombie of the other
 * program until that waits for it or ends.
 *
 * It sees a death to its end, by the parent-death signal (prctl(2)), so that all orphans are where
 * it is. That is the spawning thread's: if it comes though the parent lives (by getppid), it comes
 * another time when the parent dies. Without a LOCK, and with a LEASE, it waits for that signal
 * alone.
 *
 * With a WAIT the workers have this many milliseconds to exit, or die by SIGKILL. It kills nothing
 * else: a process of srun outlives it to ask Slurm for the end of its step.
 *
 * With a LEASE (sys/lease.h) a timer wakes it, too, at the deadline that it knows. Without a
 * later deadline, it ends what the launch has started, though the launcher lives, and then waits
 * for its death. When that has come, and all is dead, it tells the head of many nodes. */
#include "guard/arguments.h"
#include "guard/find_leftovers.h"
#include "sys/lease.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_close_range
#define SYS_close_range 436
#endif

enum end { LAUNCHER_DIED, LAUNCHER_EXECED, LEASE_ENDED };

/* The launcher's terminal, mounts, and descriptors are not the guard's, except those of a lease. */
static int detach_from_launcher(bool leased) {
    sigset_t all;
    (void)sigfillset(&all);
    (void)sigprocmask(SIG_SETMASK, &all, NULL);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null < 0 || chdir("/") < 0) return -errno;
    if (!leased && (dup2(null, 1) < 0 || dup2(null, 2) < 0)) return -errno;
    DIR *dir = opendir("/proc/self/fd");
    if (dir == NULL) {
        (void)syscall(SYS_close_range, 3, ~0U, 0); /* Linux 5.9 */
        return 0;
    }
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        int fd = atoi(entry->d_name);
        if (fd > 2 && fd != dirfd(dir)) (void)close(fd);
    }
    (void)closedir(dir);
    return 0;
}

static int map_lease(struct lease_memory **ret_lease) {
    void *memory = mmap(NULL, sizeof **ret_lease, PROT_READ | PROT_WRITE, MAP_SHARED, 2, 0);
    if (memory == MAP_FAILED) return -errno;
    *ret_lease = memory;
    return 0;
}

/* The head of many nodes need not wait for the end of the lease then. If this does not get
 * through, it waits for that. */
static void notify_head(const struct lease_memory *lease) {
    struct sockaddr_storage address;
    if (lease->last_word_size - 1 >= LEASE_WORD_MOST || lease->address_size > sizeof address)
        return;
    memcpy(&address, lease->address, sizeof address);
    int fd = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return;
    struct pollfd connected = {.fd = fd, .events = POLLOUT};
    int r = connect(fd, (struct sockaddr *)&address, lease->address_size);
    if (r == 0 || (errno == EINPROGRESS && poll(&connected, 1, GIVE_UP_MS) > 0)) {
        ssize_t sent = send(fd, lease->last_word, lease->last_word_size, MSG_NOSIGNAL);
        (void)sent;
    }
    (void)close(fd);
}

static void notify_launcher(char word) {
    ssize_t written = write(1, &word, 1);
    (void)written; /* it has gone, or reads it when it continues */
}

/* timer_create(2) and timer_settime(2), without libc's threads: the timer sends SIGALRM. */
static int set_alarm(int timer, int64_t deadline_ns) {
    struct itimerspec at = {.it_value = {deadline_ns / 1000000000LL, deadline_ns % 1000000000LL}};
    return syscall(SYS_timer_settime, timer, TIMER_ABSTIME, &at, NULL) < 0 ? -errno : 0;
}

/* False where that is unknown. The lock goes before the parent shows as dead. */
static bool is_dying(pid_t pid) {
    struct process process;
    return process_read(pid, &process) && process.exiting;
}

static bool lock_is_lost(void) {
    struct flock whole = {.l_type = F_RDLCK, .l_whence = SEEK_SET};
    int r;
    do r = fcntl(0, F_SETLKW, &whole);
    while (r < 0 && errno == EINTR);
    return r == 0;
}

/* What ended, or -errno. lease: NULL: none; locked: the launcher has a lock. */
static int await_end(pid_t parent, int64_t *lease, bool locked) {
    sigset_t awaited;
    int timer = 0;
    (void)sigemptyset(&awaited);
    (void)sigaddset(&awaited, SIGUSR1);
    (void)sigaddset(&awaited, SIGALRM);
    if (prctl(PR_SET_PDEATHSIG, SIGUSR1, 0, 0, 0) < 0) return -errno;
    if (lease == NULL && locked && lock_is_lost() && getppid() == parent && !is_dying(parent))
        return LAUNCHER_EXECED;
    if (lease != NULL && syscall(SYS_timer_create, CLOCK_BOOTTIME, NULL, &timer) < 0) return -errno;
    for (bool told = lease == NULL; getppid() == parent; told = true) {
        if (lease != NULL && lease_is_over(lease, boottime_ns())) return LEASE_ENDED;
        int r = lease != NULL ? set_alarm(timer, lease_deadline(lease)) : 0;
        if (r < 0) return r;
        if (!told) notify_launcher(LEASE_HELD);
        if (sigwaitinfo(&awaited, NULL) < 0 && errno != EINTR) return -errno;
    }
    return LAUNCHER_DIED;
}

static void kill_cgroup(const char *path) {
    char file[PATH_MAX];
    (void)snprintf(file, sizeof file, "%s/cgroup.kill", path);
    int fd = open(file, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, "1", 1) < 0) return; /* the look into /proc is still to come */
    (void)close(fd);
}

/* A folder and all that is in it: the launch's own, or cgroups, whose files go with them. */
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

/* The kernel keeps a leaf while the dead are in it; its cgroup.events shows when it is empty. */
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

/* Returns whether all of them are known to be dead. */
static bool end_processes(struct launch *launch, pid_t host, char **argv) {
    launch->host = host;
    if (argv[GUARD_CGROUP][0] != '\0') kill_cgroup(argv[GUARD_CGROUP]);
    if (argv[GUARD_WAIT][0] == '\0') return end_launch(launch);
    end_workers(launch, atoi(argv[GUARD_WAIT]));
    return false;
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
    const pid_t parent = atoi(argv[GUARD_PARENT]);
    const bool leased = argv[GUARD_LEASE][0] != '\0', locked = argv[GUARD_LOCK][0] != '\0';
    struct lease_memory *lease = NULL;
    int end = detach_from_launcher(leased);
    if (end == 0 && leased) end = map_lease(&lease);
    if (end == 0) end = await_end(parent, lease != NULL ? &lease->deadline_ns : NULL, locked);
    if (end == LEASE_ENDED) {
        const bool is_host = strcmp(argv[GUARD_LEASE], GUARD_LEASE_HOST) == 0;
        (void)end_processes(&launch, is_host ? parent : 0, argv);
        notify_launcher(LEASE_OVER);
        end = await_end(parent, NULL, locked);
    }
    if (end < 0) return -end;
    if (end == LAUNCHER_EXECED) (void)end_processes(&launch, parent, argv);
    if (getppid() != parent && end_processes(&launch, 0, argv) && lease != NULL) notify_head(lease);
    if (argv[GUARD_FOLDER][0] != '\0') remove_tree(AT_FDCWD, argv[GUARD_FOLDER]);
    if (argv[GUARD_CGROUP][0] != '\0') remove_cgroup(argv[GUARD_CGROUP]);
    return 0;
}
