/* sink.c: the console: whole lines in, one writer, never blocking.
 *
 * O_NONBLOCK belongs to the open file, which we share with the shell; so a pipe or terminal is
 * opened anew through /proc/self/fd. Where that is not allowed, a small write is made only when
 * poll says that there is room. Regular files are just written. */
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define CAREFUL_WRITE 4096u /* PIPE_BUF: a pipe that polls writable takes this without blocking */

static int sink_open_one(struct sink *sink, int fd, const struct stat *status) {
    sink->fd = fd;
    sink->buffer = malloc(SINK_BUFFER + SINK_MARGIN);
    if (sink->buffer == NULL) return -ENOMEM;
    sink->pollable = !S_ISREG(status->st_mode) && !S_ISBLK(status->st_mode);
    if (!sink->pollable || S_ISSOCK(status->st_mode)) return 0;
    int own = fd_reopen(fd, O_WRONLY);
    if (own < 0) return 0;
    sink->fd = own;
    sink->owned = true;
    sink->nonblocking = true;
    return 0;
}

/* stdout and stderr that are one pipe or terminal share one sink: a line of one must not land in
 * the middle of a line of the other. */
int sink_open(struct ir_group *g) {
    struct stat status[2];
    const int *fds = g->config.console_fd;
    g->err_sink = 1;
    for (int i = 0; i < 2; i++) {
        g->sinks[i].fd = -1;
        g->sinks[i].which = i;
        if (fds[i] < 0) continue;
        if (fstat(fds[i], &status[i]) < 0) continue; /* closed by the host program: nowhere */
        if (i == 1 && g->sinks[0].fd >= 0 && status[0].st_dev == status[1].st_dev &&
            status[0].st_ino == status[1].st_ino) {
            g->err_sink = 0;
            continue;
        }
        int r = sink_open_one(&g->sinks[i], fds[i], &status[i]);
        if (r < 0) return r;
    }
    return 0;
}

/* NULL: there is no such console. */
struct sink *sink_of(struct ir_group *g, int which) {
    struct sink *sink = &g->sinks[which == 1 ? g->err_sink : 0];
    return sink->buffer == NULL ? NULL : sink;
}

void sink_put(struct sink *sink, const char *bytes, uint32_t size) {
    if (sink->broken) return;
    memcpy(sink->buffer + sink->end, bytes, size);
    sink->end += size;
}

/* How many bytes it took; -errno. */
static ssize_t sink_write(const struct sink *sink) {
    const char *bytes = sink->buffer + sink->start;
    size_t size = sink->end - sink->start;
    if (sink->nonblocking || !sink->pollable) return fd_write(sink->fd, bytes, size);
    struct pollfd room = {.fd = sink->fd, .events = POLLOUT};
    if (poll(&room, 1, 0) <= 0) return -EAGAIN;
    if (size > CAREFUL_WRITE) size = CAREFUL_WRITE;
    ssize_t n = send(sink->fd, bytes, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) return n;
    return errno == ENOTSOCK ? fd_write(sink->fd, bytes, size) : -errno;
}

static void sink_break(struct ir_group *g, struct sink *sink, int error) {
    sink->broken = true;
    sink->start = sink->end = 0;
    struct ir_event *event = event_push(g, IR_OUTPUT_LOST, -1, 0);
    event->code = sink->which;
    event->signal = error;
}

static void sink_wait(struct ir_group *g, struct sink *sink, bool wait) {
    if (wait == sink->waiting) return;
    if (!wait) {
        fd_unwatch(g, sink->fd);
    } else {
        int r = fd_watch(g, sink->fd, EPOLLOUT, WATCH_SINK, (uint32_t)sink->which);
        if (r == -EEXIST) r = 0;
        if (r < 0) { /* nothing to wait for: a device that says EAGAIN and cannot be polled */
            sink_break(g, sink, -r);
            return;
        }
    }
    sink->waiting = wait;
}

void sink_flush(struct ir_group *g, struct sink *sink) {
    while (sink->start < sink->end) {
        ssize_t n = sink_write(sink);
        if (n >= 0) {
            sink->start += (uint32_t)n;
        } else if (n == -EAGAIN) {
            sink_wait(g, sink, true);
            return;
        } else if (n != -EINTR) {
            sink_wait(g, sink, false);
            sink_break(g, sink, (int)-n);
            return;
        }
    }
    sink->start = sink->end = 0;
    sink_wait(g, sink, false);
}

bool sink_has_room(struct ir_group *g, struct sink *sink, uint32_t wanted) {
    if (sink->broken || sink->end + wanted <= SINK_BUFFER) return true;
    if (!sink->waiting) sink_flush(g, sink);
    if (sink->start > 0) {
        memmove(sink->buffer, sink->buffer + sink->start, sink->end - sink->start);
        sink->end -= sink->start;
        sink->start = 0;
    }
    return sink->end + wanted <= SINK_BUFFER;
}

/* A sink that waits for room is left to its event: what follows it wakes the streams, too. */
void sink_flush_all(struct ir_group *g) {
    for (int i = 0; i < 2; i++)
        if (g->sinks[i].buffer != NULL && !g->sinks[i].waiting) sink_flush(g, &g->sinks[i]);
}

bool sink_empty(const struct ir_group *g) {
    return g->sinks[0].end == 0 && g->sinks[1].end == 0;
}

/* Where ranks have the console themselves we need it only if there is something to say; and then a
 * rank may have filled it, so that a plain write would hold us. */
static int sink_open_late(struct ir_group *g, int which, struct sink **ret_sink) {
    struct stat status;
    if (which != 1 || g->config.say_fd < 0 || fstat(g->config.say_fd, &status) < 0) return 0;
    int r = sink_open_one(&g->sinks[1], g->config.say_fd, &status);
    if (r == 0) *ret_sink = &g->sinks[1];
    return r;
}

int ir_group_say(struct ir_group *g, int stream, const char *lines, uint32_t size) {
    struct sink *sink = sink_of(g, stream);
    int r = sink == NULL ? sink_open_late(g, stream, &sink) : 0;
    if (r < 0 || sink == NULL || sink->broken) return r;
    if (sink->end + size > SINK_BUFFER + SINK_MARGIN) return -EAGAIN;
    sink_put(sink, lines, size);
    if (!sink->waiting) sink_flush(g, sink);
    return 0;
}

void sink_close(struct ir_group *g) {
    for (int i = 0; i < 2; i++) {
        struct sink *sink = &g->sinks[i];
        if (sink->owned) sink->fd = fd_close(sink->fd);
        free(sink->buffer);
        sink->buffer = NULL;
    }
}
