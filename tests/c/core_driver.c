/* core_driver.c: drives the core without an interpreter, for valgrind: every kind of launch, every way to end one,
 * and every allocation and descriptor denied once. The rule: whatever is denied, nothing is lost or used after its
 * end. Built with -Wl,--wrap=... for the functions below (scripts/valgrind.sh). */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "include/irun.h"

#define WORKERS 3
#define CHECK(what) ((what) ? (void)0 : fail(#what, __LINE__))

static const char *doing = "";
static int denied_call; /* 0: none is denied */
static int calls;
static uint32_t path_flags;

static void fail(const char *what, int line) {
    (void)fprintf(stderr, "core_driver.c:%d: %s, call %d denied: not true: %s\n", line, doing,
                  denied_call, what);
    exit(1);
}

/* ---- what may be denied */

static bool deny(int error) {
    if (++calls != denied_call) return false;
    errno = error;
    return true;
}

#define WRAP(result, name, failure, error, parameters, ...)                                        \
    result __real_##name parameters;                                                               \
    result __wrap_##name parameters;                                                               \
    result __wrap_##name parameters {                                                              \
        return deny(error) ? (failure) : __real_##name(__VA_ARGS__);                               \
    }

WRAP(void *, malloc, NULL, ENOMEM, (size_t size), size)
WRAP(void *, calloc, NULL, ENOMEM, (size_t n, size_t size), n, size)
WRAP(void *, realloc, NULL, ENOMEM, (void *old, size_t size), old, size)
WRAP(char *, strdup, NULL, ENOMEM, (const char *text), text)
WRAP(int, epoll_create1, -1, EMFILE, (int how), how)
WRAP(int, timerfd_create, -1, EMFILE, (int clock, int how), clock, how)
WRAP(int, signalfd, -1, EMFILE, (int fd, const sigset_t *set, int how), fd, set, how)
WRAP(int, pipe2, -1, EMFILE, (int *fds, int how), fds, how)
WRAP(int, fcntl, -1, EMFILE, (int fd, int what, long more), fd, what, more)
WRAP(void *, opendir, NULL, EMFILE, (const char *path), path)
WRAP(void *, mmap, MAP_FAILED, ENOMEM,
     (void *at, size_t size, int how, int flags, int fd, off_t from), at, size, how, flags, fd,
     from)
WRAP(int, pthread_create, EAGAIN, EAGAIN, (void *thread, void *how, void *what, void *with), thread,
     how, what, with)

/* Only a new watch takes memory: epoll_ctl(2). */
int __real_epoll_ctl(int fd, int op, int on, struct epoll_event *event);
int __wrap_epoll_ctl(int fd, int op, int on, struct epoll_event *event);
int __wrap_epoll_ctl(int fd, int op, int on, struct epoll_event *event) {
    return op == EPOLL_CTL_ADD && deny(ENOSPC) ? -1 : __real_epoll_ctl(fd, op, on, event);
}

/* ---- launches */

static const char *const base_env[] = {"PATH=/usr/bin:/bin", "MARK=driver", NULL};
static const char *argv[] = {"sh", "-c", NULL, NULL};
static int console[2], logs[WORKERS], input = -1;
static const uint64_t every[] = {~UINT64_C(0), ~UINT64_C(0)}; /* the kernel takes what it has of it */
static const uint64_t first[] = {1};
static const char *cwd;
static const char *guard; /* irun-guard; NULL: none */

static struct ir_group *make(uint32_t more_flags, int64_t grace_ms) {
    struct ir_config config = {
        .mark = "MARK=driver",
        .grace_ms = grace_ms,
        .signal_grace_ms = grace_ms,
        .stop_signal = SIGTERM,
        .stop_scope = IR_SCOPE_MIXED,
        .console_fd = {console[0], console[1]},
        .stdin_fd = input,
        .message_fd = -1,
        .suspend_write_fd = -1,
        .suspend_read_fd = -1,
        .guard = guard,
        .flags = path_flags | more_flags,
    };
    struct ir_group *group = NULL;
    int r = ir_group_new(&config, WORKERS, &group);
    CHECK(r == 0 ? group != NULL : group == NULL && denied_call > 0);
    return group;
}

