/* group/group.h: what the files of the core share. Not public.
 *
 * sys/fd.c     descriptors                       spawn/child.c  between clone and exec
 * group/spawn.c  the spawn, spawn/clone.c one process of it, spawn/arena.c its memory
 * children/reap.c   exits, in the order of death      sys/pidfd.c  a child as itself, and not as a number
 * group/stop_state.c  the stop's timetable              teardown/leftovers.c  descendants that outlive the workers,
 *                                            sys/procfs.c what /proc says of them
 *                                            teardown/fork_chase.c  those that fork and exit without end
 * group/signals.c signals of an own process         children/signal_send.c those to workers
 * children/terminal.c    the terminal's foreground, Ctrl-Z sys/events.c what the caller is told
 * io/output_pump.c   pipes to lines                    io/console_sink.c   lines to the console
 * io/line_rests.c   what is not a line yet            io/outlet.c a write that never blocks
 * io/stdin_fanout.c  our stdin to the workers          io/sd_notify.c what workers say of themselves
 * group/group.c  the handle                        group/entry.c  the process at its start
 * children/guard.c  the process that ends what we leave; guard/main.c is that process
 * spawn/cgroup.c a leaf for each worker, where we may
 * sys/clock.c  the time */
#ifndef CORE_H
#define CORE_H

#include <limits.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/types.h>

#include "guard/arguments.h"
#include "include/irun.h"

/* The child's code is raw system calls on these two; elsewhere, and under a sanitizer that keeps
 * shadow state per address space, a plain fork. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
    __has_feature(memory_sanitizer)
#define HAS_SANITIZER 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define HAS_SANITIZER 1
#endif
#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(HAS_SANITIZER)
#define CAN_SHARE_MEMORY true
#else
#define CAN_SHARE_MEMORY false
#endif

#if defined(__x86_64__) || defined(__aarch64__) /* clone3 is by hand: libc has no wrapper */
#define CAN_BE_BORN_INTO_CGROUP true
#else
#define CAN_BE_BORN_INTO_CGROUP false
#endif

#define STACK_SIZE 16384u /* a child's, until its exec */
#define NS_PER_MS 1000000LL
#define GIVE_UP_MS 5000          /* how long we wait for what SIGKILL does not end */
#define CONSOLE_WAIT_MS 1000     /* after a stop, how long for a reader that does not read */
#define ECHO_MS 200              /* in which a signal of the same sender is the same request */
#define STRAYS_LEAST_MS 2000     /* what strays have of the grace where the ranks have used it up */
#define STREAM_BUFFER 65536u     /* the longest line that is passed on in one piece */
#define SINK_BUFFER (4u * 65536) /* what we hold for a slow console; then workers wait */
#define SINK_MARGIN 8192u
#define TAIL_BUFFER 4096u        /* last words that are kept for the report */
#define BY_PIDFD 3               /* P_PIDFD of waitid(2), Linux 5.4 */
#define GUARD_NAME "irun-guard"
#define LINE_SIZE 1024u          /* of a file of /proc that is read by lines: the rest of a line is not kept */
#define STATUS_SIZE 512u         /* of a worker's last STATUS= that is kept */
#define STRAYS_TOLD 16           /* named one by one; more are only stopped */

#define SIGNAL_BIT(sig) (UINT64_C(1) << ((sig) - 1))

struct ir_group;

/* ---- what an epoll event means: kind in the high half, index in the low one */
enum watch {
    WATCH_EXITS, WATCH_OUT, WATCH_ERR, WATCH_SIGNALS, WATCH_TIMER, WATCH_EXECS, WATCH_WAITER,
    WATCH_SINK, WATCH_STRAY, WATCH_SOURCE, WATCH_TARGET, WATCH_GUARD, WATCH_ASKED, WATCH_NOTIFY,
    WATCH_RESTS,
};

