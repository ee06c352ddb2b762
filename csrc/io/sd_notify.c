/* io/sd_notify.c: what workers say of themselves: sd_notify(3), on a datagram socket of each one's own.
 *
 * A socket per worker, so that what any process of it says is known to be that worker's, even when
 * the one who said it (systemd-notify in a script) is gone by the time we read. An abstract address
 * leaves no file behind, but any user of the machine may send to it: only our own user and root
 * are heard. See unix(7) for SCM_CREDENTIALS, which the kernel fills in. */
#include "group/group.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define MESSAGE_SIZE 4096 /* as systemd's: what is longer is not a message */
#define NOTIFY_READS 16   /* then signals and exits get their turn, however much there is */
#define DRAIN_READS 1024  /* more than a socket holds (net.unix.max_dgram_qlen, 10 to 512) */

static int notify_bind(int fd, const char *name) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t size = strlen(name);
    if (name[0] != '@' || size > sizeof address.sun_path) return -EINVAL;
    memcpy(address.sun_path, name, size);
    address.sun_path[0] = '\0';
    int on = 1;
    if (setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) < 0) return -errno;
    socklen_t length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + size);
    return bind(fd, (const struct sockaddr *)&address, length) < 0 ? -errno : 0;
}

int notify_open(struct ir_group *g, const struct ir_worker *workers, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        if (workers[i].notify == NULL) continue;
        int fd = fd_new(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        if (fd < 0) return fd;
        g->workers[i].notify_fd = fd;
        int r = notify_bind(fd, workers[i].notify);
        if (r >= 0) r = fd_watch(g, fd, EPOLLIN, WATCH_NOTIFY, i);
        if (r < 0) return r;
    }
    return 0;
}

void notify_close(struct ir_group *g, uint32_t index) {
    g->workers[index].notify_fd = fd_release(g, g->workers[index].notify_fd);
}

/* ---- what is said */

static void status_keep(struct worker *w, const char *text, size_t size) {
    if (w->status == NULL && (w->status = malloc(STATUS_SIZE)) == NULL) return;
    w->status_size = size < STATUS_SIZE ? (uint32_t)size : STATUS_SIZE;
    memcpy(w->status, text, w->status_size);
}

static bool line_is(const char *line, size_t size, const char *text) {
    return size == strlen(text) && memcmp(line, text, size) == 0;
}

/* A whole number of digits alone, which 63 bits hold; -1: it is none. */
static int64_t parse_progress(const char *digits, size_t size) {
    int64_t value = size > 0 ? 0 : -1;
    for (size_t i = 0; i < size; i++) {
        if (digits[i] < '0' || digits[i] > '9' || value > (INT64_MAX - (digits[i] - '0')) / 10)
            return -1;
        value = value * 10 + (digits[i] - '0');
    }
    return value;
}

/* A worker that says it without end has one event in the queue, with the highest: it costs no room. */
static void note_progress(struct ir_group *g, uint32_t index, int64_t value) {
    struct worker *w = &g->workers[index];
    if (value <= w->progress) return;
    w->progress = value;
    if (w->progress_event == NULL)
        w->progress_event = event_push(g, IR_PROGRESS, (int)index, w->pid);
    w->progress_event->value = value;
}

static void handle_line(struct ir_group *g, uint32_t index, const char *line, size_t size) {
    struct worker *w = &g->workers[index];
    const size_t status = sizeof "STATUS=" - 1, progress = sizeof "PROGRESS=" - 1;
    if (line_is(line, size, "READY=1")) {
        if (!w->ready) event_push(g, IR_READY, (int)index, w->pid);
        w->ready = true;
    } else if (line_is(line, size, "WATCHDOG=1")) {
        w->ping_ns = w->active_ns;
        w->triggered = false;
    } else if (line_is(line, size, "WATCHDOG=trigger")) {
        if (!w->triggered && event_room(g)) {
            event_push(g, IR_TRIGGERED, (int)index, w->pid);
            w->triggered = true;
        }
    } else if (size >= status && memcmp(line, "STATUS=", status) == 0) {
        status_keep(w, line + status, size - status);
    } else if (size > progress && memcmp(line, "PROGRESS=", progress) == 0) {
        note_progress(g, index, parse_progress(line + progress, size - progress));
    }
}

