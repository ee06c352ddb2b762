/* include/irun.h: the public face of the core, and the single source of the cffi definition.
 *
 * A group is the live workers of one node. The caller spawns it once, watches it with wait and
 * step, stops it in stages, and frees it. The core never prints, never exits the process, and has
 * no global state.
 *
 * Every function that can fail returns a negative errno. Times are nanoseconds of CLOCK_MONOTONIC.
 * Sets of signals are 64-bit masks: bit n-1 is signal n.
 *
 * Several threads may use a group if the caller serializes all calls but ir_group_wait, which
 * may block in one thread (or several) while another calls the rest. */
#ifndef IRUN_H
#define IRUN_H

#include <stdint.h>

/* [cffi] */

/* The state of the process at its start; ir_entry_take_over fills it. */
struct ir_entry {
    uint64_t ignored;     /* signals ignored at the start */
    uint64_t nofile_soft; /* RLIMIT_NOFILE, which workers get back */
    uint64_t nofile_hard;
    int32_t inherited_end; /* descriptors above 2 that others left open are below this one; 0: unknown */
};

enum { /* ir_config.flags */
    IR_OWN_PROCESS = 1, /* the core has the whole process: take signals, adopt and reap orphans */
    IR_USE_FORK = 2,    /* plain fork instead of clone(CLONE_VM) */
    IR_NO_PIDFD = 4,    /* behave as on a kernel without pidfds (before 5.3) */
    IR_NO_CGROUP = 8,   /* no separate cgroup, even with the permission */
    IR_GIVEN_MASK = 16, /* workers get `blocked` as their signal mask; an own process always does that */
    IR_LAST = 32,       /* the own process ends with this group: as process 1 it may end all others with kill(-1) */
    IR_REPORT_TSTP = 128, /* Ctrl-Z: IR_SUSPEND; the caller calls ir_group_suspend. Without it the core does */
    IR_NO_CHILDREN = 256, /* no list of a process's children in /proc, as without CONFIG_PROC_CHILDREN */
    IR_SHARES_TERMINAL = 512, /* a worker that reads the terminal of this process, or changes its modes, gets it for that */
    IR_STAYS = 2048,    /* the group does not end without a stop: all of its workers may restart */
    IR_TIMESTAMPS = 1024, /* the time before each line on the console that is no IR_UNLABELLED one */
    IR_OLD_PIDFD = 64,  /* pidfds as in Linux 5.3: no waiting by them (5.4), no signal to a process group (6.9) */
};

enum { IR_CONSOLE_WAIT_MS = 1000 }; /* after a stop by signal: the longest wait for a reader that does not read */

enum { IR_SCOPE_GROUP = 0, IR_SCOPE_LEADER = 1, IR_SCOPE_MIXED = 2 }; /* ir_config.stop_scope */

/* The meaning of a signal to an own process. One list for the core and for a head of many nodes,
 * which is a Python process. Both drop signals ignored at entry, whatever they mean. */
enum {
    IR_SIGNAL_FORWARD,          /* to each worker's leader: a trainer asked for it, its helpers would die of it */
    IR_SIGNAL_FORWARD_TO_GROUP, /* what a terminal sends to a whole job */
    IR_SIGNAL_STOPS,            /* ends the job: a request, or a fault signal from outside */
    IR_SIGNAL_SUSPENDS,
    IR_SIGNAL_REAPS,
    IR_SIGNAL_DROPPED, /* the kernel's answer to something that the launcher did */
};

int ir_signal_meaning(int sig);