/* ---- spawn/child.c: everything a child needs, and where it leaves its failure */
struct slot {
    const char *program;
    char *const *argv;
    char *const *envp;
    const char *cwd;
    const char *uid_map; /* NULL: no user namespace */
    const char *gid_map;
    size_t uid_map_size, gid_map_size;
    uint64_t blocked;    /* the mask it gets */
    uint64_t defaults;   /* signals put back to default */
    uint64_t nofile_soft, nofile_hard; /* 0, 0: left alone */
    const uint64_t *cpus; /* NULL: neither these nor nodes are set */
    const uint64_t *nodes;
    uint32_t cpu_words, node_words;
    int memory_policy;
    pid_t parent;
    int stdio[3];        /* >= 3, or IR_FD_INHERIT */
    int terminal_fd;     /* -1: the foreground is not handed over */
    int lifeline[2];     /* a pipe of which only the launcher keeps the other end; -1: none */
    uint32_t flags;      /* ir_worker.flags */
    bool own_session;    /* a session of its own, not only a process group */
    volatile int memory_error; /* out: of the memory policy, without which it goes on */
    volatile int step;   /* out: what failed, and why */
    volatile int error;
};
int child_main(void *slot);

/* ---- a worker and its pipes */
struct stream {
    int fd;          /* -1: closed */
    int to;          /* IR_TO_CONSOLE | IR_TO_LOG */
    bool paused;     /* not watched, with bytes at hand: the console does not take more */
    bool ended;      /* no more will come: an unended last line is passed on too */
    bool more;       /* the last piece did not end its line */
    bool plain;      /* its lines go to the console without a label */
    bool due;        /* what is left of it is passed on, though it ends no line */
    int64_t held_ns; /* since when there is a rest that ends no line; 0: there is none */
    uint32_t start;  /* buffer[start..end) is not passed on yet */
    uint32_t end;
    uint32_t last, last_size; /* where the last piece lies that was passed on; overwritten by the next read */
    uint64_t bytes;  /* that came in all */
    char *buffer;    /* STREAM_BUFFER; NULL: not piped */
    const char *label, *label_more;
    uint32_t label_size, label_more_size;
};

struct worker {
    pid_t pid;       /* 0: never started */
    pid_t forked;    /* > 0: it is there already, the caller's fork */
    int pidfd;       /* stays open after the reaping: it still names the process group */
    int log_fd;
    int error_log_fd; /* stderr's own; -1: it goes to log_fd, marked */
    int child_ends[3]; /* of its pipes, until it has them */
    bool reaped;
    bool told;       /* our stop signal was sent */
    int failed_step; /* between clone and exec; 0: it did exec */
    int failed_errno;
    bool log_lost;   /* told once */
    int log_open;    /* stream whose unended line is the log's last, or -1 */
    struct stream streams[2];
    int wrote;       /* the stream that it wrote to last */
    char *tail;      /* TAIL_BUFFER, a ring of stderr; NULL: not piped */
    uint64_t tail_count;
    int notify_fd;   /* -1: none, or closed at its end */
    bool ready;      /* it said READY=1 */
    bool triggered;  /* it said WATCHDOG=trigger, and no WATCHDOG=1 since */
    int64_t said_ns, ping_ns; /* struct ir_activity */
    char *status;    /* STATUS_SIZE, once there was one */
    uint32_t status_size;
};

/* ---- io/console_sink.c: one console */
struct sink {
    struct ir_outlet *outlet;
    uint32_t awaited; /* of epoll: room, or the last of it to be taken */
    int which;
    bool broken;     /* EPIPE and the like: everything more is dropped */
    bool open;       /* its last line has no end */
    bool mixed;      /* more than one stream has written to it */
    const struct stream *last; /* whose line it is; NULL: ours, or none */
    uint32_t start, end;
    char *buffer;    /* SINK_BUFFER, and SINK_MARGIN for lines of our own; NULL: there is none */
};

