/* io/sd_notify.c: what workers say of themselves: sd_notify(3), on a datagram socket of each.
 *
 * A socket per worker shows which worker a message is from, even if its sender (systemd-notify in a
 * script) exits before the core reads it. The socket is in a folder of mode 0700, so strangers do
 * not reach it. Without a folder, what remains is an abstract address, which any user may send to.
 * Either way only this user and root count: the kernel names the sender (SCM_CREDENTIALS of
 * unix(7)).
 *
 * A message may carry descriptors. Whoever takes such a message closes them, and that may wait
 * for as long as their sender likes (SO_LINGER of socket(7)). So this thread only peeks at it,
 * and io/rights_drop.c takes it. */
#include "group/group.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define MESSAGE_SIZE 4096 /* as systemd's: what is longer is not a message */
#define NOTIFY_READS 16   /* then signals and exits get their turn, however much there is */
#define DRAIN_READS                                                                                \
    1024 /* more than a socket holds (net.unix.max_dgram_qlen, 10 to 512 by default) */

/* "@name" is abstract, "/name" a path; *ret_address gets what the kernel wants. */
static int notify_address(const char *name, struct sockaddr_un *ret_address,
                          socklen_t *ret_length) {
    const size_t size = strlen(name);
    const bool is_abstract = name[0] == '@';
    if ((!is_abstract && name[0] != '/') || size + !is_abstract > sizeof ret_address->sun_path)
        return -EINVAL;
    *ret_address = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(ret_address->sun_path, name, size);
    if (is_abstract) ret_address->sun_path[0] = '\0';
    *ret_length =
        (socklen_t)(offsetof(struct sockaddr_un, sun_path) + size + (is_abstract ? 0 : 1));
    return 0;
}

/* masked: the umask leaves a socket as it is to be. */
static int notify_bind(int fd, const char *name, bool masked) {
    struct sockaddr_un address;
    socklen_t length;
    int r = notify_address(name, &address, &length), on = 1;
    if (r < 0) return r;
    if (setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) < 0) return -errno;
    if (bind(fd, (const struct sockaddr *)&address, length) < 0) return -errno;
    /* to send takes the right to write, which a umask may have taken from this user */
    return !masked && name[0] == '/' && chmod(name, S_IRUSR | S_IWUSR) < 0 ? -errno : 0;
}

