/* group/entry.c: the process at its start, for the command that owns it: hygiene before anything else. */
#include "group/group.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

/* A look at each number below costs less than a list of those that are open. */
#define NEAR_DESCRIPTORS 256

/* The next descriptor would take the place of a closed stdin, stdout, or stderr, and a worker's
 * output would land in it. open(2) takes the lowest number, so going up fills the holes. */
static int entry_fill_stdio(void) {
    for (int fd = 0; fd < 3; fd++) {
        if (fcntl(fd, F_GETFD) >= 0 || errno != EBADF) continue;
        int opened = open("/dev/null", O_RDWR);
        if (opened < 0) return -errno;
    }
    return 0;
}

/* SIGCHLD ignored on entry makes the kernel reap the children, and discard their status. */
static uint64_t entry_ignored_signals(void) {
    uint64_t ignored = 0;
    for (int sig = 1; sig <= SIGRTMAX; sig++) {
        struct sigaction action;
        if (sigaction(sig, NULL, &action) < 0 || action.sa_handler != SIG_IGN) continue;
        ignored |= SIGNAL_BIT(sig);
    }
    return ignored;
}

static void end_raise(int fd, void *with) {
    int32_t *end = with;
    if (fd >= *end) *end = fd + 1;
}

int ir_entry_take_over(struct ir_entry *ret_entry) {
    *ret_entry = (struct ir_entry){.inherited_end = 3};
    int r = entry_fill_stdio();
    if (r < 0) return r;
    if (fds_each_inherited(end_raise, &ret_entry->inherited_end) < 0) ret_entry->inherited_end = 0;
    ret_entry->ignored = entry_ignored_signals();
    struct sigaction standard = {.sa_handler = SIG_DFL};
    (void)sigaction(SIGCHLD, &standard, NULL);
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        ret_entry->nofile_soft = limit.rlim_cur;
        ret_entry->nofile_hard = limit.rlim_max;
        limit.rlim_cur = limit.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
    (void)prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    (void)prctl(PR_SET_NAME, "infini-run", 0, 0, 0); /* not that of an interpreter */
    return 0;
}

void ir_entry_end_by(int sig, int whole_group) {
    struct sigaction standard = {.sa_handler = SIG_DFL};
    sigset_t only;
    (void)sigemptyset(&only);
    (void)sigaddset(&only, sig);
    (void)prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    (void)sigaction(sig, &standard, NULL);
    (void)kill(whole_group ? 0 : getpid(), sig);
    (void)pthread_sigmask(SIG_UNBLOCK, &only, NULL);
}

static void fd_give_up(int fd, void *with) {
    (void)with;
    (void)close(fd);
}

int ir_entry_release_descriptors(int32_t inherited_end) {
    if (chdir("/") < 0) { /* the directory stays: that costs nothing but a pinned mount */
    }
    const bool is_near = inherited_end > 0 && inherited_end <= NEAR_DESCRIPTORS;
    int closed = is_near ? fds_each_inherited_below(inherited_end, fd_give_up, NULL)
                         : fds_each_inherited(fd_give_up, NULL);
    return closed < 0 ? 0 : closed;
}