struct ir_config {
    const char *mark;         /* "NAME=value", in every worker's environment: finds leftover processes; "": none,
                               * and a library finds only what stayed in its workers' process groups */
    uint64_t blocked;         /* IR_OWN_PROCESS, IR_GIVEN_MASK: the signal mask that workers get */
    struct ir_entry entry;    /* own process: from ir_entry_take_over */
    int64_t grace_ms;         /* from the stop signal to SIGKILL; 0: SIGKILL at once */
    int64_t signal_grace_ms;  /* the same for a stop that a signal from outside began */
    int32_t stop_signal;
    int32_t stop_scope;
    int32_t console_fd[2];    /* the targets of labeled stdout and stderr; -1: nowhere */
    int32_t message_fd;       /* where ir_group_print goes without a labeled stderr; -1: nowhere */
    int32_t stdin_fd;         /* copied to every worker whose stdio[0] is IR_FD_PIPE; -1: none */
    const char *guard;        /* the executable irun-guard: ends what survives a SIGKILL of this process;
                               * or NULL */
    const char *folder;       /* what it removes then, with the files in it; or NULL */
    const char *control;      /* the path of the control socket, which the core makes and removes; or NULL */
    int32_t control_fd;       /* a socket that listens there already, and stays the caller's; -1: none */
    const char *about;        /* the first bytes for whoever connects there; or NULL */
    uint32_t about_size;
    int64_t guard_wait_ms;    /* > 0: the guard waits this long for each worker's end, then sends SIGKILL to it
                               * alone, as srun needs it (guard/main.c); needs `guard` */
    int64_t lease_ms;         /* > 0: the guard kills the workers and all that they started after this long without
                               * ir_group_renew_lease, even if this process is suspended; needs `guard` */
    int64_t lease_since_ns;   /* of CLOCK_BOOTTIME: when the first lease began; 0: with the spawn */
    const char *last_word;    /* with a lease: what the guard sends to the peer of link_fd, over a connection of its
                               * own, after the launcher's death and that of all that it started; or NULL */
    uint32_t last_word_size;
    int32_t link_fd;          /* a connected TCP socket; read at the spawn only */
    int32_t suspend_write_fd; /* process 1, which cannot stop: a byte to who stops it instead; -1 */
    int32_t suspend_read_fd;  /* the other end, which stays the caller's, outside; -1 */
    const char *fold_label[2][2]; /* before and after the numbers of workers that wrote a line of stdout, and of stderr,
                               * alike: the core shows such lines once; or NULL */
    uint32_t first_rank;      /* the offset of a worker's number there */
    uint32_t flags;
};

enum { IR_FD_INHERIT = -1, IR_FD_PIPE = -2 }; /* ir_worker.stdio, instead of a descriptor */

enum { /* ir_worker.output */
    IR_TO_CONSOLE = 1,
    IR_TO_LOG = 2,
    IR_UNLABELLED = 4, /* lines go to the console without the label; one without end after 0.2 s */
};

enum { /* ir_worker.flags */
    IR_WORKER_FOREGROUND = 1, /* gets the terminal, if the launcher has it to give */
    IR_WORKER_ISOLATE = 2,    /* process 1 of a new PID namespace with its own /proc */
    IR_WORKER_DIES_WITH_US = 4, /* SIGKILL when the spawning thread ends: not from short-lived threads */
    IR_WORKER_HELD = 8, /* starts with ir_group_start_held; not with a pid */
};

/* One process of the plan. ir_group_spawn copies all strings. */
struct ir_worker {
    const char *program;         /* the file to execute; no search */
    const char *const *argv;     /* NULL-ended */
    const char *const *base_env; /* NULL-ended; the same array for every worker */
    const char *env;             /* "NAME=value" strings one after the other, each NUL-ended */
    const char *cwd;             /* NULL: the launcher's */
    const char *label[2];        /* put before each line of stdout and stderr on the console; NULL: nothing */
    const char *label_more[2];   /* the same, before the further pieces of an overlong line */
    const char *notify;          /* its NOTIFY_SOCKET: a path, or an abstract address "@..."; NULL: none */
    const char *heading;         /* ir_group_part_start: for its log, once it has started; NULL: none */
    const uint64_t *cpus;        /* its CPUs: bit n is CPU n; NULL: the launcher's */
    const uint64_t *nodes;       /* the NUMA nodes of its memory; NULL: the launcher's */
    uint32_t cpu_words;          /* how many words in cpus, and in nodes */
    uint32_t node_words;
    uint32_t env_count;          /* how many strings in env */
    uint32_t flags;
    int32_t pid;                 /* > 0: a child that the caller has forked, in place of a new process; it waits
                                  * for its word, and makes itself what is said here */
    int32_t stdio[3];            /* a descriptor above 2, IR_FD_INHERIT or IR_FD_PIPE; of a forked child
                                  * IR_FD_INHERIT, or the core's end of its pipe, which does not block */
    int32_t output[2];           /* where piped stdout and stderr go: IR_TO_CONSOLE | IR_TO_LOG | IR_UNLABELLED */
    int32_t log_fd;              /* -1: none; stays the caller's, until IR_ENDED */
    int32_t error_log_fd;        /* of stderr alone, unmarked; -1: it goes to log_fd, marked */
};