static int notify_open_one(struct ir_group *g, const struct ir_worker *worker, uint32_t index,
                           bool masked) {
    if (worker->notify == NULL) return 0;
    int fd = fd_new(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (fd < 0) return fd;
    g->workers[index].notify_fd = fd;
    int r = notify_bind(fd, worker->notify, masked);
    return r < 0 ? r : fd_watch(g, fd, EPOLLIN, WATCH_NOTIFY, index);
}

int notify_open_worker(struct ir_group *g, const struct ir_worker *worker, uint32_t index) {
    return notify_open_one(g, worker, index, false);
}

int notify_open(struct ir_group *g, const struct ir_worker *workers, uint32_t n) {
    const bool masked = thread_is_alone(); /* the umask is that of all threads */
    const mode_t before = masked ? umask(S_IXUSR | S_IRWXG | S_IRWXO) : 0;
    int r = 0;
    for (uint32_t i = 0; r >= 0 && i < n; i++) r = notify_open_one(g, &workers[i], i, masked);
    if (masked) (void)umask(before);
    return r;
}

/* The file of a socket that is bound to a path. */
static void notify_unlink(int fd) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    socklen_t length = sizeof address;
    if (getsockname(fd, (struct sockaddr *)&address, &length) < 0) return;
    if (length > offsetof(struct sockaddr_un, sun_path) && address.sun_path[0] == '/')
        (void)unlink(address.sun_path);
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

/* A worker that says it without end has one event in the queue, with the highest and its time: it costs no room. */
static void note_progress(struct ir_group *g, uint32_t index, int64_t value) {
    struct worker *w = &g->workers[index];
    if (value <= w->progress) return;
    w->progress = value;
    if (w->progress_event == NULL)
        w->progress_event = event_push(g, IR_PROGRESS, (int)index, w->pid);
    w->progress_event->value = value;
    w->progress_event->time_ns = w->active_ns;
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

struct message {
    char bytes[MESSAGE_SIZE];
    size_t size;
    bool is_trusted; /* of this user, or root */
    bool is_cut;     /* longer than a message is */
    bool has_rights; /* descriptors came with it */
};

/* Without room for descriptors the kernel gives none, and a message keeps its own during a peek:
 * nothing closes here. False: there is no message. */
static bool message_peek(int fd, struct message *ret) {
    union {
        struct cmsghdr aligned;
        char bytes[CMSG_SPACE(sizeof(struct ucred))];
    } control;
    struct iovec part = {.iov_base = ret->bytes, .iov_len = sizeof ret->bytes};
    struct msghdr header = {.msg_iov = &part,
                            .msg_iovlen = 1,
                            .msg_control = &control,
                            .msg_controllen = sizeof control};
    ssize_t n;
    while ((n = recvmsg(fd, &header, MSG_PEEK | MSG_DONTWAIT)) < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    ret->size = (size_t)n;
    ret->is_cut = (header.msg_flags & MSG_TRUNC) != 0;
    ret->has_rights = (header.msg_flags & MSG_CTRUNC) != 0;
    ret->is_trusted = false;
    struct cmsghdr *c = CMSG_FIRSTHDR(&header);
    if (c != NULL && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_CREDENTIALS &&
        c->cmsg_len >= CMSG_LEN(sizeof(struct ucred))) {
        struct ucred sender;
        memcpy(&sender, CMSG_DATA(c), sizeof sender);
        ret->is_trusted = is_trusted(&sender);
    }
    return true;
}

static void message_handle(struct ir_group *g, uint32_t index, const struct message *message) {
    if (message->is_trusted && !message->is_cut)
        handle_message(g, index, message->bytes, message->size);
}

/* False: there is nothing more, or what comes next carries descriptors. */
static bool notify_read(struct ir_group *g, uint32_t index, struct message *message) {
    const int fd = g->workers[index].notify_fd;
    char nothing;
    message->has_rights = false;
    if (!message_peek(fd, message) || message->has_rights) return false;
    while (recv(fd, &nothing, sizeof nothing, MSG_DONTWAIT) < 0 && errno == EINTR) continue;
    message_handle(g, index, message);
    return true;
}

/* Until that thread took it, the core does not read the socket. Without the means to take it, the
 * core retries when the next message comes. */
static void notify_pass_rights(struct ir_group *g, uint32_t index, const struct message *message) {
    struct worker *w = &g->workers[index];
    w->sent_rights = true;
    message_handle(g, index, message);
    const int fd = rights_drop_one(w->notify_fd);
    if (fd >= 0 && fd_watch(g, fd, EPOLLIN, WATCH_DROPPED, index) == 0) {
        w->drop_fd = fd;
        w->rights_stuck = false;
        fd_unwatch(g, w->notify_fd);
        return;
    }
    (void)fd_close(fd);
    if (!w->rights_stuck) fd_rewatch(g, w->notify_fd, EPOLLIN | EPOLLET, WATCH_NOTIFY, index);
    w->rights_stuck = true;
}

void notify_ready(struct ir_group *g, uint32_t index) {
    struct message message;
    for (int i = 0; i < NOTIFY_READS && g->workers[index].notify_fd >= 0; i++) {
        if (notify_read(g, index, &message)) continue;
        if (message.has_rights) notify_pass_rights(g, index, &message);
        return;
    }
}

/* The message with descriptors is gone: on with those behind it. */
void notify_dropped(struct ir_group *g, uint32_t index) {
    struct worker *w = &g->workers[index];
    w->drop_fd = fd_release(g, w->drop_fd);
    if (w->notify_fd >= 0) (void)fd_watch(g, w->notify_fd, EPOLLIN, WATCH_NOTIFY, index);
}

/* Handles all that is in the queue and takes nothing (SO_PEEK_OFF of socket(7)); a message that is too long
 * comes in several parts. Skip an empty one after a peek at it. A sandbox may not know the
 * option: then take the messages up to one with descriptors. True: there may be descriptors in
 * the queue. */
static bool notify_walk(struct ir_group *g, uint32_t index) {
    const int fd = g->workers[index].notify_fd, from = 0;
    struct message message;
    bool has_rights = g->workers[index].sent_rights, in_the_middle = false;
    int i = 0;
    if (setsockopt(fd, SOL_SOCKET, SO_PEEK_OFF, &from, sizeof from) < 0) {
        while (i < DRAIN_READS && notify_read(g, index, &message)) i++;
        return has_rights || message.has_rights || i == DRAIN_READS;
    }
    for (; i < DRAIN_READS && message_peek(fd, &message); i++) {
        has_rights |= message.has_rights;
        if (!in_the_middle) message_handle(g, index, &message);
        in_the_middle = message.is_cut;
    }
    return has_rights || i == DRAIN_READS;
}

/* What a worker had said when it ended is heard, and nothing after that. What is still in the queue the last
 * one to close it gives up, descriptors included. */
void notify_close(struct ir_group *g, uint32_t index) {
    struct worker *w = &g->workers[index];
    w->drop_fd = fd_release(g, w->drop_fd);
    if (w->notify_fd < 0) return;
    if (getpid() == g->self) {
        fd_unwatch(g, w->notify_fd);
        notify_unlink(w->notify_fd);
        (void)shutdown(w->notify_fd, SHUT_RD);
        if (notify_walk(g, index) && rights_drop_all(w->notify_fd) < 0) {
            w->notify_fd = -1; /* left open: the exit closes it, and waits for nobody */
            return;
        }
    }
    w->notify_fd = fd_close(w->notify_fd);
}

/* ---- the facts about a worker */

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
    /* a full console: the worker is not silent, but waits for the core */
    if (w->streams[0].paused || w->streams[1].paused) ret_activity->active_ns = clock_ns();
    return 0;
}

int ir_group_fd(const struct ir_group *g) {
    if (g == NULL) return -1;
    return g->epoll_fd;
}
