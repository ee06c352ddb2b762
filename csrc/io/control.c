/* io/control.c: the control socket, by which another process of this user finds this launch and
 * asks for something.
 *
 * It is in the launch's folder (mode 0700), so strangers do not reach it; and it serves only
 * this user and root (SO_PEERCRED of unix(7)). Whoever connects gets the greeting: what the
 * caller has said of the launch, and the states of its workers. That costs the caller no turn.
 * Who then sends something has a question: its connection goes to the caller. A launch without
 * the socket is worth more than none. */
#include "group/group.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define BACKLOG 64
#define TURN 16 /* then signals and exits get theirs */

/* Two frames: the caller's words go between these two parts. */
struct __attribute__((packed)) counts {
    struct frame_head head;
    uint32_t of_state[IR_WORKER_STATES];
    uint32_t high, low; /* of the highest PROGRESS=; all ones: there was none */
};

static int control_bind(int fd, const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) return -ENAMETOOLONG;
    memcpy(address.sun_path, path, strlen(path) + 1);
    if (bind(fd, (const struct sockaddr *)&address, sizeof address) < 0) return -errno;
    /* to connect takes the right to write, which a umask may have taken from this user */
    if (chmod(path, S_IRUSR | S_IWUSR) < 0 || listen(fd, BACKLOG) < 0) {
        int r = -errno;
        (void)unlink(path);
        return r;
    }
    return 0;
}

/* Without a path the file is not removed: it is the caller's, as its socket. */
static int control_copy(struct control *control, const struct ir_config *config) {
    const bool is_ours = config->control_fd < 0;
    control->path = is_ours ? strdup(config->control) : NULL;
    control->about = malloc(config->about_size + 1u);
    if ((is_ours && control->path == NULL) || control->about == NULL) return -ENOMEM;
    if (config->about_size > 0) memcpy(control->about, config->about, config->about_size);
    control->about_size = config->about_size;
    return 0;
}

static int control_listen(const struct ir_config *config) {
    if (config->control_fd >= 0) return fd_duplicate(config->control_fd);
    int fd = fd_new(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (fd < 0 || control_bind(fd, config->control) == 0) return fd;
    return fd_close(fd);
}

void control_open(struct ir_group *g) {
    struct control *control = &g->control;
    if (g->config.control == NULL || control_copy(control, &g->config) < 0) return;
    int fd = control_listen(&g->config);
    if (fd < 0) return;
    control->fd = fd;
    if (fd_watch(g, fd, EPOLLIN, WATCH_CONTROL, 0) < 0) control_close(g);
}

/* ---- who connects */

static enum ir_worker_state worker_state(const struct worker *w) {
    if (w->pid == 0 || (w->held && w->reaped)) return IR_WORKER_WAITING;
    if (!w->reaped) return w->ready ? IR_WORKER_READY : IR_WORKER_RUNNING;
    return w->failed ? IR_WORKER_FAILED : IR_WORKER_DONE;
}

static bool greet(const struct ir_group *g, int fd) {
    const uint32_t size = g->control.about_size;
    struct frame_head head = {.kind = 'A', .size = htonl(size)};
    const uint32_t counts_size = sizeof(struct counts) - sizeof(struct frame_head);
    struct counts counts = {.head = {.kind = 'n', .size = htonl(counts_size)}};
    int64_t progress = -1;
    for (uint32_t i = 0; i < g->n; i++) {
        counts.of_state[worker_state(&g->workers[i])]++;
        if (g->workers[i].progress > progress) progress = g->workers[i].progress;
    }
    counts.high = htonl((uint32_t)((uint64_t)progress >> 32));
    counts.low = htonl((uint32_t)(uint64_t)progress);
    for (int i = 0; i < IR_WORKER_STATES; i++) counts.of_state[i] = htonl(counts.of_state[i]);
    struct iovec parts[] = {
        {.iov_base = &head, .iov_len = sizeof head},
        {.iov_base = g->control.about, .iov_len = size},
        {.iov_base = &counts, .iov_len = sizeof counts},
    };
    const struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
    ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    return n == (ssize_t)(sizeof head + size + sizeof counts);
}

static bool is_trusted(int fd) {
    struct ucred peer;
    socklen_t size = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
           (peer.uid == geteuid() || peer.uid == 0);
}

/* The place of one that has asked nothing so far, if there is no other: the one that has it longest. */
static struct client *client_place(struct ir_group *g) {
    struct control *control = &g->control;
    for (int i = 0; i < CONTROL_CLIENTS; i++) {
        struct client *client = &control->clients[control->next];
        control->next = (control->next + 1) % CONTROL_CLIENTS;
        if (!client->asks) {
            client->fd = fd_release(g, client->fd);
            return client;
        }
    }
    return NULL;
}

static void client_add(struct ir_group *g, int fd) {
    struct client *client = is_trusted(fd) && greet(g, fd) ? client_place(g) : NULL;
    if (client != NULL &&
        fd_watch(g, fd, EPOLLIN, WATCH_CLIENT, (uint32_t)(client - g->control.clients)) == 0)
        client->fd = fd;
    else (void)fd_close(fd);
}

/* Without a descriptor it would be ready without end: then only the next client wakes the core.
 * Every change of a watch reports once more what is ready, so there is one change. */
static void control_starve(struct ir_group *g, bool starved) {
    if (g->control.starved == starved) return;
    g->control.starved = starved;
    fd_rewatch(g, g->control.fd, starved ? EPOLLIN | EPOLLET : EPOLLIN, WATCH_CONTROL, 0);
}

/* A child that is forked meanwhile must know of the connections, or whoever asks waits for their
 * end. One hold for all of a turn: a fork of a large process takes long, and the next one comes. */
void control_ready(struct ir_group *g) {
    forks_hold();
    for (int i = 0; i < TURN && g->control.fd >= 0; i++) {
        int fd = fd_new(accept4(g->control.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (fd == -EAGAIN || fd == -EINTR || fd == -ECONNABORTED) break;
        control_starve(g, fd < 0);
        if (fd < 0) break;
        client_add(g, fd);
    }
    forks_release();
}

/* One that has gone, as after reading the greeting, is nobody's work. */
void client_ready(struct ir_group *g, uint32_t index) {
    struct client *client = &g->control.clients[index];
    char byte;
    if (client->fd < 0 || client->asks) return;
    ssize_t n = recv(client->fd, &byte, sizeof byte, MSG_PEEK | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0 || !event_room(g)) {
        client->fd = fd_release(g, client->fd);
        return;
    }
    fd_unwatch(g, client->fd);
    client->asks = true;
    (void)event_push(g, IR_CLIENT, -1, 0);
}

int ir_group_next_client(struct ir_group *g) {
    if (g == NULL) return -ESRCH;
    for (int i = 0; i < CONTROL_CLIENTS; i++) {
        struct client *client = &g->control.clients[i];
        if (!client->asks) continue;
        int fd = client->fd;
        *client = (struct client){.fd = -1};
        return fd;
    }
    return -EAGAIN;
}

/* In a child that the host program has forked, the file is its parent's. */
void control_close(struct ir_group *g) {
    struct control *control = &g->control;
    for (int i = 0; i < CONTROL_CLIENTS; i++) {
        control->clients[i].fd = fd_close(control->clients[i].fd);
        control->clients[i].asks = false;
    }
    if (control->path == NULL) {
        control->fd = fd_release(g, control->fd);
        return;
    }
    if (control->fd >= 0 && getpid() == g->self) (void)unlink(control->path);
    control->fd = fd_close(control->fd);
}

void control_free(struct ir_group *g) {
    free(g->control.path);
    free(g->control.about);
}
