/* sys/fd.c: descriptors. Every descriptor of the core is close-on-exec from its creation, and
 * above 2. */
#include "group/group.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

/* fork(2) copies descriptors before memory. So what another thread closes between the two is
 * open in the child, whose memory says that it is closed. That is the end of a pipe that nothing
 * there knows of. So the core notes a closing, and the child repeats it; not where it knows that
 * there is no other thread. A lock around every close would deadlock with a host program's signal
 * handlers. */
enum { CLOSINGS_KEPT = 4096 };
struct closing {
    _Atomic dev_t device;
    _Atomic ino_t inode; /* the kernel gives one again after 2^32 others */
    _Atomic int fd;
    _Atomic uint32_t done; /* its number, from 1, after its close */
};
static struct closing closings[CLOSINGS_KEPT];
static _Atomic uint32_t last_closing;
static _Thread_local uint32_t last_before_fork; /* all up to it were done */

static bool fd_is_link(int fd, struct stat *ret_status) {
    return fstat(fd, ret_status) == 0 &&
           (S_ISFIFO(ret_status->st_mode) || S_ISSOCK(ret_status->st_mode));
}

/* Held while the core makes pipes and gives them to workers: a child that another thread forks
 * just then would hold them open. Python's hooks (core/group.py) make its forks wait, but not one
 * that had begun before the hooks were there, and none of another library's threads. An
 * allocator's handler is older than this one, and so runs after it (pthread_atfork(3)): no one
 * waits here with a lock of the allocator. A signal handler that forks in the middle of a fork
 * does not wait. */
static pthread_mutex_t forks = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int forks_depth;

void forks_hold(void) {
    if (forks_depth++ == 0) (void)pthread_mutex_lock(&forks);
}

void forks_release(void) {
    if (forks_depth == 1) (void)pthread_mutex_unlock(&forks);
    forks_depth--;
}

static void fork_prepare(void) {
    forks_hold();
    const uint32_t last = last_closing;
    last_before_fork = last;
    for (uint32_t back = 0; back < last && back < CLOSINGS_KEPT; back++)
        if (closings[(last - back) % CLOSINGS_KEPT].done != last - back)
            last_before_fork = last - back - 1;
}

static void fork_child(void) {
    forks_release();
    const uint32_t last = last_closing;
    for (uint32_t back = 0; back < last - last_before_fork && back < CLOSINGS_KEPT; back++) {
        struct closing *was = &closings[(last - back) % CLOSINGS_KEPT];
        struct stat status;
        if (fd_is_link(was->fd, &status) && status.st_ino == was->inode &&
            status.st_dev == was->device)
            (void)close(was->fd);
        was->done = last - back;
    }
}

__attribute__((constructor)) static void fork_watch(void) {
    (void)pthread_atfork(fork_prepare, forks_release, fork_child);
}

int fd_close(int fd) {
    struct stat status;
    if (fd < 0) return -1;
    if (thread_is_alone() || !fd_is_link(fd, &status)) {
        (void)close(fd);
        return -1;
    }
    const uint32_t number = ++last_closing;
    struct closing *now = &closings[number % CLOSINGS_KEPT];
    now->fd = -1;
    now->device = status.st_dev;
    now->inode = status.st_ino;
    now->fd = fd;
    (void)close(fd);
    now->done = number;
    return -1;
}

/* Moves a new descriptor above 2. In a library the host may have closed its stdio, and dup2
 * makes a worker's stdio on 0-2, which must not overwrite a source. */
int fd_above_stdio(int fd) {
    if (fd < 0 || fd > 2) return fd;
    int moved = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    int r = moved < 0 ? -errno : moved;
    (void)close(fd);
    return r;
}

/* What a system call has just made, or its -errno. */
int fd_new(int fd) {
    return fd < 0 ? -errno : fd_above_stdio(fd);
}

int fd_duplicate(int fd) {
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    return copy < 0 ? -errno : copy;
}

/* A new non-blocking description of a pipe, FIFO, or character device: O_NONBLOCK belongs to the
 * open file, which the shell shares. */
