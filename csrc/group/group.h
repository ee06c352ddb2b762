/* group/group.h: one launch, and all that the core knows of it. Not public.
 *
 * A file includes this header and calls files of its own folder and of those below:
 *
 *   group     the handle and its loop, the spawn, signals from outside, the stop's timetable
 *   children  workers and the guard: signals to them, the terminal, their end
 *   teardown  what outlives the workers
 *   io        the workers' output, the launcher's stdin, what workers say of themselves
 *   spawn     one process, from the arena to its exec
 *   sys       descriptors, the clock, pidfds, /proc, the queue of events */
#ifndef GROUP_GROUP_H
#define GROUP_GROUP_H

#include <limits.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/signalfd.h>
#include <sys/types.h>

#include "children/children.h"
#include "include/irun.h"
#include "io/io.h"
#include "spawn/spawn.h"
#include "sys/sys.h"
#include "teardown/teardown.h"

#define LEASE_MOST_MS (INT_MAX - 1) /* what poll(2) can wait for the guard */
#define ECHO_MS 1000 /* in which a signal of the same sender is the same request */
#define RECHECK_MS 20 /* at leftovers whose end is no event: not a child of this process, and without a pidfd */
#define STRAYS_LEAST_MS 2000 /* what leftovers have of the grace after the ranks have used it up */
#define TRACKERS_MS 1000 /* what resource trackers have without a grace: they end with their ranks, and tidy up */

enum state { IDLE, RUNNING, LEADING, STOPPING, KILLING, SWEEPING, PURGING, DRAINING, ENDED };
enum cause { STOP, KILL, TIMEOUT, GONE, CLEAR, FLUSHED, CAUSES };

struct ir_group {
    struct ir_config config;
    char *mark;
    int epoll_fd, exits_fd, timer_fd, signal_fd, execs_fd;
    int rest_fd;                /* the timer of io/line_rests.c */
    bool rests_timed;           /* it runs */
    int fold_fd;                /* the timer of io/console_lines.c */
    bool fold_timed;            /* it runs */
    bool folds;                 /* show lines that several workers write alike once */
    char fold_label[2][2][FOLD_LABEL]; /* around the numbers of those workers, for each stream */
    int64_t line_second;        /* of which line_time has the text */
    char line_time[LINE_TIME];
    bool went_badly;            /* a worker did not end with 0 */
    int lifeline[2];            /* whose end shows a child in another PID namespace of the launch */
    struct waiter_queue *waiters; /* from threads that wait in place of pidfds; NULL: there are none */
    enum state state;
    bool immediate;             /* a second stop came: no further grace */
    bool signalled;             /* a signal from outside stopped the launch */
    struct signalfd_siginfo stopped_by; /* that signal */
    int64_t signalled_ns;       /* when it came */
    bool console_reported;
    bool unplaced_reported;
    bool no_clone_pidfd;        /* clone refuses CLONE_PIDFD here */
    bool adopts;                /* an own process: orphans of the launch become its children */
    int proc_error;             /* -errno: why /proc did not show this PID namespace; 0: it did */
    bool unseen_reported;
    pid_t probe;                /* the number of a thread for that alone */
    uint64_t spawn_ticks;       /* when, in /proc's clock: nothing older is of this launch */
    int stop_with;              /* the signal that this stop sends */
    int64_t grace_ms;           /* of this stop, and of the leftovers after it */
    int64_t overrun_ms;         /* the grace, once workers have used it up; 0: they have not */
    int64_t due_ns;             /* when the state's time is up */
    int64_t grace_began_ns;     /* when a signal from outside began it; 0: none did */
    pid_t self;
    uint32_t capacity, n, started, alive, abandoned, strays_alive;
    uint32_t held;              /* of those that `started` counts: not started, or to restart */
    struct worker *workers;
    char *labels;               /* copies */
    char *buffers;              /* of all streams with a pipe */
    void *arena;                /* slots, stacks, strings of the children until their exec */
    size_t arena_size;
    struct slot *slots;
    struct ir_event *events;    /* a ring of event_capacity, and a place beyond */
    uint32_t event_head, event_count, event_capacity;
    uint32_t strays_seen, strays_known; /* how many in all; how many of them by number */
    pid_t *strays_by_pid;
    struct stray *strays;       /* strays_alive of them, without adoption */
    struct sink sinks[2];       /* the second without buffer and err_sink 0 where both are one file */
    int err_sink;
    struct input input;
    char *log_buffer;           /* STREAM_BUFFER, for the marked lines of one write */
    pid_t *foreign;             /* children from before the launch: reaped, never touched */
    uint32_t foreign_count;
    struct guard guard;
    struct terminal terminal;
    struct lease lease;
    struct control control;
    struct follower followers[FOLLOWERS];
    uint32_t followed;          /* how many of them there are */
    struct cgroup cgroup;
    struct window window;
};

/* signals.c */
int signal_open(struct ir_group *g);
void signal_ready(struct ir_group *g);

/* stop_state.c */
void worker_close_child_ends(struct worker *w);
void state_cause(struct ir_group *g, enum cause cause);
void state_check(struct ir_group *g);

/* pipes.c */
bool pipes_has(const struct ir_worker *worker, int k);
int pipes_open(struct ir_group *g, const struct ir_worker *worker, uint32_t index,
               int *ret_target_fd);

/* part.c */
int part_prepare(struct ir_group *g, const struct ir_worker *workers, const uint32_t *which,
                 uint32_t n, uint64_t blocked, struct ir_failure *ret_failure);

#endif
