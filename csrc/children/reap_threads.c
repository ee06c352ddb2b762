/* children/reap_threads.c: a thread that waits for a worker, where there is no pidfd (Linux < 5.3). */
#include "group/group.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/wait.h>

/* The workers that exited, in that order. Threads may outlive the group that shares it with
 * them: the last to leave gives it back. The group closes its descriptor: nothing is open after
 * that. */
struct waiter_queue {
    pthread_mutex_t mutex;
    int fd; /* an eventfd; -1: the group is gone, and nobody asks any more */
    uint32_t holders, count, taken, size;
    uint32_t ended[]; /* a ring: a worker is in it once, and restarts after that was taken */
};

struct waiter {
    pid_t pid;
    uint32_t index;
    struct waiter_queue *queue;
};

static void queue_leave(struct waiter_queue *queue) { /* which is locked */
    bool is_last = --queue->holders == 0;
    (void)pthread_mutex_unlock(&queue->mutex);
    if (!is_last) return;
    (void)pthread_mutex_destroy(&queue->mutex);
    free(queue);
}

static void *waiter_main(void *argument) {
    struct waiter *waiter = argument;
    struct waiter_queue *queue = waiter->queue;
    siginfo_t info;
    (void)child_wait(P_PID, waiter->pid, &info, WEXITED | WNOWAIT, NULL);
    (void)pthread_mutex_lock(&queue->mutex);
    queue->ended[queue->count++ % queue->size] = waiter->index;
    if (queue->fd >= 0) (void)eventfd_write(queue->fd, 1);
    queue_leave(queue);
    free(waiter);
    return NULL;
}

static int queue_open(struct ir_group *g) {
    if (g->waiters != NULL) return 0;
    struct waiter_queue *queue = calloc(1, sizeof *queue + g->n * sizeof *queue->ended);
    if (queue == NULL) return -ENOMEM;
    queue->holders = 1;
    queue->size = g->n;
    queue->fd = fd_new(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    int r = queue->fd < 0 ? queue->fd : fd_watch(g, queue->fd, EPOLLIN, WATCH_WAITER, 0);
    if (r < 0) {
        (void)fd_close(queue->fd);
        free(queue);
        return r;
    }
    (void)pthread_mutex_init(&queue->mutex, NULL);
    g->waiters = queue;
    return 0;
}

/* In a forked child the threads are not there, and one of them may hold the mutex for ever. */
void waiter_close(struct ir_group *g, bool forked) {
    struct waiter_queue *queue = g->waiters;
    if (queue == NULL) return;
    if (!forked) (void)pthread_mutex_lock(&queue->mutex);
    queue->fd = fd_close(queue->fd);
    if (!forked) queue_leave(queue);
    g->waiters = NULL;
}

int waiter_start(struct ir_group *g, uint32_t index) {
    int r = queue_open(g);
    if (r < 0) return r;
    struct waiter *waiter = malloc(sizeof *waiter);
    if (waiter == NULL) return -ENOMEM;
    *waiter = (struct waiter){g->workers[index].pid, index, g->waiters};
    (void)pthread_mutex_lock(&g->waiters->mutex);
    g->waiters->holders++;
    (void)pthread_mutex_unlock(&g->waiters->mutex);
    r = thread_start(waiter_main, waiter);
    if (r < 0) {
        (void)pthread_mutex_lock(&g->waiters->mutex);
        queue_leave(g->waiters);
        free(waiter);
    }
    return r;
}

static bool queue_pop(struct waiter_queue *queue, uint32_t *ret_index) {
    (void)pthread_mutex_lock(&queue->mutex);
    bool is_one = queue->taken < queue->count;
    if (is_one) *ret_index = queue->ended[queue->taken++ % queue->size];
    (void)pthread_mutex_unlock(&queue->mutex);
    return is_one;
}

void waiter_ready(struct ir_group *g) {
    eventfd_t times;
    (void)eventfd_read(g->waiters->fd, &times);
    for (uint32_t index; queue_pop(g->waiters, &index);) worker_reap(g, index, WNOHANG);
}
