/* children/children.h: the workers and the guard, from the exec to the end */
#ifndef CHILDREN_CHILDREN_H
#define CHILDREN_CHILDREN_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <termios.h>

#include "guard/arguments.h"
#include "io/io.h"
#include "sys/lease.h"

struct ir_group;

/* ---- a worker */
struct worker {
    pid_t pid;       /* 0: never started */
    pid_t forked;    /* > 0: it is there already, the caller's fork */
    int pidfd;       /* stays open after the reaping: it still names the process group */
    int log_fd;
    int error_log_fd; /* stderr's own; -1: it goes to log_fd, marked */
    int child_ends[3]; /* of its pipes, until it has them */
    bool held;       /* it has not started, and may yet; or it restarts */
    bool reaped;
    bool failed;     /* it did not end with 0 */
    bool unreaped;   /* it exited, and keeps the number of its process group until all have (groups_release) */
    bool stop_sent;  /* the core's stop signal */
    int part_signal; /* the last one that it got with its part; 0: none */
    uint32_t target; /* its place among those of input, from 1; 0: it has none */
    int failed_step; /* between clone and exec; 0: it did exec */
    int failed_errno;
    bool log_lost;   /* told once */
    int log_open;    /* stream whose unended line is the log's last, or -1 */
    struct stream streams[2];
    int wrote;       /* the stream that it wrote to last */
    char *tail;      /* TAIL_BUFFER, a ring of stderr; NULL: not piped */
    uint64_t tail_count;
    int notify_fd;   /* -1: none, or closed at its end */
    int drop_fd;     /* readable when a message with descriptors is gone; -1: none is in progress */
    bool sent_rights; /* messages of it had descriptors: they may still be in the queue */
    bool rights_stuck; /* the core could not take such a message, which waits for the next one */
    bool ready;      /* it said READY=1 */
    bool triggered;  /* it said WATCHDOG=trigger, and no WATCHDOG=1 since */
    int64_t active_ns, ping_ns; /* struct ir_activity */
    int64_t progress;   /* its highest PROGRESS=; -1: there was none */
    struct ir_event *progress_event; /* that nobody has taken yet; NULL: none */
    char *status;    /* STATUS_SIZE, once there was one */
    uint32_t status_size;
    pid_t asks;        /* > 0: this process group is stopped until it gets the terminal */
    bool asks_to_read; /* and not to change its modes */
    bool has_asked, was_refused; /* reported */
};

/* ---- terminal*.c: who has the foreground */
struct terminal {
    int fd;                /* -1: there is none, or nobody needed it so far */
    int timer_fd;          /* of the loan; -1: there was none */
    int typed_fd;          /* sends SIGIO during the loan */
    bool has_owner;        /* worker 0 has it whenever the core has it to give */
    bool lent;             /* to one that asked for it */
    bool probed;           /* the core just took it back: a line that comes now may be the holder's */
    pid_t holder;          /* the process group that has it; 0: none */
    uint32_t holder_index; /* of its worker */
    struct termios modes;  /* when the holder got it */
    bool has_modes;
    int64_t look_ms;       /* until a look whether it is still used */
    int64_t suspended_ns;  /* time of the request for a suspension, which perhaps came to nothing; 0: it came */
    pid_t last_group;      /* who had the loan before */
    bool others_stopped;   /* of the launcher's process group, for the terminal, during the loan */
};

/* ---- guard.c: the process that ends what survives a SIGKILL of the launcher */
struct guard {
    char *program, *folder; /* NULL: none */
    char parent[16], session[16], since[24], wait[16]; /* its arguments, as words */
    const char *argv[GUARD_ARGC + 1];
    pid_t pid;              /* 0: none runs */
    int pidfd;
    int folder_fd;          /* locked while the launcher lives: a folder that nobody holds may be removed */
    int pipe[2];            /* the workers' numbers, which it reads after the launcher's death */
    bool locked;            /* the pipe: until the launcher dies, or executes another program */
    int step, error;        /* between clone and exec */
    bool dismissed;         /* killed by the core */
};

/* ---- lease.c: how long the workers may live without a renewal */
struct lease {
    int64_t *deadline_ns; /* sys/lease.h; NULL: there is none */
    int fd;               /* its memory, and */
    int pipe[2];          /* what the guard says of it; [1] and fd are the core's until the guard has them */
    char last_word[LEASE_WORD_MOST]; /* that the caller has given */
    bool held;            /* the guard watches over it */
    bool ended;           /* and the guard killed the workers; reported once */
    void (*on_end)(struct ir_group *); /* kills them: of group/, which stands above */
};

/* lease.c */
int lease_open(struct ir_group *g, void (*on_end)(struct ir_group *));
int lease_await_guard(struct ir_group *g);
void lease_ready(struct ir_group *g);
void lease_check(struct ir_group *g);
void lease_guard_lost(struct ir_group *g, int error);
void lease_close(struct ir_group *g);

/* reap.c */
void worker_reap(struct ir_group *g, uint32_t index, int options);
void worker_exited_wait(struct ir_group *g, uint32_t index);
void wait_exits(struct ir_group *g);
void wait_execs(struct ir_group *g);
void wait_any(struct ir_group *g);
bool wait_has_children(struct ir_group *g);

/* reap_threads.c */
int waiter_start(struct ir_group *g, uint32_t index);
void waiter_ready(struct ir_group *g);
void waiter_close(struct ir_group *g, bool forked);

/* signal_send.c */
int group_signal_leaders(struct ir_group *g, int sig);
void group_signal_groups(struct ir_group *g, int sig);
bool worker_signal_group(const struct ir_group *g, const struct worker *w, int sig);
void group_continue(struct ir_group *g);

/* terminal.c */
int tty_prepare(struct ir_group *g);
int tty_open(void);
void tty_owner_started(struct ir_group *g, pid_t pid);
bool tty_is_ours(const struct ir_group *g);
bool tty_is_held(const struct ir_group *g);
bool tty_give(struct ir_group *g, uint32_t index, pid_t group);
void tty_restore(struct ir_group *g);
bool tty_has_modes_of(const struct ir_group *g, const struct termios *given);

/* terminal_loan.c */
bool tty_asked_for(struct ir_group *g, uint32_t index, pid_t pid, int sig);
void tty_clear_asks(struct ir_group *g);
void tty_refuse_asks(struct ir_group *g);
void tty_loan_ended(struct ir_group *g);
bool tty_loan_due(struct ir_group *g);
void tty_typed(struct ir_group *g);

/* terminal_suspend.c */
void tty_hand_over(struct ir_group *g);
void tty_suspend(struct ir_group *g, bool whole_group);
void tty_asked(struct ir_group *g);
void tty_check_stopped(struct ir_group *g);
bool tty_worker_ended(struct ir_group *g, uint32_t index, bool by_signal);

/* guard.c */
int guard_open(struct ir_group *g);
const char *const *guard_argv(struct ir_group *g);
void guard_start(struct ir_group *g);
void guard_add_worker(const struct ir_group *g, pid_t worker);
void guard_drop_worker(const struct ir_group *g, const struct worker *w);
void guard_note(struct ir_group *g);
int guard_failure(struct ir_group *g);
void guard_gone(struct ir_group *g);
void guard_reaped(struct ir_group *g);
void guard_dismiss(struct ir_group *g);
void guard_stop(struct ir_group *g);
void guard_close(struct ir_group *g);

#endif