enum { /* ir_failure.step: what failed */
    IR_STEP_MEMORY = 1, IR_STEP_DESCRIPTORS, IR_STEP_CLONE, IR_STEP_GROUP, IR_STEP_PARENT,
    IR_STEP_USER_NAMESPACE, IR_STEP_PROC, IR_STEP_CWD, IR_STEP_STDIO, IR_STEP_TERMINAL,
    IR_STEP_LIMIT, IR_STEP_SIGNALS, IR_STEP_EXEC, IR_STEP_NOTIFY, IR_STEP_AFFINITY, IR_STEP_LEASE,
};

struct ir_failure {
    int32_t worker;
    int32_t step;
    int32_t error; /* positive errno */
};

enum { /* ir_event.kind */
    IR_STARTED = 1,   /* worker, pid */
    IR_EXITED,        /* worker, pid, code or signal, flags, usage; value: the grace in ms after which the core's
                       * SIGKILL ended it; 0: that did not */
    IR_START_FAILED,  /* worker, pid, code: the step, signal: the errno; its IR_EXITED follows */
    IR_SIGNALLED,     /* signal: from outside, it stops the group (again: it kills it); code 1: a terminal's */
    IR_FORWARDED,     /* signal: from outside, passed on to the workers */
    IR_LEFTOVER,      /* pid, name: a descendant that outlived the workers and gets a stop; a few have an event,
                       * and IR_ENDED has the count of all. Where /proc does not show it, the name is "?"; or
                       * "process group", and pid the number of that */
    IR_STUCK,         /* pid, name, code: state letter ('?': unknown); SIGKILL did not end it: given up. pid 0: an
                       * unknown child */
    IR_OUTPUT_LOST,   /* worker (-1: console), code: stream, signal: the errno; told once */
    IR_OUTPUT_HELD,   /* worker, code: stream; still open in a process that this user may not end */
    IR_CONSOLE_STUCK, /* nobody reads the console; the last output waits for its reader */
    IR_UNGUARDED,     /* code: the step, signal: the errno; no guard started, or (0) it died */
    IR_UNSEEN,        /* code, signal: the errno (ENOENT: without /proc, EXDEV: another PID namespace's); once.
                       * code 0: the guard sees workers' process groups alone; 1: so does the core, where it adopts
                       * no orphans */
    IR_READY,         /* worker, pid: it said READY=1; once */
    IR_TRIGGERED,     /* worker, pid: it said WATCHDOG=trigger; again only after a WATCHDOG=1 */
    IR_UNPLACED,      /* worker, signal: the errno; the kernel takes no memory policy: CPUs alone; told once */
    IR_SUSPEND,       /* Ctrl-Z, with IR_REPORT_TSTP */
    IR_LEASE_ENDED,   /* the workers are dead; code: 0: no renewal came in time; 1: its guard died */
    IR_ASKS_TERMINAL, /* worker, pid: it reads the terminal, or changes its modes; once. code 0: it gets it; 1: it
                       * stays stopped, for the launcher has no terminal to give */
    IR_PROGRESS,      /* worker, pid, value: its PROGRESS= is higher than ever; the highest since the last was taken,
                       * and when it came */
    IR_CLIENT,        /* who has connected to the control socket has sent something: ir_group_next_client */
    IR_ENDED,         /* code: the number of leftover processes in all; nothing is left; the last event */
};

enum { /* ir_event.flags of IR_EXITED */
    IR_DUMPED_CORE = 1,
    IR_AFTER_STOP = 2,  /* seen after the core's stop signal: never the first failure */
    IR_HAD_TERMINAL = 8, /* it had the foreground: a key reached it alone */
    IR_STATUS_LOST = 4, /* somebody else reaped it; code and signal are unknown */
};

struct ir_event {
    int32_t kind;
    int32_t worker;
    int32_t pid;
    int32_t code;
    int32_t signal;
    uint32_t flags;
    int64_t time_ns;
    int64_t user_us;
    int64_t system_us;
    int64_t max_rss_kib;
    int64_t value;
    char name[16];
};

