/* io/stdin_fanout.c: the launcher's stdin to several workers, or a terminal to one of several.
 *
 * One buffer. It fills again when every target has taken it, so the slowest reader sets the pace
 * and nobody misses a byte. It forgets a target that closed its stdin. */
#include "group/group.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

#define INPUT_BUFFER 65536u

int input_open(struct ir_group *g, const int *fds, uint32_t n) {
    struct input *in = &g->input;
    if (n == 0) return 0;
    in->targets = calloc(n, sizeof *in->targets);
    in->buffer = malloc(INPUT_BUFFER);
    if (in->targets == NULL || in->buffer == NULL) {
        for (uint32_t i = 0; i < n; i++) (void)fd_close(fds[i]);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < n; i++) in->targets[i] = (struct target){.fd = fds[i]};
    in->n = n;
    for (uint32_t i = 0; i < n; i++) {
        int r = fd_watch(g, fds[i], EPOLLET, WATCH_TARGET,
                         i); /* until there is something to wait for */
        if (r < 0) return r;
    }
    in->fd = fd_reopen(g->config.stdin_fd, O_RDONLY);
    if (in->fd < 0) in->fd = fd_duplicate(g->config.stdin_fd);
    if (in->fd < 0) return in->fd;
    int r = fd_watch(g, in->fd, EPOLLIN, WATCH_SOURCE, 0);
    in->watchable = r != -EPERM;
    in->watched = true;
    return in->watchable ? r : 0;
}

static void target_close(const struct ir_group *g, struct target *target) {
    target->fd = fd_release(g, target->fd);
    target->waiting = false;
}

/* A worker that restarts gets what comes from now on, on its new pipe; at the end of the
 * input that is nothing. */
int input_renew(struct ir_group *g, uint32_t index, int fd) {
    struct target *target = &g->input.targets[index];
    target_close(g, target);
    if (g->input.fd < 0) {
        (void)fd_close(fd);
        return 0;
    }
    *target = (struct target){.fd = fd, .done = g->input.end};
    return fd_watch(g, fd, EPOLLET, WATCH_TARGET, index);
}

void input_close(struct ir_group *g) {
    for (uint32_t i = 0; i < g->input.n; i++) target_close(g, &g->input.targets[i]);
    if (g->input.fd < 0) return;
    fd_unwatch(g, g->input.fd);
    /* no fd_close: it may be a copy of the host program's, which a child keeps */
    (void)close(g->input.fd);
    g->input.fd = -1;
}

static void target_wait(struct ir_group *g, uint32_t index, bool wait) {
    struct target *target = &g->input.targets[index];
    if (target->waiting == wait) return;
    target->waiting = wait;
    fd_rewatch(g, target->fd, wait ? EPOLLOUT : 0, WATCH_TARGET, index);
}

/* True: it has taken the whole buffer, or is gone. */
static bool target_feed(struct ir_group *g, uint32_t index) {
    struct input *in = &g->input;
    struct target *target = &in->targets[index];
    while (target->fd >= 0 && target->done < in->end) {
        ssize_t n = fd_write(target->fd, in->buffer + target->done, in->end - target->done);
        if (n >= 0) {
            target->done += (uint32_t)n;
        } else if (n == -EAGAIN) {
            target_wait(g, index, true);
            return false;
        } else if (n != -EINTR) {
            target_close(g, target); /* EPIPE: it reads no more */
        }
    }
    target_wait(g, index, false);
    return true;
}

static void source_watch(struct ir_group *g, bool watch) {
    g->input.behind = false;
    g->input.watched = watch;
    if (g->input.watchable && g->input.fd >= 0)
        fd_rewatch(g, g->input.fd, watch ? EPOLLIN : 0, WATCH_SOURCE, 0);
}

static bool input_feed(struct ir_group *g) {
    bool all = true, any = false;
    for (uint32_t i = 0; i < g->input.n; i++) {
        all &= target_feed(g, i);
        any |= g->input.targets[i].fd >= 0;
    }
    if (!any && !(g->config.flags & IR_STAYS)) input_close(g);
    return all;
}

/* In the background a terminal's read is EIO (the core blocks SIGTTIN). No event reports the
 * foreground: a shell continues only a stopped job. So it tries each new line, and none twice. */
static void source_leave_to_others(struct ir_group *g) {
    if (g->input.behind) return;
    g->input.behind = true;
    fd_rewatch(g, g->input.fd, EPOLLIN | EPOLLET, WATCH_SOURCE, 0);
}

static bool source_read(struct ir_group *g) {
    struct input *in = &g->input;
    struct pollfd ready = {.fd = in->fd, .events = POLLIN};
    if (poll(&ready, 1, 0) <= 0) return false; /* another process with the same file was quicker */
    ssize_t n = read(in->fd, in->buffer, INPUT_BUFFER);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (n < 0 && errno == EIO && isatty(in->fd)) {
        source_leave_to_others(g);
        return false;
    }
    if (n <= 0) {
        input_close(g);
        return false;
    }
    if (in->behind) source_watch(g, true);
    in->end = (uint32_t)n;
    for (uint32_t i = 0; i < in->n; i++) in->targets[i].done = 0;
    return true;
}

static bool input_is_taken(const struct input *in) {
    for (uint32_t i = 0; i < in->n; i++)
        if (in->targets[i].fd >= 0 && in->targets[i].done < in->end) return false;
    return true;
}

/* A worker that exited may restart, and is to get what nobody has read by then (input_renew). */
static bool input_awaits_reader(const struct ir_group *g) {
    if (!(g->config.flags & IR_STAYS)) return false;
    for (uint32_t i = 0; i < g->n; i++) {
        const struct worker *w = &g->workers[i];
        if (w->target > 0 && !w->reaped && g->input.targets[w->target - 1].fd >= 0) return false;
    }
    return true;
}

/* Not while a target has bytes to take: they are in the buffer that a read would fill. */
void input_source_ready(struct ir_group *g) {
    if (!input_is_taken(&g->input)) return;
    /* probed: the line may be for the rank that had the terminal */
    if (g->terminal.probed || input_awaits_reader(g)) {
        if (g->input.watched) source_watch(g, false); /* a change would report its hang-up again */
        return;
    }
    while (g->input.fd >= 0 && source_read(g)) {
        if (!input_feed(g)) {
            source_watch(g, false);
            return;
        }
        if (g->input.watchable || input_awaits_reader(g)) return;
    }
}

/* After the spawn, for a source that epoll cannot watch; after a restart; after SIGCONT; and when a
 * target took the rest. */
void input_resume(struct ir_group *g) {
    if (g->input.fd < 0 || !input_is_taken(&g->input)) return;
    if (!g->input.watchable) input_source_ready(g);
    else source_watch(g, true);
}

void input_target_ready(struct ir_group *g, uint32_t index) {
    if (target_feed(g, index)) input_resume(g);
}