/* ---- io/stdin_fanout.c: our stdin to several workers */
struct target { int fd; uint32_t done; bool waiting; };
struct input {
    int fd;          /* -1: none */
    bool watchable;  /* not a regular file, which is always ready */
    bool behind;     /* a terminal in whose background we are */
    uint32_t n, end;
    struct target *targets;
    char *buffer;
};

struct process {
    pid_t pid, parent, group, session;
    uint64_t start_ticks;
    char state;
    bool decided;    /* whether it is ours: */
    bool ours;
    char name[16];
};

struct processes {   /* by pid */
    struct process *at;
    size_t n, capacity;
};

struct stray {
    pid_t pid;
    int fd; /* its pidfd */
};

/* ---- children/guard.c: the process that ends what we leave when we are killed */
struct guard {
    char *program, *folder; /* NULL: none */
    char parent[16], session[16], since[24]; /* its arguments, as words */
    const char *argv[GUARD_WORDS + 1];
    pid_t pid;              /* 0: none runs */
    int pidfd;
    int folder_fd;          /* locked while we live: a folder that nobody holds may be removed */
    int pipe[2];            /* our workers' numbers, read by it when we have died */
    int step, error;        /* between clone and exec */
    bool dismissed;         /* killed by us */
};

/* ---- spawn/cgroup.c: the folder of this launch, with a leaf for each worker */
struct cgroup {
    char *path;      /* NULL: none */
    int fd;
    uint32_t leaves;
};

enum state { IDLE, RUNNING, LEADING, STOPPING, KILLING, SWEEPING, PURGING, DRAINING, ENDED };
enum cause { STOP, KILL, TIMEOUT, GONE, CLEAR, FLUSHED, CAUSES };

struct ir_group {
    struct ir_config config;
    char *mark;
    int epoll_fd, exits_fd, timer_fd, signal_fd, execs_fd, terminal_fd;
    int rest_fd;                /* the timer of io/line_rests.c */
    bool rests_timed;           /* it runs */
    bool went_badly;            /* a worker did not end with 0 */
    int lifeline[2];            /* whose end tells a child in another PID namespace of ours */
    int waiter_fd[2];           /* threads that wait in place of a pidfd write worker numbers here */
    enum state state;
    bool hurry;                 /* a second stop came: no further grace */
    bool told;                  /* a signal from outside stopped us */
    struct signalfd_siginfo told_by; /* that signal */
    int64_t heard_ns;           /* when it came */
    bool console_told;
    bool unplaced_told;
    bool no_clone_pidfd;        /* clone refuses CLONE_PIDFD here */
    bool has_proc;              /* /proc shows our own PID namespace */
    uint64_t spawn_ticks;       /* when, in /proc's clock: nothing older is of this launch */
    int stop_with;              /* the signal that this stop sends */
    int64_t grace_ms;           /* of this stop, and of the strays after it */
    int64_t told_ns;            /* when a signal from outside began it; 0: none did */
    pid_t self;
    uint32_t capacity, n, started, alive, abandoned, strays_alive;
    struct worker *workers;
    char *labels;               /* copies */
    char *buffers;              /* of all streams that are piped */
    void *arena;                /* slots, stacks, strings of the children until their exec */
    size_t arena_size;
    struct slot *slots;
    struct ir_event *events;    /* a ring of event_capacity, and a place beyond */
    uint32_t event_head, event_count, event_capacity;
    uint32_t strays_seen, strays_known; /* how many in all; how many of them by number */
    pid_t *strays_by_pid;
    struct stray *strays;       /* strays_alive of them, in a library */
    struct sink sinks[2];       /* the second without buffer and err_sink 0 where both are one file */
    int err_sink;
    struct input input;
    char *log_buffer;           /* STREAM_BUFFER, for the marked lines of one write */
    pid_t *foreign;             /* children that we had before: reaped, never touched */
    uint32_t foreign_count;
    struct guard guard;
    struct cgroup cgroup;
};