enum ir_worker_state { /* in the frame of counts at the control socket, a 32-bit number of each in network order;
                        * behind them the highest PROGRESS= of a worker, 64 bits, -1: there was none */
    IR_WORKER_WAITING, IR_WORKER_RUNNING, IR_WORKER_READY, IR_WORKER_DONE, IR_WORKER_FAILED, IR_WORKER_STATES,
};

/* The last sign of life of a worker (0: never), and how many bytes it wrote to the core. */
struct ir_activity {
    int64_t active_ns; /* output to the core, or a message on its NOTIFY_SOCKET */
    int64_t ping_ns; /* WATCHDOG=1 */
    uint64_t bytes[2]; /* of stdout and stderr, where they are pipes */
};

struct ir_group;

/* Own process: takes the process over, once, before anything else opens. Closed descriptors 0-2
 * become /dev/null, and SIGCHLD becomes default. The soft descriptor limit rises to the hard
 * one, and this process adopts orphans (PR_SET_CHILD_SUBREAPER, Linux 3.4). The caller has
 * already blocked all signals. Returns 0, or -errno without /dev/null. */
int ir_entry_take_over(struct ir_entry *ret_entry);

/* Own process: after the spawn, goes to / and closes what the user's shell left open above 2, so
 * that a mere supervisor pins nothing. The core's own descriptors are all close-on-exec.
 * `inherited_end` is that of the entry; 0: unknown. Returns how many descriptors it closed. */
int ir_entry_release_descriptors(int32_t inherited_end);

/* Own process, at its very end: ends it by that signal, without a core dump. With `whole_group`
 * it ends the whole process group: the terminal's key reached a worker alone. Returns where the
 * kernel does not let it: process 1 of a PID namespace. */
void ir_entry_end_by(int sig, int whole_group);

/* Makes a group for `n` workers. -EINVAL: an invalid config; -EMFILE, -ENOMEM. */
int ir_group_new(const struct ir_config *config, uint32_t n, struct ir_group **ret_group);

/* Starts the workers, in order, once. Returns how many started: fewer than `n` if a signal that
 * stops the group came meanwhile. Returns -errno with `ret_failure` filled if one could not
 * start: those before it run, and the caller stops the group. A worker that fails between clone
 * and exec is an event, IR_START_FAILED. */
int ir_group_spawn(struct ir_group *group, const struct ir_worker *workers, uint32_t n,
                   struct ir_failure *ret_failure);

/* Starts held workers, by their indexes; others, and those that started, are skipped. Until the
 * last one has started, the group does not end without a stop. Returns as ir_group_spawn: 0
 * after a stop. */
int ir_group_start_held(struct ir_group *group, const uint32_t *workers, uint32_t n,
                        struct ir_failure *ret_failure);

/* A part of the workers, by their indexes: all of them end and restart while the others run on.
 *
 * Sends a signal to what lives of them: to their process groups, or with `leaders` to the workers
 * alone. From now on their end is IR_AFTER_STOP, and the group does not end without a stop until
 * they have restarted. A stop of the group does not send them this signal once more. Returns
 * how many have not ended; 0 after a stop of the group. */
int ir_group_part_signal(struct ir_group *group, const uint32_t *workers, uint32_t n, int sig,
                         int leaders);

/* Once all of them have ended: sends a signal (0: none) to processes that they have left. These
 * are in their process groups and cgroups, or have the mark of the group and `mark`, another
 * "NAME=value" of the part, in their environment. Returns how many there are; the group becomes
 * ready when one has ended. */
int ir_group_part_leftovers(struct ir_group *group, const uint32_t *workers, uint32_t n,
                            const char *mark, int sig);

/* Starts them again, or held ones for the first time: all `n` workers of the group are described
 * as to ir_group_spawn, and the `m` of `which` start, in that order. Their streams and labels stay as
 * they were. The log of each one that has started gets its heading before its first output.
 * -EBUSY: one of them lives; -EAGAIN: the console has not taken the output of their last run; else
 * as ir_group_start_held. */
int ir_group_part_start(struct ir_group *group, const struct ir_worker *workers, uint32_t n,
                        const uint32_t *which, uint32_t m, struct ir_failure *ret_failure);

