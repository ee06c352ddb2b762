/* io/rights_drop.c: takes messages with descriptors out of a socket, where that makes nobody wait.
 *
 * The last one to close a descriptor may have to wait: for a TCP peer (SO_LINGER of socket(7)),
 * for a terminal, for a file server. The kernel closes those of a message that arrives without
 * room for them in whoever receives it. So a thread does that, which nobody joins. It has no
 * room for them either. The kernel flushes no descriptor that never was in this process's table.
 * And a thread that waits for a peer does not hold up the end of the process (inet_release() in
 * the kernel's net/ipv4/af_inet.c). */
#include "io/io.h"
#include "sys/sys.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

struct drop {
    int fd;      /* a copy of the socket's */
    int done_fd; /* a byte goes there after one message; -1: none is pending, and nobody asks */
};

static bool message_remove(int fd) {
    char nothing;
    struct iovec part = {.iov_base = &nothing, .iov_len = sizeof nothing};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    ssize_t n;
    while ((n = recvmsg(fd, &header, MSG_DONTWAIT)) < 0 && errno == EINTR) continue;
    return n >= 0;
}

static void drop_free(struct drop *drop) {
    (void)fd_close(drop->fd);
    (void)fd_close(drop->done_fd);
    free(drop);
}

static void *drop_main(void *argument) {
    struct drop *drop = argument;
    while (message_remove(drop->fd) && drop->done_fd < 0) continue;
    if (drop->done_fd >= 0) (void)fd_write(drop->done_fd, "", 1);
    drop_free(drop);
    return NULL;
}

/* crews/spawn/zygote.py knows the thread by its name, and may look before it has run: so it has
 * the name from birth. */
static int named_thread_start(struct drop *drop) {
    char before[16];
    bool is_known = prctl(PR_GET_NAME, before, 0, 0, 0) == 0;
    if (is_known) (void)prctl(PR_SET_NAME, "irun-drop", 0, 0, 0);
    int r = thread_start(drop_main, drop);
    if (is_known) (void)prctl(PR_SET_NAME, before, 0, 0, 0);
    return r;
}

static int drop_new(int fd, int done_fd) {
    struct drop *drop = malloc(sizeof *drop);
    if (drop == NULL) return -ENOMEM;
    *drop = (struct drop){fd_duplicate(fd), done_fd};
    int r = drop->fd < 0 ? drop->fd : named_thread_start(drop);
    if (r == 0) return 0;
    drop->done_fd = -1; /* the caller's still */
    drop_free(drop);
    return r;
}

/* Takes the first message of a socket. Returns a descriptor that turns readable after that. */
int rights_drop_one(int fd) {
    int fds[2];
    int r = fd_pipe(fds, 0);
    if (r < 0) return r;
    r = drop_new(fd, fds[1]);
    if (r == 0) return fds[0];
    for (int i = 0; i < 2; i++) (void)fd_close(fds[i]);
    return r;
}

/* Takes all messages of a socket that gets no more, and closes it then. */
int rights_drop_all(int fd) {
    return drop_new(fd, -1);
}
