/* spawn/window.c: how a child gets few descriptors where the launcher has many.
 *
 * A clone copies the launcher's table of descriptors, and an exec closes the copies: with pipes
 * for N ranks both take the kernel N times N. So a child shares that table at first
 * (CLONE_FILES). Then it takes for itself what is below the window's end (close_range(2) with
 * CLOSE_RANGE_UNSHARE). There the launcher has put what it inherited, and the child's
 * stdio. The next rank uses the places of one that has its own table. Only in an own process: a
 * host program's threads may open at any time what ranks are to inherit. */
#include "group/group.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef SYS_close_range
#define SYS_close_range 436
#endif

#define LEAST_RANKS (2 * WINDOW_RANKS) /* the copy of a smaller table takes as long */
#define FDS_PER_RANK 16 /* more than one ever takes: near the limit there is no window */

/* Before Linux 6.11, a table that the kernel cuts keeps notes of full words of 64 that it no
 * longer has (9a2fa1472083 in its history). A rank's 65th descriptor would get the number behind
 * all of the launcher's, beyond the rank's limit maybe. Stable kernels have the mend; it does not
 * show. */
static bool is_worthwhile(const struct ir_group *g) {
    struct rlimit limit;
    return g->capacity >= LEAST_RANKS && !(g->config.flags & IR_USE_FORK) && kernel_is(6, 11) &&
           getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur / FDS_PER_RANK >= g->capacity &&
           syscall(SYS_close_range, ~0U, ~0U, 0) == 0; /* of nothing: whether it is to be had */
}

static void end_raise(int fd, void *with) {
    int *end = with;
    if (fd >= *end) *end = fd + 1;
}

/* Before the core opens descriptors of ranks: the window has the low numbers. A launch without
 * it works as well. */
void window_open(struct ir_group *g) {
    struct window *window = &g->window;
    int end = 3;
    if (!is_worthwhile(g) || fds_each_inherited(end_raise, &end) < 0) return;
    end_raise(g->guard.pipe[1], &end);
    for (; window->taken < WINDOW_PLACES; window->taken++) {
        int fd = fd_duplicate(g->epoll_fd); /* anything, for the time being */
        if (fd < 0) {
            window_close(g);
            return;
        }
        window->places[window->taken] = fd;
        end_raise(fd, &end);
    }
    window->end = end;
}

void window_close(struct ir_group *g) {
    struct window *window = &g->window;
    while (window->taken > 0) (void)fd_close(window->places[--window->taken]);
    window->end = 0;
}

/* A descriptor that all children are to have a copy of. */
int window_lay(const struct ir_group *g, int fd) {
    if (g->window.end == 0) return 0;
    return dup3(fd, g->window.places[WINDOW_PLACES - 1], O_CLOEXEC) < 0 ? -errno : 0;
}

/* Until the child has its own table, or is dead: then the kernel clears the word
 * (CLONE_CHILD_CLEARTID). Before its first steps only a SIGSTOP from outside can hold it. */
static int child_await(const struct ir_group *g, uint32_t index) {
    const struct worker *w = &g->workers[index];
    struct slot *slot = &g->slots[index];
    const struct timespec most = {GIVE_UP_MS / 1000, 0};
    for (int rounds = 0; slot->shares_table;) {
        if (syscall(SYS_futex, &slot->shares_table, FUTEX_WAIT, 1, &most, NULL, 0) == 0 ||
            errno != ETIMEDOUT)
            continue;
        if (rounds++ > 0) return -ETIMEDOUT;
        (void)child_signal(g, w->pid, w->pidfd, SIGKILL);
    }
    return 0;
}

/* The terminal and a lifeline come later, and may be outside of it. */
static bool has_place(const struct ir_group *g, const struct slot *slot) {
    return g->window.end > 0 && slot->terminal_fd < 0 && slot->lifeline[0] < 0;
}

/* Right before its clone: its stdio, after the rank that had the same places. */
int window_use(struct ir_group *g, uint32_t index) {
    struct slot *slot = &g->slots[index];
    if (!has_place(g, slot)) return 0;
    int r = index < WINDOW_RANKS ? 0 : child_await(g, index - WINDOW_RANKS);
    for (uint32_t i = 0; r >= 0 && i < 3; i++) {
        int place = g->window.places[3 * (index % WINDOW_RANKS) + i];
        if (slot->stdio[i] == IR_FD_INHERIT) continue;
        if (dup3(slot->stdio[i], place, O_CLOEXEC) < 0) r = -errno;
        slot->stdio[i] = place;
    }
    if (r < 0) return r;
    slot->table_end = g->window.end;
    slot->shares_table = 1;
    return 0;
}

/* After the last clone, before the core closes any descriptor that a child needs. */
int window_await_all(const struct ir_group *g) {
    int r = 0;
    const uint32_t first = g->started < WINDOW_RANKS ? 0 : g->started - WINDOW_RANKS;
    for (uint32_t i = first; g->window.end > 0 && r >= 0 && i < g->started; i++)
        r = child_await(g, i);
    return r;
}
