/* sys/events.c: the queue of events, from all that push them to the caller that takes them. */
#include "group/group.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

/* Events that must never go missing have their room before the first worker, even if nobody collects. */
#define WORKER_EVENTS                                                                              \
    8 /* STARTED, START_FAILED, EXITED, STUCK, OUTPUT_LOST, twice OUTPUT_HELD, PROGRESS */
#define GROUP_EVENTS                                                                               \
    (3 * STRAYS_NAMED + 16) /* LEFTOVER, twice STUCK; SIGNALLED, OUTPUT_LOST, ENDED, ... */
#define SIGNAL_EVENTS 128   /* these may go missing: event_room */

int events_open(struct ir_group *g, uint32_t n) {
    g->event_capacity = WORKER_EVENTS * n + GROUP_EVENTS + SIGNAL_EVENTS;
    g->events = calloc(g->event_capacity + 1, sizeof *g->events);
    return g->events == NULL ? -ENOMEM : 0;
}

struct ir_event *event_push(struct ir_group *g, int kind, int worker, int pid) {
    assert(g->event_count < g->event_capacity);
    uint32_t at = (g->event_head + g->event_count) % g->event_capacity;
    /* what comes in one turn with the end, a signal say, comes too late: ENDED is the last event */
    bool is_late = g->state == ENDED && kind != IR_ENDED;
    if (g->event_count < g->event_capacity && !is_late) g->event_count++;
    else at = g->event_capacity; /* a place that nobody reads */
    g->events[at] =
        (struct ir_event){.kind = kind, .worker = worker, .pid = pid, .time_ns = clock_ns()};
    return &g->events[at];
}

/* For events that come without end where somebody sends signals without end. */
bool event_room(const struct ir_group *g) {
    return g->event_count < SIGNAL_EVENTS;
}

int events_pop(struct ir_group *g, struct ir_event *ret_events, uint32_t n) {
    uint32_t taken = 0;
    for (; taken < n && g->event_count > 0; taken++) {
        ret_events[taken] = g->events[g->event_head];
        if (ret_events[taken].kind == IR_PROGRESS)
            g->workers[ret_events[taken].worker].progress_event = NULL;
        g->event_head = (g->event_head + 1) % g->event_capacity;
        g->event_count--;
    }
    return (int)taken;
}
