/* io/followers.c: the workers' lines for processes that follow this launch from outside.
 *
 * A follower is a connection that the caller has handed over. What leaves a stream for the console
 * or the log leaves for it, too, before the console adds labels or folds lines. Nothing here waits:
 * what finds no room is dropped, and the follower is told how many lines that were. A launch that
 * nobody follows pays one comparison for each piece of output. */
#include "group/group.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

struct __attribute__((packed)) lines {
    struct frame_head head;
    uint32_t rank;
    uint8_t stream;
};
struct __attribute__((packed)) loss {
    struct frame_head head;
    uint32_t high, low;
};

static void follower_close(struct ir_group *g, struct follower *f) {
    if (f->fd < 0) return;
    f->fd = fd_release(g, f->fd);
    free(f->wanted);
    free(f->buffer);
    f->wanted = NULL;
    f->buffer = NULL;
    g->followed--;
}

/* ---- what it is sent */

static void buffer_put(struct follower *f, const void *bytes, uint32_t size) {
    memcpy(f->buffer + f->end, bytes, size);
    f->end += size;
}

static bool has_room(struct follower *f, uint32_t wanted) {
    if (f->end + wanted <= f->size) return true;
    if (f->start > 0) {
        memmove(f->buffer, f->buffer + f->start, f->end - f->start);
        f->end -= f->start;
        f->start = 0;
    }
    return f->end + wanted <= f->size;
}

static void loss_put(struct follower *f) {
    if (f->lost == 0) return;
    struct loss loss = {.head = {.kind = 'l', .size = htonl(sizeof loss - sizeof loss.head)}};
    loss.high = htonl((uint32_t)(f->lost >> 32));
    loss.low = htonl((uint32_t)f->lost);
    buffer_put(f, &loss, sizeof loss);
    f->lost = 0;
}

static uint64_t count_lines(const char *bytes, uint32_t size) {
    uint64_t count = 0;
    const char *end = bytes + size;
    while ((bytes = memchr(bytes, '\n', (size_t)(end - bytes))) != NULL) {
        count++;
        bytes++;
    }
    return count > 0 ? count : 1;
}

/* Sends what its socket takes, and waits for room only while there is none. */
static void follower_flush(struct ir_group *g, struct follower *f) {
    while (f->start < f->end) {
        ssize_t n =
            send(f->fd, f->buffer + f->start, f->end - f->start, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno != EAGAIN) {
            follower_close(g, f);
            return;
        }
        if (n < 0) break;
        f->start += (uint32_t)n;
    }
    if (f->start == f->end) f->start = f->end = 0;
    const bool waits = f->end > 0;
    if (waits == f->waits) return;
    f->waits = waits;
    fd_rewatch(g, f->fd, waits ? EPOLLIN | EPOLLOUT : EPOLLIN, WATCH_FOLLOWER,
               (uint32_t)(f - g->followers));
}

/* One turn of the loop may bring more than a buffer holds. */
static bool make_room(struct ir_group *g, struct follower *f, uint32_t wanted) {
    if (has_room(f, wanted)) return true;
    if (!f->waits) follower_flush(g, f);
    return f->fd >= 0 && has_room(f, wanted);
}

void followers_put(struct ir_group *g, uint32_t index, int which, const char *bytes,
                   uint32_t size) {
    const uint32_t payload = (uint32_t)(sizeof(struct lines) - sizeof(struct frame_head)) + size;
    struct lines lines = {.head = {.kind = 'o', .size = htonl(payload)}};
    lines.rank = htonl(g->config.first_rank + index);
    lines.stream = (uint8_t)which;
    uint64_t lost = 0; /* counted once, for all of them */
    for (int i = 0; i < FOLLOWERS; i++) {
        struct follower *f = &g->followers[i];
        if (f->fd < 0 || (f->wanted != NULL && !f->wanted[index])) continue;
        if (!make_room(g, f, (uint32_t)(sizeof(struct loss) + sizeof lines) + size)) {
            if (lost == 0) lost = count_lines(bytes, size);
            f->lost += lost;
            continue;
        }
        loss_put(f);
        buffer_put(f, &lines, sizeof lines);
        buffer_put(f, bytes, size);
    }
}

/* One that waits for room is left to its event. */
void followers_flush(struct ir_group *g) {
    if (g->followed == 0) return;
    for (int i = 0; i < FOLLOWERS; i++) {
        struct follower *f = &g->followers[i];
        if (f->fd >= 0 && f->end > 0 && !f->waits) follower_flush(g, f);
    }
}

/* There is room, or it has gone; and one that sends something more is no follower. */
void follower_ready(struct ir_group *g, uint32_t index) {
    struct follower *f = &g->followers[index];
    char byte;
    if (f->fd < 0) return;
    ssize_t n = recv(f->fd, &byte, sizeof byte, MSG_DONTWAIT);
    if (n >= 0 || (errno != EAGAIN && errno != EINTR)) follower_close(g, f);
    else follower_flush(g, f);
}

/* ---- its beginning and its end */

int ir_group_add_follower(struct ir_group *g, int fd, const uint8_t *wanted, const char *first,
                          uint32_t first_size) {
    if (g == NULL || g->state == ENDED) return -ESRCH;
    struct follower *f = NULL;
    for (int i = 0; i < FOLLOWERS && f == NULL; i++)
        if (g->followers[i].fd < 0) f = &g->followers[i];
    if (f == NULL) return -EMFILE;
    *f = (struct follower){.fd = -1, .size = FOLLOWER_BUFFER + first_size};
    f->buffer = malloc(f->size);
    if (wanted != NULL && (f->wanted = malloc(g->capacity + 1u)) != NULL)
        memcpy(f->wanted, wanted, g->capacity);
    int r = f->buffer == NULL || (wanted != NULL && f->wanted == NULL) ? -ENOMEM : 0;
    if (r == 0) r = fd_watch(g, fd, EPOLLIN, WATCH_FOLLOWER, (uint32_t)(f - g->followers));
    if (r < 0) {
        free(f->buffer);
        free(f->wanted);
        *f = (struct follower){.fd = -1};
        return r;
    }
    f->fd = fd;
    g->followed++;
    buffer_put(f, first, first_size);
    follower_flush(g, f);
    return 0;
}

/* The last frame says that nothing is missing; who does not get it has not read fast enough. In a
 * child that the host program has forked, the connection is its parent's. */
void followers_close(struct ir_group *g) {
    const struct frame_head end = {.kind = 'e'};
    for (int i = 0; i < FOLLOWERS && g->followed > 0; i++) {
        struct follower *f = &g->followers[i];
        if (f->fd >= 0 && getpid() == g->self && has_room(f, sizeof(struct loss) + sizeof end)) {
            loss_put(f);
            buffer_put(f, &end, sizeof end);
            follower_flush(g, f);
        }
        follower_close(g, f);
    }
}