static int spawn(struct ir_group *group, uint32_t more_flags, const char *script) {
    struct ir_worker workers[WORKERS] = {{0}};
    struct ir_failure failure;
    argv[2] = script;
    for (int i = 0; i < WORKERS; i++) {
        workers[i] = (struct ir_worker){
            .program = "/bin/sh",
            .argv = argv,
            .base_env = base_env,
            .env = "A=1\0B=2",
            .cwd = cwd,
            .label = {"[out] ", "[err] "},
            .label_more = {"[out +] ", "[err +] "},
            .cpus = every,
            .nodes = i == 0 ? first : NULL,
            .cpu_words = 2,
            .node_words = i == 0 ? 1 : 0,
            .env_count = 2,
            .stdio = {input >= 0 ? IR_FD_PIPE : IR_FD_INHERIT, IR_FD_PIPE, IR_FD_PIPE},
            .output = {IR_TO_CONSOLE | IR_TO_LOG, IR_TO_CONSOLE | IR_TO_LOG},
            .log_fd = logs[i],
            .error_log_fd = -1,
        };
    }
    int r = ir_group_spawn(group, workers, WORKERS, &failure);
    bool told = (more_flags & IR_OWN_PROCESS) && r >= 0; /* a signal came: fewer were started */
    CHECK(r == WORKERS || told || (r < 0 && denied_call > 0 && failure.error == -r));
    return r;
}

/* Steps until its end; returns how many workers were heard of. */
static int finish(struct ir_group *group) {
    struct ir_event events[64];
    int exits = 0;
    for (bool ended = false; !ended;) {
        int n = ir_group_run_once(group, events, 64);
        for (int i = 0; i < n; i++) {
            exits += events[i].kind == IR_EXITED;
            ended |= events[i].kind == IR_ENDED;
        }
        if (n == 0 && !ended) CHECK(ir_group_wait(group, 60000) != 0);
    }
    return exits;
}

static void run(uint32_t more_flags, const char *script) {
    char tail[64];
    struct ir_group *group = make(more_flags, 50);
    if (group == NULL) return;
    int started = spawn(group, more_flags, script);
    if (started >= 0) {
        (void)ir_group_print(group, 1, "ours\n", 5);
        CHECK(finish(group) == started);
        CHECK(ir_group_tail(group, 0, tail, sizeof tail) >= 0);
        CHECK(ir_group_signal(group, 0, SIGTERM) == -ESRCH);
    }
    ir_group_free(&group);
    CHECK(group == NULL);
}

static void all_output(void) {
    run(0, "cat >/dev/null; seq 20000; seq 2000 >&2; printf 'no end'; printf 'a\\rb\\r\\n' >&2");
}

static void strays(void) {
    run(0, "setsid sh -c \"trap '' TERM; exec sleep 1000\" >/dev/null 2>&1 </dev/null & exit 3");
}

static void own_process(void) {
    const struct timespec now = {0};
    sigset_t all;
    (void)sigfillset(&all);
    while (sigtimedwait(&all, NULL, &now) > 0) {
    }
    run(IR_OWN_PROCESS,
        "(setsid sleep 1000 >/dev/null 2>&1 </dev/null &) ; kill -TERM $PPID; exec sleep 1000");
}

static void no_start(void) {
    cwd = "/nowhere";
    run(0, "exit 0");
    cwd = NULL;
}

static void stopped(void) {
    struct ir_group *group = make(0, 20);
    if (group == NULL) return;
    if (spawn(group, 0, "trap '' TERM; echo up; while :; do sleep 0.01; done") == WORKERS) {
        CHECK(ir_group_signal(group, -1, SIGUSR1) >= 0);
        ir_group_stop(group, 0, 0);
        CHECK(finish(group) == WORKERS);
    }
    ir_group_free(&group);
    CHECK(group == NULL);
}

/* What a caller may get wrong is refused; half a grace of 1 ms is none. */
static void misused(void) {
    struct ir_config config = {.mark = "MARK=driver", .stop_signal = 65};
    struct ir_group *group = NULL;
    CHECK(ir_group_new(&config, 1, &group) == -EINVAL && group == NULL);
    group = make(0, 1);
    struct ir_worker two[2] = {
        {.program = "/bin/true", .argv = argv, .base_env = base_env, .env = ""}, {0}};
    struct ir_failure failure;
    two[1] = two[0];
    two[1].base_env = base_env + 1;
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 2; k++) two[i].label[k] = two[i].label_more[k] = "";
    for (int k = 0; k < 3; k++) two[0].stdio[k] = two[1].stdio[k] = IR_FD_INHERIT;
    argv[2] = "exit 0";
    CHECK(ir_group_spawn(group, two, WORKERS + 1, &failure) == -EINVAL);
    CHECK(ir_group_spawn(group, two, 2, &failure) == -EINVAL && failure.error == EINVAL);
    ir_group_free(&group);
    CHECK(group == NULL);
    group = make(0, 1);
    two[1].stdio[0] = 0;
    CHECK(ir_group_spawn(group, two, 2, &failure) == -EINVAL);
    CHECK(ir_group_signal(group, 5, SIGTERM) == -EINVAL &&
          ir_group_tail(group, 5, NULL, 0) == -EINVAL);
    ir_group_free(&group);
    CHECK(group == NULL);
    group = make(0, 1);
    CHECK(spawn(group, 0, "trap '' TERM; sleep 1000") == WORKERS);
    ir_group_stop(group, 0, 0);
    CHECK(finish(group) == WORKERS);
    ir_group_free(&group);
    CHECK(group == NULL);
}

