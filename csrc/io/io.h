/* io/io.h: the workers' pipes, the console, the launcher's stdin, what workers say */
#ifndef IO_IO_H
#define IO_IO_H

#include <stdbool.h>
#include <stdint.h>

#include "include/irun.h"

struct ir_group;

#define STREAM_BUFFER 65536u /* the longest line that passes in one piece */
#define SINK_BUFFER (4u * 65536) /* what the core holds for a slow console; then workers wait */
#define SINK_MARGIN 8192u
#define TAIL_BUFFER 16384u /* last bytes for the report: a stack may follow them */
#define LINE_TIME 40u /* of a line's time */
#define FOLD_LABEL 48u /* before, and after, the numbers of several ranks */
#define STATUS_SIZE 512u /* bytes of a worker's last STATUS= */

/* ---- output_pump.c: a pipe of a worker */
struct stream {
    int fd;          /* -1: closed */
    int to;          /* IR_TO_CONSOLE | IR_TO_LOG */
    bool paused;     /* not watched, with bytes at hand: the console does not take more */
    bool ended;      /* no more will come: an unended last line passes, too */
    bool more;       /* the last piece did not end its line */
    bool plain;      /* its lines go to the console without a label */
    bool due;        /* its rest passes, though it ends no line */
    int64_t held_ns; /* since when there is a rest that ends no line; 0: there is none */
    uint32_t start;  /* buffer[start..end) has not passed yet */
    uint32_t end;
    uint32_t last, last_size; /* the place of the last piece that passed; the next read overwrites it */
    uint64_t bytes;  /* that came in all */
    char *buffer;    /* STREAM_BUFFER; NULL: not piped */
    const char *label, *label_more;
    uint32_t label_size, label_more_size;
};

/* ---- console_sink.c: one console */
struct sink {
    struct ir_writer *writer;
    uint32_t awaited; /* of epoll: room, or the reader took the last of it */
    int which;
    bool broken;     /* EPIPE and the like: the core drops everything more */
    bool open;       /* its last line has no end */
    bool mixed;      /* more than one stream has written to it */
    const struct stream *last; /* whose line it is; NULL: the launcher's, of several, or none */
    struct ir_fold *fold; /* lines that wait for equal ones; NULL: none do */
    uint32_t start, end;
    char *buffer;    /* SINK_BUFFER, and SINK_MARGIN for lines of the launcher; NULL: there is none */
};

/* ---- control.c: who looks for this launch */
#define CONTROL_CLIENTS 16
struct __attribute__((packed)) frame_head { /* of system/frames.py */
    char kind;
    uint32_t size;
};
struct client {
    int fd;    /* -1: the place is free */
    bool asks; /* it has sent something, and waits for the caller */
};
struct control {
    int fd; /* -1: there is none */
    int next; /* the place that the next client gets */
    bool starved; /* there was no descriptor for the last one */
    char *path, *about;
    uint32_t about_size;
    struct client clients[CONTROL_CLIENTS];
};

/* ---- followers.c: who gets the workers' lines from outside */
#define FOLLOWERS 16
#define FOLLOWER_BUFFER (4u * 65536)
struct follower {
    int fd;          /* -1: the place is free */
    bool waits;      /* for room in its socket */
    uint8_t *wanted; /* a byte of each worker; NULL: all are */
    uint64_t lost;   /* lines that found no room, and that it has not been told of */
    uint32_t start, end, size;
    char *buffer;    /* of `size` */
};

/* ---- stdin_fanout.c: the launcher's stdin to several workers */
struct target { int fd; uint32_t done; bool waiting; };
struct input {
    int fd;          /* -1: none */
    bool watchable;  /* not a regular file, which is always ready */
    bool watched;    /* what comes wakes the core */
    bool behind;     /* a terminal in whose background the launcher is */
    uint32_t n, end;
    struct target *targets;
    char *buffer;
};

/* output_pump.c */
void pump_ready(struct ir_group *g, uint32_t index, int which);
void pump_drain(struct ir_group *g, uint32_t index);
void pump_pass_rest(struct ir_group *g, uint32_t index, int which);
void pump_resume(struct ir_group *g);
void pump_close(struct ir_group *g);
void pump_close_worker(struct ir_group *g, uint32_t index);
bool pump_idle(const struct ir_group *g);
bool pump_is_idle(const struct ir_group *g, uint32_t index);
void pump_renew(struct ir_group *g, uint32_t index);
void pump_log_heading(struct ir_group *g, uint32_t index, const char *heading); /* NULL: none */

/* console_lines.c */
bool ends_line(const char *bytes, uint32_t size);
int lines_init(struct ir_group *g);
int lines_open(struct ir_group *g, const struct ir_worker *workers, uint32_t n);
bool lines_put(struct ir_group *g, uint32_t index, int which, struct sink *sink, const char *bytes,
               uint32_t size);
void lines_ready(struct ir_group *g);
void lines_resume(struct ir_group *g);
bool lines_flush_all(struct ir_group *g);

/* line_rests.c */
int rest_open(struct ir_group *g, const struct ir_worker *workers, uint32_t n);
void rest_note(struct ir_group *g, struct stream *s);
void rest_ready(struct ir_group *g, void (*pass)(struct ir_group *g, uint32_t index, int which));

/* sd_notify.c */
int notify_open(struct ir_group *g, const struct ir_worker *workers, uint32_t n);
int notify_open_worker(struct ir_group *g, const struct ir_worker *worker, uint32_t index);
void notify_ready(struct ir_group *g, uint32_t index);
void notify_dropped(struct ir_group *g, uint32_t index);
void notify_close(struct ir_group *g, uint32_t index);

/* rights_drop.c */
int rights_drop_one(int fd);
int rights_drop_all(int fd);

/* control.c */
void control_open(struct ir_group *g);
void control_ready(struct ir_group *g);
void client_ready(struct ir_group *g, uint32_t index);
void control_close(struct ir_group *g);
void control_free(struct ir_group *g);

/* followers.c */
void followers_put(struct ir_group *g, uint32_t index, int which, const char *bytes, uint32_t size);
void follower_ready(struct ir_group *g, uint32_t index);
void followers_flush(struct ir_group *g);
void followers_close(struct ir_group *g);

/* console_sink.c */
int sink_open(struct ir_group *g);
int sink_open_late(struct ir_group *g, int which, struct sink **ret_sink);
struct sink *sink_of(struct ir_group *g, int which);
bool sink_has_room(struct ir_group *g, struct sink *s, uint32_t wanted);
void sink_begin(struct sink *s, const struct stream *stream);
void sink_put(struct sink *s, const char *bytes, uint32_t size);
void sink_flush(struct ir_group *g, struct sink *s);
void sink_flush_all(struct ir_group *g);
bool sink_finish_all(struct ir_group *g);
void sink_close(struct ir_group *g);

/* stdin_fanout.c */
int input_open(struct ir_group *g, const int *fds, uint32_t n);
int input_renew(struct ir_group *g, uint32_t target, int fd);
void input_source_ready(struct ir_group *g);
void input_target_ready(struct ir_group *g, uint32_t index);
void input_resume(struct ir_group *g);
void input_close(struct ir_group *g);

#endif
