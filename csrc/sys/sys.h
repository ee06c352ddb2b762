/* sys/sys.h: descriptors, the clock, pidfds, /proc, the queue of events */
#ifndef SYS_SYS_H
#define SYS_SYS_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "include/irun.h"

struct ir_group;

#define NS_PER_MS 1000000LL
#define BY_PIDFD 3 /* P_PIDFD of waitid(2), Linux 5.4 */
#define LINE_SIZE 1024u /* of a file of /proc, read by lines: drop the rest of a line */

#define SIGNAL_BIT(sig) (UINT64_C(1) << ((sig) - 1))

/* ---- what an epoll event means: kind in the high half, index in the low one */
enum watch {
    WATCH_EXITS, WATCH_OUT, WATCH_ERR, WATCH_SIGNALS, WATCH_TIMER, WATCH_EXECS, WATCH_WAITER,
    WATCH_SINK, WATCH_STRAY, WATCH_SOURCE, WATCH_TARGET, WATCH_GUARD, WATCH_ASKED, WATCH_NOTIFY,
    WATCH_DROPPED, WATCH_RESTS, WATCH_LEASE, WATCH_LOAN,
    WATCH_CONTROL, WATCH_CLIENT, WATCH_FOLD, WATCH_FOLLOWER,
};

/* fd.c */
int fd_close(int fd);
int fd_above_stdio(int fd);
int fd_new(int fd);
void forks_hold(void);
void forks_release(void);
int fd_duplicate(int fd);
int fd_reopen(int fd, int mode);
int fd_pipe(int ret_fds[2], int nonblocking_end);
int fds_each_inherited(void (*each)(int fd, void *with), void *with);
int fds_each_inherited_below(int end, void (*each)(int fd, void *with), void *with);
ssize_t fd_write(int fd, const void *bytes, size_t size);
int fd_watch(const struct ir_group *g, int fd, uint32_t events, enum watch kind, uint32_t index);
void fd_rewatch(const struct ir_group *g, int fd, uint32_t events, enum watch kind, uint32_t index);
void fd_unwatch(const struct ir_group *g, int fd);
int fd_release(const struct ir_group *g, int fd);
int64_t clock_ns(void);
uint64_t clock_ticks(void);
void timer_arm(int fd, int64_t delay_ns);
void timer_set(struct ir_group *g, int64_t delay_ms);
void timer_wake_early(struct ir_group *g);
bool timer_is_due(struct ir_group *g);

/* kernel.c */
bool kernel_is(int major, int minor);

/* thread.c */
bool thread_is_alone(void);
int thread_start(void *(*run)(void *), void *argument);

/* events.c */
int events_open(struct ir_group *g, uint32_t n);
int events_pop(struct ir_group *g, struct ir_event *ret_events, uint32_t n);
struct ir_event *event_push(struct ir_group *g, int kind, int worker, int pid);
bool event_room(const struct ir_group *g);

/* pidfd.c */
int pidfd_send(int pidfd, int sig, unsigned flags);
int pidfd_open_of(const struct ir_group *g, pid_t pid);
int child_wait(int type, pid_t pid, siginfo_t *ret_info, int options, struct rusage *ret_usage);
int child_reap(const struct ir_group *g, pid_t pid, int pidfd, siginfo_t *ret_info, int options,
               struct rusage *ret_usage);
bool child_is_ours(const struct ir_group *g, pid_t pid, int pidfd);
int child_signal(const struct ir_group *g, pid_t pid, int pidfd, int sig);
int child_signal_group(const struct ir_group *g, pid_t pid, int pidfd, bool reaped, int sig);

/* ---- procfs.c: what /proc says of a process */
struct process {
    pid_t pid, parent, group, session;
    uint64_t start_ticks;
    int threads;
    char state;      /* of its first thread */
    bool exiting;    /* that thread */
    bool forked;     /* and since then without an exec */
    bool decided;    /* whether it is a leftover: */
    bool ours;
    char name[16];
};

struct processes {   /* by pid */
    struct process *at;
    size_t n, capacity;
};

ssize_t process_file(const char *path, char *buffer, size_t size);
int process_lines(const char *path, void (*on_line)(const char *line, void *with), void *with);
bool process_read(pid_t pid, struct process *ret);
bool processes_add(struct processes *all, const struct process *process);
int processes_scan(struct processes *all, void (*seen)(struct process *, void *), void *with);
void processes_spread(const struct processes *all);
struct process *process_find(const struct processes *all, pid_t pid);
bool process_has_ended(const struct process *process);
void process_describe(pid_t pid, char *ret_state, char ret_name[16]);
int process_sees_itself(pid_t self);
bool process_is_ending(pid_t pid, int sig);
bool process_is_exiting(pid_t pid);
bool process_is_tracker(pid_t pid);
bool process_starts_tracker(pid_t pid);
enum mark { MARK_NONE, MARK_FOUND, MARK_UNKNOWN /* in the middle of an execve */ };
enum mark process_mark(pid_t pid, const char *mark);
enum mark process_mark_after_exec(pid_t pid, const char *mark); /* MARK_UNKNOWN: not within 0.1 s */
int process_open(pid_t pid);
bool process_send(pid_t pid, int pidfd, int sig);
bool process_signal(const struct process *process, int pidfd, int sig);

#endif
