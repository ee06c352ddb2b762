/* children/lease.c: the launcher's side of a lease: the workers live as long as the launcher renews it.
 *
 * The guard holds it (guard/main.c): at the deadline it kills the workers and all that they
 * started, also where the launcher is suspended, starved, or stuck. A renewal moves the deadline
 * in memory that both share, so it costs neither a system call nor a wake-up: the guard looks at
 * the deadline that it knew. Its memory is a file without a name. A pipe reports that the guard
 * has it, that the lease has run out, and by its end that there is no guard. */
#include "group/group.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8u /* Linux 6.3, where vm.memfd_noexec may ask for it */
#endif

static int memory_open(void) {
    int fd = fd_new((int)syscall(SYS_memfd_create, "lease", MFD_CLOEXEC | MFD_NOEXEC_SEAL));
    if (fd == -EINVAL) fd = fd_new((int)syscall(SYS_memfd_create, "lease", MFD_CLOEXEC));
    return fd;
}

/* Where the link goes the last word goes. Without a link over TCP there is none. */
static void last_word_set(const struct ir_group *g, struct lease_memory *memory) {
    struct sockaddr_storage address = {.ss_family = AF_UNSPEC};
    socklen_t size = sizeof address;
    if (g->config.last_word_size == 0) return;
    if (getpeername(g->config.link_fd, (struct sockaddr *)&address, &size) < 0) return;
    if (address.ss_family != AF_INET && address.ss_family != AF_INET6) return;
    memcpy(memory->address, &address, size);
    memory->address_size = size;
    memcpy(memory->last_word, g->lease.last_word, sizeof memory->last_word);
    memory->last_word_size = g->config.last_word_size;
}

/* Before the first child. -EOPNOTSUPP: there can be no guard, or it would see nobody: no /proc,
 * or another PID namespace's. -ETIME: it has run out. */
int lease_open(struct ir_group *g, void (*on_end)(struct ir_group *)) {
    struct lease *lease = &g->lease;
    lease->on_end = on_end;
    if (g->config.lease_ms == 0) return 0;
    if (g->guard.program == NULL || g->proc_error < 0) return -EOPNOTSUPP;
    lease->fd = memory_open();
    if (lease->fd < 0) return lease->fd;
    if (ftruncate(lease->fd, sizeof(struct lease_memory)) < 0) return -errno;
    void *memory =
        mmap(NULL, sizeof(struct lease_memory), PROT_READ | PROT_WRITE, MAP_SHARED, lease->fd, 0);
    if (memory == MAP_FAILED) return -errno;
    lease->deadline_ns = memory; /* the first of it */
    last_word_set(g, memory);
    const int64_t now_ns = boottime_ns(), since_ns = g->config.lease_since_ns;
    const bool is_past = since_ns > 0 && since_ns < now_ns;
    *lease->deadline_ns = (is_past ? since_ns : now_ns) + g->config.lease_ms * NS_PER_MS;
    if (lease_is_over(lease->deadline_ns, now_ns)) return -ETIME;
    return fd_pipe(lease->pipe, 0);
}

/* No worker lives before the guard watches over it. It has as long as the lease. -ESRCH: it is
 * gone. */
int lease_await_guard(struct ir_group *g) {
    struct lease *lease = &g->lease;
    char word;
    if (lease->deadline_ns == NULL) return 0;
    lease->fd = fd_close(lease->fd);
    lease->pipe[1] = fd_close(lease->pipe[1]);
    struct pollfd said = {.fd = lease->pipe[0], .events = POLLIN};
    if (poll(&said, 1, (int)g->config.lease_ms) == 0) return -ETIME;
    if (read(lease->pipe[0], &word, 1) != 1) return -ESRCH;
    lease->held = true;
    return fd_watch(g, lease->pipe[0], EPOLLIN, WATCH_LEASE, 0);
}

static void lease_end(struct ir_group *g, int code) {
    struct lease *lease = &g->lease;
    if (lease->ended || !lease->held || g->state >= DRAINING) return; /* then nobody lives */
    lease->ended = true;
    __atomic_store_n(lease->deadline_ns, 0, __ATOMIC_SEQ_CST);
    event_push(g, IR_LEASE_ENDED, -1, 0)->code = code;
    lease->on_end(g);
}

/* Whatever comes first: the guard's word, a worker that it has killed, the time. */
void lease_check(struct ir_group *g) {
    if (g->lease.deadline_ns != NULL && lease_is_over(g->lease.deadline_ns, boottime_ns()))
        lease_end(g, 0);
}

/* Nobody would end the workers in time any more. */
void lease_guard_lost(struct ir_group *g, int error) {
    if (g->guard.error == 0) g->guard.error = error;
    lease_end(g, 1);
}

void lease_ready(struct ir_group *g) {
    char word;
    if (read(g->lease.pipe[0], &word, 1) == 1) {
        lease_check(g);
        return;
    }
    fd_unwatch(g, g->lease.pipe[0]);
    if (!g->guard.dismissed) lease_guard_lost(g, 0);
}

int ir_group_renew_lease(struct ir_group *g, int64_t since_ns) {
    if (g == NULL) return -ESRCH;
    struct lease *lease = &g->lease;
    if (lease->deadline_ns == NULL) return -EINVAL;
    const int64_t now_ns = boottime_ns();
    if (since_ns <= 0 || since_ns > now_ns) since_ns = now_ns;
    if (lease_move(lease->deadline_ns, now_ns, since_ns + g->config.lease_ms * NS_PER_MS)) return 0;
    lease_end(g, 0);
    return -ETIME;
}

/* Also in a forked child, whose copies these are. */
void lease_close(struct ir_group *g) {
    struct lease *lease = &g->lease;
    if (lease->deadline_ns != NULL) (void)munmap(lease->deadline_ns, sizeof(struct lease_memory));
    lease->deadline_ns = NULL;
    lease->fd = fd_close(lease->fd);
    for (int i = 0; i < 2; i++) lease->pipe[i] = fd_close(lease->pipe[i]);
}