/* Blocks until ir_group_run_once has something to do, or for `timeout_ms` (-1: for ever). Step
 * first: a queued event does not make it ready. Touches nothing but one descriptor. Returns 1
 * when something is ready, 0 when time is up, or -EINTR. */
int ir_group_wait(const struct ir_group *group, int timeout_ms);

/* Does what is due, without blocking: moves output, reaps, runs the stop's timetable. Fills at
 * most `n` events (at least 64 of room) and returns how many. */
int ir_group_run_once(struct ir_group *group, struct ir_event *ret_events, uint32_t n);

/* Sends a signal to one worker's leader (`worker` >= 0) or to every worker's (-1). 0 is allowed.
 * Returns how many got it; -ESRCH: that worker is gone; -EINVAL: no such worker or signal. */
int ir_group_signal(struct ir_group *group, int worker, int sig);

/* Begins to stop: sends `sig` (0: the configured stop signal) by the stop scope, and starts the
 * grace. That is signal_grace_ms with `by_signal` (a signal from outside asked for the stop),
 * else grace_ms. Does nothing the second time, or after the end. */
void ir_group_stop(struct ir_group *group, int sig, int by_signal);

/* Drops the grace: SIGKILL to everything that lives. Does nothing after the end. */
void ir_group_kill(struct ir_group *group);

/* Renews the lease: it ends lease_ms after `since_ns` (CLOCK_BOOTTIME; 0: now), and never
 * earlier than before. A store to memory, no system call. -ETIME: it has run out for good, and
 * the workers are dead. -EINVAL: the group has no lease, or no workers yet. */
int ir_group_renew_lease(struct ir_group *group, int64_t since_ns);

/* Sends a signal to every worker's process group, also to the rest of one whose leader is gone. */
void ir_group_signal_groups(struct ir_group *group, int sig);

/* Stops the workers and this process, as Ctrl-Z does; returns after SIGCONT. */
void ir_group_suspend(struct ir_group *group);

/* Copies the last bytes that a piped worker wrote to stderr, at most `size`; returns how many. */
int ir_group_tail(const struct ir_group *group, int worker, char *ret_bytes, uint32_t size);

/* Copies a piped worker's last line, on either stream: an unended one too, and of bytes that
 * wait for a full console the end. Copies at most its last `size` bytes; returns how many. */
int ir_group_line(const struct ir_group *group, int worker, char *ret_bytes, uint32_t size);

/* Copies the worker's last STATUS=, unchanged, at most `size`; returns how many bytes. */
int ir_group_status(const struct ir_group *group, int worker, char *ret_bytes, uint32_t size);

/* Fills in a worker's last sign of life. One whose output waits for a full console is not
 * silent. */
int ir_group_activity(const struct ir_group *group, int worker, struct ir_activity *ret_activity);

/* The descriptor that ir_group_wait waits for; the caller may wait for it together with others. */
int ir_group_fd(const struct ir_group *group);

/* Own process: a child that the caller started and ends itself. It is never a leftover process.
 * 0: no more. */
int ir_group_spare(struct ir_group *group, int pid, int spared);

/* The next connection to the control socket that has asked something: from now on the caller's, not blocking.
 * -EAGAIN: there is none. */
int ir_group_next_client(struct ir_group *group);

/* From now on what the workers write goes to `fd`, too, as far as it goes through the core. `fd` is a socket that
 * does not block, and becomes the core's. `wanted` has a byte for each worker; NULL: all. `first` is sent before.
 * Then frames follow (kind, 32-bit length, payload): 'o' has the rank (32 bits), the stream (8 bits), and bytes of
 * it; 'l' how many lines were dropped here for want of room (64 bits); 'e' is the last one, after the workers'
 * end. -EMFILE: too many; -ENOMEM; -ESRCH: nothing is left. */
int ir_group_add_follower(struct ir_group *group, int fd, const uint8_t *wanted, const char *first,
                    uint32_t first_size);

/* Puts whole lines of infini-run on the labeled console, between the workers' lines, or on
 * message_fd, and never blocks. Returns 0, also without a console; -EAGAIN: nobody reads it, and
 * no room for more such lines: dropped. */
int ir_group_print(struct ir_group *group, int stream, const char *lines, uint32_t size);

/* Any process: SIGPIPE does not reach the calling thread until the release. That takes one that
 * came meanwhile, but not one that was pending before. `*held` is 0 at first; a release without
 * a hold does nothing. */
