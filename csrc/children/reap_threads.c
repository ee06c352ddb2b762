/* children/reap_threads.c: a thread that waits for a worker, where there is no pidfd (before Linux 5.3). */
#include "group/group.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/wait.h>
#include <unistd.h>

/* It owns a copy of the pipe's end and nothing of the group, so it may outlive it. */
struct waiter {
    pid_t pid;
    uint32_t index;
    int fd;
};

static void *waiter_main(void *argument) {
    struct waiter *waiter = argument;
    siginfo_t info;
    (void)child_wait(P_PID, waiter->pid, &info, WEXITED | WNOWAIT, NULL);
    ssize_t written = write(waiter->fd, &waiter->index, sizeof waiter->index);
    (void)written; /* EPIPE: the group is gone, and nobody asks any more */
    (void)close(waiter->fd);
    free(waiter);
    return NULL;
}

static int waiter_open_pipe(struct ir_group *g) {
    if (g->waiter_fd[0] >= 0) return 0;
    int r = fd_pipe(g->waiter_fd, 0);
    return r < 0 ? r : fd_watch(g, g->waiter_fd[0], EPOLLIN, WATCH_WAITER, 0);
}

int waiter_start(struct ir_group *g, uint32_t index) {
    int r = waiter_open_pipe(g);
    if (r < 0) return r;
    struct waiter *waiter = malloc(sizeof *waiter);
    if (waiter == NULL) return -ENOMEM;
    *waiter = (struct waiter){.pid = g->workers[index].pid, .index = index};
    waiter->fd = fd_duplicate(g->waiter_fd[1]);
    if (waiter->fd < 0) {
        r = waiter->fd;
        free(waiter);
        return r;
    }
    sigset_t all, before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    pthread_attr_t attributes;
    (void)pthread_attr_init(&attributes);
    (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    (void)pthread_attr_setstacksize(&attributes, 262144);
    r = -pthread_create(&thread, &attributes, waiter_main, waiter);
    (void)pthread_attr_destroy(&attributes);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (r < 0) {
        (void)close(waiter->fd);
        free(waiter);
    }
    return r;
}

void waiter_ready(struct ir_group *g) {
    uint32_t index;
    while (read(g->waiter_fd[0], &index, sizeof index) == (ssize_t)sizeof index)
        worker_reap(g, index, WNOHANG);
}
