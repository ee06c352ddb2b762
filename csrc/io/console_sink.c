/* io/console_sink.c: the console: whole lines in, one writer, never blocking (nonblocking_writer.c).
 *
 * Without labels, a stream may leave a line without its end. The sink ends it before another
 * stream's line begins: lines of two never mix. */
#include "group/group.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/stat.h>

static int sink_open_one(struct sink *sink, int fd) {
    int r = ir_writer_new(fd, &sink->writer);
    if (r < 0) return r;
    sink->buffer = malloc(SINK_BUFFER + SINK_MARGIN);
    return sink->buffer == NULL ? -ENOMEM : 0;
}

/* stdout and stderr share one sink if they are one pipe or terminal. A line of one must not land
 * in the middle of a line of the other. */
int sink_open(struct ir_group *g) {
    struct stat status[2];
    const int *fds = g->config.console_fd;
    g->err_sink = 1;
    for (int i = 0; i < 2; i++) {
        g->sinks[i].which = i;
        if (fds[i] < 0) continue;
        if (fstat(fds[i], &status[i]) < 0) continue; /* closed by the host program: nowhere */
        if (i == 1 && g->sinks[0].buffer != NULL && status[0].st_dev == status[1].st_dev &&
            status[0].st_ino == status[1].st_ino) {
            g->err_sink = 0;
            continue;
        }
        int r = sink_open_one(&g->sinks[i], fds[i]);
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

/* Before a line of `stream` (NULL: the launcher's). It may take a byte of room. */
void sink_begin(struct sink *sink, const struct stream *stream) {
    if (sink->last != NULL && sink->last != stream) {
        sink->mixed = true;
        if (sink->open) sink_put(sink, "\n", 1);
    }
    sink->last = stream;
    sink->open = false;
}

static void sink_break(struct ir_group *g, struct sink *sink, int error) {
    sink->broken = true;
    sink->start = sink->end = 0;
    struct ir_event *event = event_push(g, IR_OUTPUT_LOST, -1, 0);
    event->code = sink->which;
    event->signal = error;
}

static void sink_wait(struct ir_group *g, struct sink *sink, uint32_t events) {
    if (events == sink->awaited) return;
    int fd = ir_writer_fd(sink->writer);
    if (sink->awaited != 0) fd_unwatch(g, fd);
    sink->awaited = events;
    if (events == 0) return;
    int r = fd_watch(g, fd, events, WATCH_SINK, (uint32_t)sink->which);
    if (r >= 0 || r == -EEXIST) return;
    sink->awaited = 0;
    /* There is nothing to wait for: a device returns EAGAIN, and poll does not know it. */
    sink_break(g, sink, -r);
}

void sink_flush(struct ir_group *g, struct sink *sink) {
    while (sink->start < sink->end) {
        int64_t n =
            ir_writer_write(sink->writer, sink->buffer + sink->start, sink->end - sink->start);
        if (n >= 0) {
            sink->start += (uint32_t)n;
        } else if (n == -EAGAIN) {
            sink_wait(g, sink, EPOLLOUT);
            return;
        } else if (n != -EINTR) {
            sink_wait(g, sink, 0);
            sink_break(g, sink, (int)-n);
            return;
        }
    }
    sink->start = sink->end = 0;
    sink_wait(g, sink, 0);
}

bool sink_has_room(struct ir_group *g, struct sink *sink, uint32_t wanted) {
    if (sink->broken || sink->end + wanted <= SINK_BUFFER) return true;
    if (!sink->awaited) sink_flush(g, sink);
    if (sink->start > 0) {
        memmove(sink->buffer, sink->buffer + sink->start, sink->end - sink->start);
        sink->end -= sink->start;
        sink->start = 0;
    }
    return sink->end + wanted <= SINK_BUFFER;
}

/* A sink that waits for room has its event, after which the streams wake, too. */
void sink_flush_all(struct ir_group *g) {
    for (int i = 0; i < 2; i++)
        if (g->sinks[i].buffer != NULL && !g->sinks[i].awaited) sink_flush(g, &g->sinks[i]);
}

/* The output of one stream of a successful launch stays as the rank wrote it, to the byte. */
static bool ends_unended(const struct ir_group *g, const struct sink *sink) {
    return sink->open && (sink->mixed || g->signalled || g->went_badly);
}

static bool sink_finish(struct ir_group *g, struct sink *sink) {
    if (ends_unended(g, sink)) {
        sink_put(sink, "\n", 1);
        sink->open = false;
    }
    if (!sink->awaited) sink_flush(g, sink);
    if (sink->broken) return true;
    if (sink->start < sink->end) return false;
    int r = ir_writer_finish(sink->writer);
    sink_wait(g, sink, r == -EAGAIN ? EPOLLIN : 0);
    if (r < 0 && r != -EAGAIN) sink_break(g, sink, -r);
    return r != -EAGAIN;
}

/* No more will come. Returns whether all of it has left. */
bool sink_finish_all(struct ir_group *g) {
    bool all = true;
    for (int i = 0; i < 2; i++)
        if (g->sinks[i].buffer != NULL && !sink_finish(g, &g->sinks[i])) all = false;
    return all;
}

/* Where ranks have the console themselves the core needs it only if there is something to say.
 * Then a rank may have filled it, so that a plain write would block. */
int sink_open_late(struct ir_group *g, int which, struct sink **ret_sink) {
    struct stat status;
    if (which != 1 || g->config.message_fd < 0 || fstat(g->config.message_fd, &status) < 0)
        return 0;
    int r = sink_open_one(&g->sinks[1], g->config.message_fd);
    if (r == 0) *ret_sink = &g->sinks[1];
    return r;
}

void sink_close(struct ir_group *g) {
    for (int i = 0; i < 2; i++) {
        struct sink *sink = &g->sinks[i];
        sink->writer = ir_writer_free(sink->writer);
        sink->fold = ir_fold_free(sink->fold);
        free(sink->buffer);
        sink->buffer = NULL;
    }
}