/* sys/fd.c */
int fd_close(int fd);
int fd_above_stdio(int fd);
int fd_new(int fd);
int fd_duplicate(int fd);
int fd_reopen(int fd, int mode);
int fd_pipe(int ret_fds[2], int nonblocking_end);
ssize_t fd_write(int fd, const void *bytes, size_t size);
int fd_watch(const struct ir_group *g, int fd, uint32_t events, enum watch kind, uint32_t index);
void fd_rewatch(const struct ir_group *g, int fd, uint32_t events, enum watch kind, uint32_t index);
void fd_unwatch(const struct ir_group *g, int fd);
int fd_release(const struct ir_group *g, int fd);
int64_t clock_ns(void);
uint64_t clock_ticks(void);
void timer_set(const struct ir_group *g, int64_t delay_ms);

/* sys/events.c */
int events_open(struct ir_group *g, uint32_t n);
int events_take(struct ir_group *g, struct ir_event *ret_events, uint32_t n);
struct ir_event *event_push(struct ir_group *g, int kind, int worker, int pid);
bool event_room(const struct ir_group *g);

/* spawn/arena.c */
int arena_fill(struct ir_group *g, const struct ir_worker *workers, uint32_t n, uint64_t blocked,
               const char *const *guard_argv, int terminal_fd);
void *arena_stack(const struct ir_group *g, uint32_t index);
int arena_share(struct ir_group *g);
void arena_free(struct ir_group *g);

/* sys/pidfd.c */
int pidfd_open_of(const struct ir_group *g, pid_t pid);
int child_wait(int type, pid_t pid, siginfo_t *ret_info, int options, struct rusage *ret_usage);
int child_reap(const struct ir_group *g, pid_t pid, int pidfd, siginfo_t *ret_info, int options,
               struct rusage *ret_usage);
bool child_is_ours(const struct ir_group *g, pid_t pid, int pidfd);
int child_signal(const struct ir_group *g, pid_t pid, int pidfd, int sig);
bool child_signal_group(const struct ir_group *g, pid_t pid, int pidfd, bool reaped, int sig);

/* spawn/clone.c */
pid_t child_create(struct ir_group *g, struct slot *slot, uint32_t index, int *ret_pidfd);

/* children/guard.c */
int guard_open(struct ir_group *g);
const char *const *guard_argv(struct ir_group *g);
void guard_start(struct ir_group *g);
void guard_tell(const struct ir_group *g, pid_t worker);
void guard_note(struct ir_group *g);
void guard_gone(struct ir_group *g);
void guard_reaped(struct ir_group *g);
void guard_dismiss(struct ir_group *g);
void guard_stop(struct ir_group *g);
void guard_close(struct ir_group *g);

/* spawn/cgroup.c */
int cgroup_open(struct ir_group *g, uint32_t n);
int cgroup_leaf(const struct ir_group *g, uint32_t index);
void cgroup_kill(const struct ir_group *g);
void cgroup_mark(const struct ir_group *g, struct processes *all);
void cgroup_close(struct ir_group *g);

/* children/reap.c */
void worker_exited_wait(struct ir_group *g, uint32_t index);
void wait_exits(struct ir_group *g);
void wait_execs(struct ir_group *g);
void wait_any(struct ir_group *g);
bool wait_has_children(struct ir_group *g);
int waiter_start(struct ir_group *g, uint32_t index);
void waiter_ready(struct ir_group *g);

/* group/stop_state.c */
void state_cause(struct ir_group *g, enum cause cause);
void state_check(struct ir_group *g);

/* teardown/fork_chase.c */
enum chased { CHASED_GONE, CHASED_OTHER, CHASED_KILLED };
pid_t chase_begin(void);
bool chase(pid_t last, enum chased (*kill_ours)(pid_t, void *), void *with);

