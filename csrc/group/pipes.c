/* group/pipes.c: the pipes of one worker, made before its start. */
#include "group/group.h"

#include <sys/epoll.h>

/* Of a forked one the pipe is there already. */
bool pipes_has(const struct ir_worker *worker, int k) {
    return worker->stdio[k] == IR_FD_PIPE || (worker->pid > 0 && worker->stdio[k] >= 0);
}

/* The pipes of one worker. *ret_target_fd: where its stdin is written; -1: it has no pipe. */
int pipes_open(struct ir_group *g, const struct ir_worker *worker, uint32_t index,
               int *ret_target_fd) {
    struct worker *w = &g->workers[index];
    struct slot *slot = &g->slots[index];
    int fds[2], r = 0;
    *ret_target_fd = -1;
    if (worker->stdio[0] == IR_FD_PIPE && (r = fd_pipe(fds, 1)) == 0) {
        slot->stdio[0] = w->child_ends[0] = fds[0];
        *ret_target_fd = fds[1];
    } else if (worker->pid > 0 && worker->stdio[0] >= 0) {
        r = fd_duplicate(worker->stdio[0]);
        if (r >= 0) *ret_target_fd = r;
    }
    for (int k = 0; r >= 0 && k < 2; k++) {
        if (!pipes_has(worker, k + 1)) continue;
        struct stream *stream = &w->streams[k];
        stream->to = worker->output[k];
        if (worker->pid > 0) {
            r = stream->fd = fd_duplicate(worker->stdio[k + 1]);
        } else if ((r = fd_pipe(fds, 0)) == 0) {
            stream->fd = fds[0];
            slot->stdio[k + 1] = w->child_ends[k + 1] = fds[1];
        }
        if (r >= 0) r = fd_watch(g, stream->fd, EPOLLIN, k == 0 ? WATCH_OUT : WATCH_ERR, index);
    }
    return r < 0 ? r : 0;
}