/* SIGPIPE of the host's own that is pending stays so, though a worker reads no more of what we write. */
static void reads_no_more(void) {
    sigset_t only, before, pending;
    (void)sigemptyset(&only);
    (void)sigaddset(&only, SIGPIPE);
    (void)sigprocmask(SIG_BLOCK, &only, &before);
    (void)raise(SIGPIPE);
    run(0, "exec <&-; sleep 0.1");
    CHECK(sigpending(&pending) == 0 && sigismember(&pending, SIGPIPE) == 1);
    const struct timespec now = {0};
    CHECK(sigtimedwait(&only, NULL, &now) == SIGPIPE);
    (void)sigprocmask(SIG_SETMASK, &before, NULL);
}

static void dropped(void) {
    struct ir_group *group = make(0, 1000);
    if (group == NULL) return;
    (void)spawn(group, 0, "yes & sleep 1000");
    ir_group_free(&group);
    CHECK(group == NULL);
}

/* A host program that has closed its stdio: every new descriptor of ours begins below 3. */
static void closed_stdio(void) {
    int kept[3];
    for (int fd = 0; fd < 3; fd++) {
        kept[fd] = __real_fcntl(fd, F_DUPFD_CLOEXEC, 100);
        (void)close(fd);
    }
    run(0, "exit 0");
    for (int fd = 0; fd < 3; fd++) {
        (void)dup2(kept[fd], fd);
        (void)close(kept[fd]);
    }
}

static int open_fds(void) {
    int n = 0;
    for (int fd = 0; fd < 256; fd++) n += __real_fcntl(fd, F_GETFD, 0) >= 0;
    return n;
}

static void nothing_is_left(int fds) {
    CHECK(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD);
    /* a thread that waited has a descriptor of its own, a moment longer than its worker lives */
    for (int i = 0; i < 1000 && open_fds() != fds; i++) (void)usleep(1000);
    CHECK(open_fds() == fds);
}

static void walk(const char *name, void (*launch)(void), bool deny_each) {
    int fds = open_fds();
    doing = name;
    for (denied_call = 0;; denied_call++) {
        calls = 0;
        if (input >= 0) (void)lseek(input, 0, SEEK_SET);
        launch();
        nothing_is_left(fds);
        if (!deny_each || (denied_call > 0 && calls < denied_call)) break;
    }
    (void)printf("%s: %d calls, each denied once\n", name, denied_call > 0 ? denied_call - 1 : 0);
    denied_call = 0; /* what runs at exit is not the core's */
}

int main(int argc, char **words) {
    bool deny_each = false;
    guard = getenv("GUARD");
    path_flags = IR_USE_FORK; /* valgrind has one address space only */
    for (int i = 1; i < argc; i++) {
        if (strcmp(words[i], "clone") == 0) path_flags &= ~(uint32_t)IR_USE_FORK;
        if (strcmp(words[i], "nopidfd") == 0) path_flags |= IR_NO_PIDFD;
        if (strcmp(words[i], "walk") == 0) deny_each = true;
    }
    (void)setvbuf(stdout, NULL, _IONBF, 0);
    console[0] = console[1] = open("/dev/null", O_WRONLY | O_CLOEXEC);
    for (int i = 0; i < WORKERS; i++) logs[i] = memfd_create("log", MFD_CLOEXEC);
    walk("no_start", no_start, deny_each);
    walk("strays", strays, deny_each);
    walk("stopped", stopped, deny_each);
    walk("dropped", dropped, deny_each);
    walk("misused", misused, false);
    walk("closed_stdio", closed_stdio, deny_each);
    input = memfd_create("input", MFD_CLOEXEC);
    for (int i = 0; i < 20000; i++) CHECK(write(input, "0123456789\n", 11) == 11);
    walk("all_output", all_output, deny_each);
    walk("reads_no_more", reads_no_more, deny_each);
    input = -1;
    struct ir_entry entry;
    sigset_t all;
    (void)sigfillset(&all);
    (void)sigprocmask(SIG_SETMASK, &all, NULL);
    CHECK(ir_entry_take_over(&entry) == 0);
    walk("own_process", own_process, deny_each);
    return 0;
}
