/* io/line_rests.c: a worker's text without the end of a line (a prompt, dots, a bar), where
 * lines carry no label. It passes on after 0.2 s. The timer runs only while there is such a
 * rest. */
#include "group/group.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define REST_NS (200 * NS_PER_MS)

static bool is_plain(const struct ir_worker *worker, int k) {
    return (worker->output[k] & IR_TO_CONSOLE) && (worker->output[k] & IR_UNLABELLED);
}

int rest_open(struct ir_group *g, const struct ir_worker *workers, uint32_t n) {
    bool any = false;
    for (uint32_t i = 0; i < n; i++)
        for (int k = 0; k < 2; k++)
            any |= g->workers[i].streams[k].plain = is_plain(&workers[i], k);
    if (!any) return 0;
    g->rest_fd = fd_new(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    return g->rest_fd < 0 ? g->rest_fd : fd_watch(g, g->rest_fd, EPOLLIN, WATCH_RESTS, 0);
}

static void rest_timer_set(struct ir_group *g, int64_t delay_ns) {
    struct itimerspec when = {.it_value.tv_nsec = (long)delay_ns};
    (void)timerfd_settime(g->rest_fd, 0, &when, NULL);
    g->rests_timed = true;
}

/* Something of the stream remains, and not for the console's sake. */
void rest_note(struct ir_group *g, struct stream *s) {
    if (s->held_ns == 0) s->held_ns = clock_ns();
    if (!g->rests_timed) rest_timer_set(g, REST_NS);
}

/* pass: passes the rest of a worker's stream on. */
void rest_ready(struct ir_group *g, void (*pass)(struct ir_group *g, uint32_t index, int which)) {
    uint64_t count;
    if (read(g->rest_fd, &count, sizeof count) != (ssize_t)sizeof count) return;
    int64_t now = clock_ns(), next = 0;
    g->rests_timed = false;
    for (uint32_t i = 0; i < g->started; i++)
        for (int k = 0; k < 2; k++) {
            struct stream *s = &g->workers[i].streams[k];
            if (s->held_ns == 0) continue;
            if (now - s->held_ns >= REST_NS) pass(g, i, k);
            else if (next == 0 || s->held_ns < next) next = s->held_ns;
        }
    if (next != 0) rest_timer_set(g, next + REST_NS - now);
}
