/* io/nonblocking_writer.c: writes to a descriptor that others share: never blocks, and changes
 * nothing for them.
 *
 * O_NONBLOCK belongs to the open file (open(2)), so a pipe or terminal opens anew through
 * /proc/self/fd, and a socket gets a flag with each send. A new opening may fail (the terminal
 * or pipe of another user). Then a separate thread does the writes that may block, fed by a
 * socket pair. poll alone does not help, for a terminal polls writable with room for one byte.
 * Writes to regular files are plain. */
#include "group/group.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define THREAD_PIECE 4096u
#define THREAD_BUFFER 16384 /* what the socket pair holds, so that a slow reader is soon noticed */

enum writer_kind { WRITER_FILE, WRITER_REOPENED, WRITER_SOCKET, WRITER_THREAD };

struct ir_writer {
    enum writer_kind kind;
    int fd;
    bool shut; /* nothing more goes to the thread */
    pid_t self;
    struct writing {
        int from, to;
    } of_thread; /* for a forked child, which has copies of these, and no thread */
    ino_t from_inode;
};

/* ---- the thread. It owns its two descriptors and nothing of the writer, so it may outlive it. */
static int write_whole(int fd, const char *bytes, ssize_t size) {
    while (size > 0) {
        ssize_t n = write(fd, bytes, (size_t)size);
        if (n < 0 && errno != EINTR) return errno;
        if (n < 0) continue;
        bytes += n;
        size -= n;
    }
    return 0;
}

static void *writing_main(void *argument) {
    struct writing *writing = argument;
    char piece[THREAD_PIECE];
    int error = 0;
    for (;;) {
        ssize_t n = read(writing->from, piece, sizeof piece);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0 || (error = write_whole(writing->to, piece, n)) != 0) break;
    }
    /* its end, or this and its end, is what writer_finish waits for */
    if (error != 0) (void)send(writing->from, &error, sizeof error, MSG_DONTWAIT | MSG_NOSIGNAL);
    /* a child that the host program forked meanwhile has a copy: closing alone would end nothing */
    (void)shutdown(writing->from, SHUT_RDWR);
    (void)fd_close(writing->from);
    (void)close(writing->to);
    free(writing);
    return NULL;
}

static ino_t inode_of(int fd) {
    struct stat status;
    return fstat(fd, &status) < 0 ? 0 : status.st_ino;
}

/* The core's end of the pair, or -errno. */
static int thread_open(struct ir_writer *writer, int fd) {
    int ends[2], size = THREAD_BUFFER;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0) return -errno;
    struct writing *writing = malloc(sizeof *writing);
    int ours = fd_above_stdio(ends[0]), theirs = fd_above_stdio(ends[1]), to = fd_duplicate(fd);
    int r = writing == NULL ? -ENOMEM : ours < 0 ? ours : theirs < 0 ? theirs : to < 0 ? to : 0;
    if (r == 0) {
        (void)setsockopt(ours, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
        *writing = writer->of_thread = (struct writing){.from = theirs, .to = to};
        writer->from_inode = inode_of(theirs);
        r = thread_start(writing_main, writing);
    }
    if (r == 0) return ours;
    (void)fd_close(ours);
    (void)fd_close(theirs);
    (void)fd_close(to);
    free(writing);
    return r;
}

/* ---- the writer */

static int writer_open(struct ir_writer *writer, int fd) {
    struct stat status;
    if (fstat(fd, &status) < 0) return -errno;
    writer->fd = fd;
    writer->kind = S_ISSOCK(status.st_mode) ? WRITER_SOCKET : WRITER_FILE;
    if (S_ISSOCK(status.st_mode) || S_ISREG(status.st_mode) || S_ISBLK(status.st_mode)) return 0;
    int own = fd_reopen(fd, O_WRONLY);
    writer->kind = own >= 0 ? WRITER_REOPENED : WRITER_THREAD;
    if (own < 0) own = thread_open(writer, fd);
    if (own < 0) return own;
    writer->fd = own;
    return 0;
}

int ir_writer_new(int fd, struct ir_writer **ret_writer) {
    *ret_writer = NULL;
    struct ir_writer *writer = calloc(1, sizeof *writer);
    if (writer == NULL) return -ENOMEM;
    writer->self = getpid();
    int r = writer_open(writer, fd);
    if (r < 0) {
        free(writer);
        return r;
    }
    *ret_writer = writer;
    return 0;
}

/* What the thread has said: -EAGAIN nothing yet, 0 that it has written all, or its error. */
static int thread_answer(const struct ir_writer *writer) {
    int error;
    ssize_t n = recv(writer->fd, &error, sizeof error, MSG_DONTWAIT);
    if (n < 0) return errno == EINTR ? -EAGAIN : -errno;
    return n == (ssize_t)sizeof error ? -error : 0;
}

int64_t ir_writer_write(const struct ir_writer *writer, const char *bytes, uint32_t size) {
    if (writer->kind == WRITER_FILE || writer->kind == WRITER_REOPENED)
        return fd_write(writer->fd, bytes, size);
    ssize_t n = send(writer->fd, bytes, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n >= 0) return n;
    int r = -errno;
    if (r != -EPIPE || writer->kind == WRITER_SOCKET) return r;
    int answer = thread_answer(writer);
    return answer < 0 && answer != -EAGAIN ? answer : r;
}

int ir_writer_fd(const struct ir_writer *writer) {
    return writer->kind == WRITER_FILE ? -1 : writer->fd;
}

int ir_writer_finish(struct ir_writer *writer) {
    if (writer->kind != WRITER_THREAD) return 0;
    if (!writer->shut) (void)shutdown(writer->fd, SHUT_WR);
    writer->shut = true;
    return thread_answer(writer);
}

struct ir_writer *ir_writer_free(struct ir_writer *writer) {
    if (writer == NULL) return NULL;
    if (writer->kind == WRITER_REOPENED) (void)close(writer->fd); /* as input_close */
    if (writer->kind == WRITER_THREAD) {
        (void)fd_close(writer->fd);
        /* the thread closes `from` first: while that exists, both do */
        if (getpid() != writer->self && inode_of(writer->of_thread.from) == writer->from_inode) {
            (void)close(writer->of_thread.from);
            (void)close(writer->of_thread.to);
        }
    }
    free(writer);
    return NULL;
}