int fd_reopen(int fd, int mode) {
    struct stat status;
    if (fstat(fd, &status) < 0) return -errno;
    if (!S_ISFIFO(status.st_mode) && !S_ISCHR(status.st_mode)) return -EINVAL;
    char path[32];
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int own = fd_new(open(path, mode | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
    if (own >= 0 || !isatty(fd)) return own;
    /* a terminal that belongs to somebody else (su, sudo) opens as /dev/tty, if it is that one */
    unsigned wanted, got;
    own = fd_new(open("/dev/tty", mode | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
    if (own >= 0 &&
        (ioctl(fd, TIOCGDEV, &wanted) < 0 || ioctl(own, TIOCGDEV, &got) < 0 || wanted != got)) {
        (void)close(own);
        return -EACCES;
    }
    return own;
}

/* A pipe; `nonblocking_end` (0 or 1) is the core's, the other goes to a worker, who expects to
 * block. */
int fd_pipe(int ret_fds[2], int nonblocking_end) {
    int fds[2];
    if (pipe2(fds, O_CLOEXEC) < 0) return -errno;
    for (int i = 0; i < 2; i++) {
        fds[i] = fd_above_stdio(fds[i]);
        if (fds[i] < 0) {
            int r = fds[i];
            (void)fd_close(fds[1 - i]);
            return r;
        }
    }
    if (fcntl(fds[nonblocking_end], F_SETFL, O_NONBLOCK) < 0) {
        int r = -errno;
        (void)close(fds[0]);
        (void)close(fds[1]);
        return r;
    }
    ret_fds[0] = fds[0];
    ret_fds[1] = fds[1];
    return 0;
}

static bool fd_is_inherited(int fd) {
    int flags = fd <= 2 ? -1 : fcntl(fd, F_GETFD);
    return flags >= 0 && !(flags & FD_CLOEXEC);
}

/* Those that an exec would leave open: the user's. How many there are; -errno: /proc does not say. */
int fds_each_inherited(void (*each)(int fd, void *with), void *with) {
    DIR *dir = opendir("/proc/self/fd");
    if (dir == NULL) return -errno;
    int count = 0;
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        int fd = atoi(entry->d_name);
        if (fd == dirfd(dir) || !fd_is_inherited(fd)) continue;
        each(fd, with);
        count++;
    }
    (void)closedir(dir);
    return count;
}

/* The same, where none is `end` or above. */
int fds_each_inherited_below(int end, void (*each)(int fd, void *with), void *with) {
    int count = 0;
    for (int fd = 3; fd < end; fd++) {
        if (!fd_is_inherited(fd)) continue;
        each(fd, with);
        count++;
    }
    return count;
}

/* SIGPIPE: a host program may have a use for that signal, or have left it at its default. A
 * reader of the core that has gone is not its affair. The signal goes to the thread that writes
 * (write(2) sends it to itself), so this holds it back there and takes it. An earlier pending
 * one stays. */
enum { PIPE_HELD = 1, PIPE_BLOCKED = 2, PIPE_PENDING = 4 };

static void sigpipe_set(sigset_t *ret_set) {
    (void)sigemptyset(ret_set);
    (void)sigaddset(ret_set, SIGPIPE);
}

void ir_sigpipe_hold(int *ret_held) {
    sigset_t only, before, pending;
    sigpipe_set(&only);
    if (pthread_sigmask(SIG_BLOCK, &only, &before) != 0) return;
    *ret_held = PIPE_HELD;
    if (sigismember(&before, SIGPIPE) != 1) return;
    *ret_held |= PIPE_BLOCKED;
    if (sigpending(&pending) < 0 || sigismember(&pending, SIGPIPE) == 1) *ret_held |= PIPE_PENDING;
}

void ir_sigpipe_release(int *held) {
    const struct timespec now = {0};
    const int was = *held;
    sigset_t only;
    *held = 0;
    if (!(was & PIPE_HELD)) return;
    sigpipe_set(&only);
    if (!(was & PIPE_PENDING)) (void)sigtimedwait(&only, NULL, &now);
    if (!(was & PIPE_BLOCKED)) (void)pthread_sigmask(SIG_UNBLOCK, &only, NULL);
}

/* write(2) without SIGPIPE; -errno on failure. Nor does a terminal stop this process (stty
 * tostop): a write of a thread that blocks SIGTTOU succeeds in the background, too. */
ssize_t fd_write(int fd, const void *bytes, size_t size) {
    int held = 0;
    sigset_t tty, before;
    (void)sigemptyset(&tty);
    (void)sigaddset(&tty, SIGTTOU);
    (void)pthread_sigmask(SIG_BLOCK, &tty, &before);
    ir_sigpipe_hold(&held);
    ssize_t n = write(fd, bytes, size);
    if (n < 0) n = -errno;
    if (n != -EPIPE) held |= PIPE_PENDING; /* there is no message to take */
    ir_sigpipe_release(&held);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return n;
}

int64_t ir_write(int fd, const char *bytes, uint64_t size) {
    return fd_write(fd, bytes, size);
}

static int fd_control(const struct ir_group *g, int op, int fd, uint32_t events, enum watch kind,
                      uint32_t index) {
    struct epoll_event event = {.events = events, .data.u64 = ((uint64_t)kind << 32) | index};
    return epoll_ctl(g->epoll_fd, op, fd, &event) < 0 ? -errno : 0;
}

int fd_watch(const struct ir_group *g, int fd, uint32_t events, enum watch kind, uint32_t index) {
    return fd_control(g, EPOLL_CTL_ADD, fd, events, kind, index);
}

/* Another wish for a watched descriptor: it needs no memory, so it cannot fail. 0 is temporary:
 * what the kernel reports unasked (an error, a hang-up) then comes once. */
void fd_rewatch(const struct ir_group *g, int fd, uint32_t events, enum watch kind,
                uint32_t index) {
    (void)fd_control(g, EPOLL_CTL_MOD, fd, events == 0 ? EPOLLET : events, kind, index);
}

void fd_unwatch(const struct ir_group *g, int fd) {
    (void)epoll_ctl(g->epoll_fd, EPOLL_CTL_DEL, fd, NULL);
}

/* Closing alone does not end a watch: epoll watches the open file (epoll(7), questions and
 * answers). A child of another thread's spawn may have a copy of it until its exec. */
int fd_release(const struct ir_group *g, int fd) {
    if (fd >= 0) fd_unwatch(g, fd);
    return fd_close(fd);
}

/* proc_pid_stat(5) gives a process's start in these, since boot and rounded down. */
uint64_t clock_ticks(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_BOOTTIME, &now);
    uint64_t per_second = (uint64_t)sysconf(_SC_CLK_TCK);
    return (uint64_t)now.tv_sec * per_second + (uint64_t)now.tv_nsec * per_second / 1000000000u;
}

void timer_arm(int fd, int64_t delay_ns) {
    if (delay_ns < 1) delay_ns = 1; /* 0 would disarm it */
    struct itimerspec when = {.it_value.tv_sec = (time_t)(delay_ns / 1000000000LL),
                              .it_value.tv_nsec = (long)(delay_ns % 1000000000LL)};
    (void)timerfd_settime(fd, 0, &when, NULL);
}

/* The one timer of the timetable: the state's time is up after this many milliseconds. */
void timer_set(struct ir_group *g, int64_t delay_ms) {
    const int64_t now_ns = clock_ns(), most_ms = (INT64_MAX - now_ns) / NS_PER_MS;
    g->due_ns = now_ns + (delay_ms < most_ms ? delay_ms : most_ms) * NS_PER_MS;
    timer_arm(g->timer_fd, g->due_ns - now_ns);
}

/* No event is due, and the state's time is not up: the timer wakes the core before. */
void timer_wake_early(struct ir_group *g) {
    const int64_t early_ns = RECHECK_MS * NS_PER_MS, left_ns = g->due_ns - clock_ns();
    timer_arm(g->timer_fd, early_ns < left_ns ? early_ns : left_ns);
}

/* It has fired. Returns whether the state's time is up. */
bool timer_is_due(struct ir_group *g) {
    uint64_t count;
    if (read(g->timer_fd, &count, sizeof count) != (ssize_t)sizeof count) return false;
    const int64_t left_ns = g->due_ns - clock_ns();
    if (left_ns > 0) timer_arm(g->timer_fd, left_ns);
    return left_ns <= 0;
}
