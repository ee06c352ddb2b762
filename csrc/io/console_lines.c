/* io/console_lines.c: how a line of a worker stands on the console: its time, its label, its end.
 *
 * With a fold (line_fold.c), lines wait there until all workers have written them, or for
 * IR_FOLD_MS. The timer runs only while it holds something. What does not fold follows all held
 * lines. */
#include "group/group.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S 1000000000LL

bool ends_line(const char *bytes, uint32_t size) {
    return bytes[size - 1] == '\n' || bytes[size - 1] == '\r';
}

static uint32_t expected_of(const struct ir_worker *workers, uint32_t n, int k) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i++) count += (workers[i].output[k] & IR_TO_CONSOLE) != 0;
    return count;
}

/* The caller's strings are its own. */
int lines_init(struct ir_group *g) {
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < 2; i++) {
            const char *given = g->config.fold_label[k][i];
            if (given == NULL) return 0;
            if (strlen(given) >= FOLD_LABEL) return -EINVAL;
            (void)strcpy(g->fold_label[k][i], given);
        }
    g->folds = true;
    return 0;
}

int lines_open(struct ir_group *g, const struct ir_worker *workers, uint32_t n) {
    if (!g->folds || n < 2) return 0;
    uint32_t expected[2] = {expected_of(workers, n, 0), expected_of(workers, n, 1)};
    for (int i = 0; i < 2; i++) {
        if (g->sinks[i].buffer == NULL) continue;
        int r = ir_fold_new(n, expected, &g->sinks[i].fold);
        if (r < 0) return r;
    }
    g->fold_fd = fd_new(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    return g->fold_fd < 0 ? g->fold_fd : fd_watch(g, g->fold_fd, EPOLLIN, WATCH_FOLD, 0);
}

/* ISO 8601, UTC, milliseconds, and a blank. */
static uint32_t time_put(struct ir_group *g, int64_t time_ns, char ret_text[LINE_TIME]) {
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    int64_t then_ns = now.tv_sec * NS_PER_S + now.tv_nsec - (clock_ns() - time_ns);
    time_t second = (time_t)(then_ns / NS_PER_S);
    if (second != g->line_second || g->line_time[0] == '\0') {
        struct tm parts;
        (void)gmtime_r(&second, &parts);
        (void)strftime(g->line_time, sizeof g->line_time, "%Y-%m-%dT%H:%M:%S.", &parts);
        g->line_second = second;
    }
    uint32_t size = (uint32_t)strlen(g->line_time);
    memcpy(ret_text, g->line_time, size);
    int ms = (int)(then_ns % NS_PER_S / NS_PER_MS);
    const char rest[] = {(char)('0' + ms / 100), (char)('0' + ms / 10 % 10), (char)('0' + ms % 10),
                         'Z', ' '};
    memcpy(ret_text + size, rest, sizeof rest);
    return size + (uint32_t)sizeof rest;
}

struct line {
    const struct stream *stream; /* whose it is; NULL: of several */
    const char *label, *bytes;
    uint32_t label_size, size;
    int64_t time_ns;
};

/* False: there is no room. */
static bool line_write(struct ir_group *g, struct sink *sink, const struct line *line) {
    char time[LINE_TIME];
    const struct stream *s = line->stream;
    uint32_t time_size = g->config.flags & IR_TIMESTAMPS ? time_put(g, line->time_ns, time) : 0;
    if (!sink_has_room(g, sink, time_size + line->label_size + line->size + 2)) return false;
    sink_begin(sink, s);
    sink_put(sink, time, time_size);
    if (s == NULL || !s->plain) sink_put(sink, line->label, line->label_size);
    sink_put(sink, line->bytes, line->size);
    if (s != NULL && s->plain) sink->open = !ends_line(line->bytes, line->size);
    else if (!ends_line(line->bytes, line->size)) sink_put(sink, "\n", 1);
    return true;
}

static bool own_write(struct ir_group *g, struct sink *sink, const struct stream *s,
                      const char *bytes, uint32_t size, int64_t time_ns) {
    struct line line = {.stream = s, .bytes = bytes, .size = size, .time_ns = time_ns};
    line.label = s->more ? s->label_more : s->label;
    line.label_size = s->more ? s->label_more_size : s->label_size;
    return line_write(g, sink, &line);
}

/* ---- with a fold */

static bool shared_write(struct ir_group *g, struct sink *sink, const struct ir_folded *folded) {
    char label[FOLD_LABEL * 2 + IR_FOLD_RANKS];
    char *at = stpcpy(label, g->fold_label[folded->stream][0]);
    at += ir_fold_ranks(sink->fold, g->config.first_rank, at);
    at = stpcpy(at, g->fold_label[folded->stream][1]);
    struct line line = {.label = label, .label_size = (uint32_t)(at - label)};
    line.bytes = folded->line, line.size = folded->size, line.time_ns = folded->time_ns;
    return line_write(g, sink, &line);
}

/* The oldest held line. False: there is no room. */
static bool first_write(struct ir_group *g, struct sink *sink) {
    struct ir_folded folded;
    if (ir_fold_first(sink->fold, &folded) == 0) return true;
    bool done;
    if (folded.count > 1) done = shared_write(g, sink, &folded);
    else {
        struct line line = {.stream = &g->workers[folded.rank].streams[folded.stream]};
        line.label = line.stream->label, line.label_size = line.stream->label_size;
        line.bytes = folded.line, line.size = folded.size, line.time_ns = folded.time_ns;
        done = line_write(g, sink, &line);
    }
    if (done) ir_fold_drop(sink->fold);
    return done;
}

/* Writes what is due at `now_ns`. False: there is no room for all of it. */
static bool due_write(struct ir_group *g, struct sink *sink, int64_t now_ns) {
    if (sink->fold == NULL) return true;
    while (ir_fold_due_ns(sink->fold) <= now_ns)
        if (!first_write(g, sink)) return false;
    return true;
}

/* Write all held lines now. False: there is no room for all of it. */
static bool all_write(struct ir_group *g, struct sink *sink) {
    return due_write(g, sink, INT64_MAX - 1);
}

static int64_t next_due_ns(const struct ir_group *g) {
    int64_t due_ns = INT64_MAX;
    for (int i = 0; i < 2; i++) {
        const struct sink *sink = &g->sinks[i];
        if (sink->fold == NULL || sink->awaited != 0) continue; /* its room is what it waits for */
        if (ir_fold_due_ns(sink->fold) < due_ns) due_ns = ir_fold_due_ns(sink->fold);
    }
    return due_ns;
}

static void timer_start(struct ir_group *g) {
    int64_t due_ns = g->fold_timed ? INT64_MAX : next_due_ns(g);
    if (due_ns == INT64_MAX) return;
    struct itimerspec when = {.it_value = {due_ns / NS_PER_S, due_ns % NS_PER_S}};
    g->fold_timed = timerfd_settime(g->fold_fd, TFD_TIMER_ABSTIME, &when, NULL) == 0;
}

static bool fold_put(struct ir_group *g, uint32_t index, int which, struct sink *sink,
                     const char *bytes, uint32_t size) {
    struct stream *s = &g->workers[index].streams[which];
    int64_t now_ns = g->workers[index].active_ns;
    int r = -EMSGSIZE;
    while (!s->more) { /* the rest of a long line is no line that another could write, too */
        r = ir_fold_add(sink->fold, index, which, bytes, size, now_ns);
        if (r != -ENOSPC) break;
        if (!first_write(g, sink)) return false;
    }
    if (r < 0) return all_write(g, sink) && own_write(g, sink, s, bytes, size, now_ns);
    (void)due_write(g, sink, now_ns);
    timer_start(g);
    return true;
}

void lines_ready(struct ir_group *g) {
    uint64_t count;
    if (read(g->fold_fd, &count, sizeof count) != (ssize_t)sizeof count) return;
    g->fold_timed = false;
    lines_resume(g);
}

/* ---- for others */

/* False: there is no room. */
bool lines_put(struct ir_group *g, uint32_t index, int which, struct sink *sink, const char *bytes,
               uint32_t size) {
    const struct worker *w = &g->workers[index];
    if (sink->fold != NULL) return fold_put(g, index, which, sink, bytes, size);
    return own_write(g, sink, &w->streams[which], bytes, size, w->active_ns);
}

void lines_resume(struct ir_group *g) {
    for (int i = 0; i < 2; i++) (void)due_write(g, &g->sinks[i], clock_ns());
    timer_start(g);
}

bool lines_flush_all(struct ir_group *g) {
    bool all = true;
    for (int i = 0; i < 2; i++) all = all_write(g, &g->sinks[i]) && all;
    return all;
}

int ir_group_print(struct ir_group *g, int stream, const char *lines, uint32_t size) {
    if (g == NULL) return -ESRCH;
    struct sink *sink = sink_of(g, stream);
    int r = sink == NULL ? sink_open_late(g, stream, &sink) : 0;
    if (r < 0 || sink == NULL || sink->broken) return r;
    (void)lines_flush_all(g); /* the label of the rest is about what came before it */
    if (sink->end + size + 1 > SINK_BUFFER + SINK_MARGIN) return -EAGAIN;
    sink_begin(sink, NULL);
    sink_put(sink, lines, size);
    if (!sink->awaited) sink_flush(g, sink);
    return 0;
}