/* sys/procfs.c */
ssize_t process_file(const char *path, char *buffer, size_t size);
bool process_lines(const char *path, void (*take)(const char *line, void *with), void *with);
bool process_read(pid_t pid, struct process *ret);
bool processes_add(struct processes *all, const struct process *process);
int processes_scan(struct processes *all, void (*seen)(struct process *, void *), void *with);
void processes_spread(const struct processes *all);
struct process *process_find(const struct processes *all, pid_t pid);
void process_describe(pid_t pid, char *ret_state, char ret_name[16]);
bool process_sees_itself(pid_t self);
bool process_is_ending(pid_t pid, int sig);
enum mark { MARK_NONE, MARK_FOUND, MARK_UNKNOWN /* in the middle of an execve */ };
enum mark process_mark(pid_t pid, const char *mark);
enum mark process_mark_after_exec(pid_t pid, const char *mark); /* MARK_UNKNOWN: not within 0.1 s */
int process_open(pid_t pid);
bool process_signal(const struct process *process, int pidfd, int sig);

/* teardown/leftovers.c */
int stray_foreign(struct ir_group *g);
void stray_forget(struct ir_group *g, pid_t pid);
void stray_gone(struct ir_group *g, int fd);
void stray_close(struct ir_group *g);
uint32_t stray_count(struct ir_group *g);
uint32_t stray_signal(struct ir_group *g, int sig, bool tell, bool hunts);
void stray_signal_groups(struct ir_group *g, int sig);
void stray_name_stuck(struct ir_group *g);

/* group/signals.c */
int signal_open(struct ir_group *g);
void signal_ready(struct ir_group *g);

/* children/signal_send.c */
int group_signal_leaders(struct ir_group *g, int sig);
void group_signal_groups(struct ir_group *g, int sig);

/* children/terminal.c */
int tty_prepare(struct ir_group *g);
bool tty_is_ours(const struct ir_group *g);
void tty_hand_over(struct ir_group *g);
void tty_restore(struct ir_group *g);
void tty_suspend(struct ir_group *g);
void tty_asked(struct ir_group *g);
void tty_check_stopped(struct ir_group *g);

/* io/output_pump.c */
void pump_ready(struct ir_group *g, uint32_t index, int which);
void pump_drain(struct ir_group *g, uint32_t index);
void pump_pass_rest(struct ir_group *g, uint32_t index, int which);
void pump_resume(struct ir_group *g);
void pump_close(struct ir_group *g);
bool pump_idle(const struct ir_group *g);

/* io/line_rests.c */
int rest_open(struct ir_group *g, const struct ir_worker *workers, uint32_t n);
void rest_note(struct ir_group *g, struct stream *s);
void rest_ready(struct ir_group *g, void (*pass)(struct ir_group *g, uint32_t index, int which));

/* io/sd_notify.c */
int notify_open(struct ir_group *g, const struct ir_worker *workers, uint32_t n);
void notify_ready(struct ir_group *g, uint32_t index);
void notify_drain(struct ir_group *g, uint32_t index);
void notify_close(struct ir_group *g, uint32_t index);

/* io/console_sink.c */
int sink_open(struct ir_group *g);
struct sink *sink_of(struct ir_group *g, int which);
bool sink_has_room(struct ir_group *g, struct sink *s, uint32_t wanted);
void sink_begin(struct sink *s, const struct stream *stream);
void sink_put(struct sink *s, const char *bytes, uint32_t size);
void sink_flush(struct ir_group *g, struct sink *s);
void sink_flush_all(struct ir_group *g);
bool sink_finish_all(struct ir_group *g);
void sink_close(struct ir_group *g);

/* io/stdin_fanout.c */
int input_open(struct ir_group *g, const int *fds, uint32_t n);
void input_source_ready(struct ir_group *g);
void input_target_ready(struct ir_group *g, uint32_t index);
void input_resume(struct ir_group *g);
void input_close(struct ir_group *g);

#endif