void ir_sigpipe_hold(int *ret_held);
void ir_sigpipe_release(int *held);

/* Any process: write(2) that raises no SIGPIPE. Returns how many bytes it wrote; -errno: -EPIPE,
 * -EAGAIN, -EINTR. */
int64_t ir_write(int fd, const char *bytes, uint64_t size);

/* Kills and reaps what lives, as ir_group_free does, but frees nothing: every ir_group_wait, now
 * and later, returns at once. For a group that another thread waits for. */
void ir_group_end(struct ir_group *group);

/* Kills and reaps what lives (at most 5 s for what SIGKILL does not end), frees, sets *group
 * to NULL. In a child of a later fork, it only closes descriptors. A child that a signal's
 * handler forks may come to a call with the NULL. To every call, it is a group without
 * processes. */
void ir_group_free(struct ir_group **group);

struct ir_writer;

/* Makes a way to write to `fd` that never blocks; `fd` stays the caller's, unchanged. A pipe or
 * a terminal opens anew, a socket gets a flag with each send, a separate thread writes where the
 * kernel refuses that. Writes to regular files are plain. -EBADF; -EMFILE, -ENOMEM, -EAGAIN: no
 * thread. */
int ir_writer_new(int fd, struct ir_writer **ret_writer);

/* How many bytes it took; -EAGAIN: none, ir_writer_fd polls writable when there is room; -EPIPE and the
 * like: it takes no more. Raises no SIGPIPE. */
int64_t ir_writer_write(const struct ir_writer *writer, const char *bytes, uint32_t size);

/* The descriptor to poll; -1: a file, which always has room. */
int ir_writer_fd(const struct ir_writer *writer);

/* Ends the writing. 0 when its thread, if there is one, has written all; -EAGAIN: not yet,
 * ir_writer_fd polls readable then; or the error of its last write. */
int ir_writer_finish(struct ir_writer *writer);

/* Returns NULL. A thread that a reader holds up stays until that has read, or the process ends. */
struct ir_writer *ir_writer_free(struct ir_writer *writer);

/* Lines that several ranks write alike, and that the core shows once. Pure: no descriptor, no
 * clock. */
struct ir_fold;

enum {
    IR_FOLD_MS = 100,    /* how long a line waits for ranks that write the same */
    IR_FOLD_LINE = 8192, /* the longest one that folds */
    IR_FOLD_RANKS = 256, /* of the text for the ranks that have written it */
};

struct ir_folded {
    const char *line; /* until the next ir_fold_add or ir_fold_free */
    uint32_t size;
    int32_t stream;
    uint32_t count;   /* of ranks */
    uint32_t rank;    /* the lowest of them */
    int64_t time_ns;  /* when the first of them wrote it */
};

/* For ranks 0 to n-1, of which `expected` write to stdout, and to stderr, where these go there: a
 * line that `expected` ranks have written waits no longer. -EINVAL: no ranks, or too many; -ENOMEM. */
int ir_fold_new(uint32_t n, const uint32_t *expected, struct ir_fold **ret_fold);

/* Holds a copy of a line that came at `now_ns`. -ENOSPC: take the first line out, and try again. -EMSGSIZE: longer
 * than IR_FOLD_LINE. -EINVAL: no such rank or stream, or no bytes. */
int ir_fold_add(struct ir_fold *fold, uint32_t rank, int stream, const char *line, uint32_t size,
                int64_t now_ns);

/* When the first line has waited long enough; INT64_MAX: there is none. */
int64_t ir_fold_due_ns(const struct ir_fold *fold);

/* Fills in the first line. 1; 0: there is none. */
int ir_fold_first(const struct ir_fold *fold, struct ir_folded *ret_line);

/* Writes which ranks have the first line, of which there must be one, with `offset` added: 0-2,5. Returns the size;
 * `ret_text` has room for IR_FOLD_RANKS. */
uint32_t ir_fold_ranks(const struct ir_fold *fold, uint32_t offset, char *ret_text);

/* Takes the first line out. */
void ir_fold_drop(struct ir_fold *fold);

/* Returns NULL. */
struct ir_fold *ir_fold_free(struct ir_fold *fold);

/* [cffi] */

#endif