static void handle_message(struct ir_group *g, uint32_t index, const char *bytes, size_t size) {
    g->workers[index].active_ns = clock_ns();
    for (const char *end = bytes + size; bytes < end;) {
        const char *newline = memchr(bytes, '\n', (size_t)(end - bytes));
        size_t length = (size_t)((newline != NULL ? newline : end) - bytes);
        handle_line(g, index, bytes, length);
        bytes += length + 1;
    }
}

/* ---- datagrams */

static bool is_trusted(const struct ucred *sender) {
    return sender->uid == geteuid() || sender->uid == 0;
}

/* Descriptors that come along (BARRIER=1, FDSTORE=1) are closed: that is all a barrier waits for.
 * Those that find no room here the kernel closes itself. */
static bool close_descriptors(struct msghdr *header) {
    bool may_read = false;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c != NULL; c = CMSG_NXTHDR(header, c)) {
        if (c->cmsg_level != SOL_SOCKET) continue;
        const unsigned char *data = CMSG_DATA(c);
        if (c->cmsg_type == SCM_CREDENTIALS && c->cmsg_len >= CMSG_LEN(sizeof(struct ucred))) {
            struct ucred sender;
            memcpy(&sender, data, sizeof sender);
            may_read = is_trusted(&sender);
        }
        if (c->cmsg_type != SCM_RIGHTS) continue;
        for (size_t at = 0; CMSG_LEN(at + sizeof(int)) <= c->cmsg_len; at += sizeof(int)) {
            int fd;
            memcpy(&fd, data + at, sizeof fd);
            (void)fd_close(fd);
        }
    }
    return may_read;
}

/* False: there is nothing more. */
static bool notify_read(struct ir_group *g, uint32_t index) {
    char bytes[MESSAGE_SIZE];
    union {
        struct cmsghdr aligned;
        char bytes[CMSG_SPACE(sizeof(struct ucred)) + CMSG_SPACE(4 * sizeof(int))];
    } control;
    struct iovec part = {.iov_base = bytes, .iov_len = sizeof bytes};
    struct msghdr header = {.msg_iov = &part,
                            .msg_iovlen = 1,
                            .msg_control = &control,
                            .msg_controllen = sizeof control};
    ssize_t n = recvmsg(g->workers[index].notify_fd, &header, MSG_CMSG_CLOEXEC);
    if (n < 0) return errno == EINTR;
    if (close_descriptors(&header) && !(header.msg_flags & MSG_TRUNC))
        handle_message(g, index, bytes, (size_t)n);
    return true;
}

void notify_ready(struct ir_group *g, uint32_t index) {
    for (int i = 0; i < NOTIFY_READS && g->workers[index].notify_fd >= 0; i++)
        if (!notify_read(g, index)) return;
}

/* What a worker had said when it ended; nobody listens after that. */
void notify_drain(struct ir_group *g, uint32_t index) {
    if (g->workers[index].notify_fd < 0) return;
    for (int i = 0; i < DRAIN_READS && notify_read(g, index); i++) {
    }
    notify_close(g, index);
}

/* ---- what is known of a worker */

int ir_group_status(const struct ir_group *g, int worker, char *ret_bytes, uint32_t size) {
    if (g == NULL) return 0;
    if (worker < 0 || (uint32_t)worker >= g->n) return -EINVAL;
    const struct worker *w = &g->workers[worker];
    uint32_t n = size < w->status_size ? size : w->status_size;
    if (n > 0) memcpy(ret_bytes, w->status, n);
    return (int)n;
}

int ir_group_activity(const struct ir_group *g, int worker, struct ir_activity *ret_activity) {
    if (g == NULL) return -ESRCH;
    if (worker < 0 || (uint32_t)worker >= g->n) return -EINVAL;
    const struct worker *w = &g->workers[worker];
    *ret_activity = (struct ir_activity){.active_ns = w->active_ns, .ping_ns = w->ping_ns};
    for (int which = 0; which < 2; which++) ret_activity->bytes[which] = w->streams[which].bytes;
    /* a full console: it is not the worker who keeps silent, it waits for us */
    if (w->streams[0].paused || w->streams[1].paused) ret_activity->active_ns = clock_ns();
    return 0;
}

int ir_group_fd(const struct ir_group *g) {
    if (g == NULL) return -1;
    return g->epoll_fd;
}
