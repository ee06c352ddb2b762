/* io/output_pump.c: from the workers' pipes to lines.
 *
 * A line ends with \n, \r\n or a lone \r (a progress bar's). Whole lines leave, with the worker's
 * label or plain, for the console, and unchanged for the log. There lines of stderr begin with a
 * mark unless they have a separate log. Within a stream, no byte changes, gets lost, or moves; the
 * core only adds labels, marks, and missing newlines. It does not read a stream whose console is
 * full: its worker waits, as it would on any pipe. */
#include "group/group.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#define ERROR_MARK "err: "
#define DRAIN_READS 32 /* more than any pipe holds: no writer can hold the launch */

static void tail_keep(struct worker *w, const char *bytes, uint32_t size) {
    uint32_t skipped = size > TAIL_BUFFER ? size - TAIL_BUFFER : 0;
    uint32_t at = (uint32_t)((w->tail_count + skipped) % TAIL_BUFFER), n = size - skipped;
    uint32_t first = n < TAIL_BUFFER - at ? n : TAIL_BUFFER - at;
    memcpy(w->tail + at, bytes + skipped, first);
    memcpy(w->tail, bytes + skipped + first, n - first);
    w->tail_count += size;
}

int ir_group_tail(const struct ir_group *g, int worker, char *ret_bytes, uint32_t size) {
    if (g == NULL) return 0;
    if (worker < 0 || (uint32_t)worker >= g->n) return -EINVAL;
    const struct worker *w = &g->workers[worker];
    if (w->tail == NULL) return 0;
    uint64_t kept = w->tail_count < TAIL_BUFFER ? w->tail_count : TAIL_BUFFER;
    uint32_t n = size < kept ? size : (uint32_t)kept;
    for (uint32_t i = 0; i < n; i++) ret_bytes[i] = w->tail[(w->tail_count - n + i) % TAIL_BUFFER];
    return (int)n;
}

/* Where the last line of a piece of several begins. */
static uint32_t last_line(const struct stream *s) {
    uint32_t from = s->last, at = s->last + s->last_size;
    while (at > from && ends_line(s->buffer, at)) at--;
    while (at > from && !ends_line(s->buffer, at)) at--;
    return at;
}

/* What passed stays in the buffer until the next read, so it needs no second place. */
int ir_group_line(const struct ir_group *g, int worker, char *ret_bytes, uint32_t size) {
    if (g == NULL) return 0;
    if (worker < 0 || (uint32_t)worker >= g->n) return -EINVAL;
    const struct stream *s = &g->workers[worker].streams[g->workers[worker].wrote];
    bool is_unended = s->end > s->start;
    uint32_t from = is_unended ? s->start : last_line(s);
    uint32_t n = is_unended ? s->end - s->start : s->last + s->last_size - from;
    if (n > size) {
        from += n - size;
        n = size;
    }
    if (n > 0) memcpy(ret_bytes, s->buffer + from, n);
    return (int)n;
}

/* ---- the log */

static bool shares_log(const struct worker *w) {
    return w->error_log_fd < 0;
}

static int log_of(const struct worker *w, int which) {
    return which == 0 || shares_log(w) ? w->log_fd : w->error_log_fd;
}

static void log_write(struct ir_group *g, uint32_t index, int which, const char *bytes,
                      uint32_t size) {
    struct worker *w = &g->workers[index];
    while (size > 0) {
        ssize_t n = fd_write(log_of(w, which), bytes, size);
        if (n == -EINTR) continue;
        if (n < 0) {
            if (w->log_lost) return;
            w->log_lost = true; /* reported once; later lines have another try */
            struct ir_event *event = event_push(g, IR_OUTPUT_LOST, (int)index, w->pid);
            event->code = which;
            event->signal = (int)-n;
            return;
        }
        bytes += n;
        size -= (uint32_t)n;
    }
}

/* An unended line of the other stream gets its newline now, not before: a log of one stream is
 * what the worker wrote, to the byte. */
static void log_begin(struct ir_group *g, uint32_t index, int which) {
    struct worker *w = &g->workers[index];
    if (w->log_open >= 0 && w->log_open != which) log_write(g, index, which, "\n", 1);
    w->log_open = -1;
}

static void log_plain(struct ir_group *g, uint32_t index, int which, const char *bytes,
                      uint32_t size) {
    struct worker *w = &g->workers[index];
    if (shares_log(w)) log_begin(g, index, which);
    log_write(g, index, which, bytes, size);
    if (shares_log(w) && !ends_line(bytes, size)) w->log_open = which;
}

/* Gather labeled lines, so that a traceback is one write, not one per line. */
struct gathered {
    uint32_t size;
};

static void gather(struct ir_group *g, uint32_t index, struct gathered *lines, const char *bytes,
                   uint32_t size) {
    if (lines->size + size > STREAM_BUFFER) {
        log_write(g, index, 1, g->log_buffer, lines->size);
        lines->size = 0;
    }
    memcpy(g->log_buffer + lines->size, bytes, size);
    lines->size += size;
}

static void log_marked(struct ir_group *g, uint32_t index, struct gathered *lines,
                       const char *bytes, uint32_t size) {
    struct worker *w = &g->workers[index];
    bool goes_on = w->log_open == 1;
    log_begin(g, index, 1);
    if (!goes_on) gather(g, index, lines, ERROR_MARK, sizeof ERROR_MARK - 1);
    gather(g, index, lines, bytes, size);
    if (!ends_line(bytes, size)) w->log_open = 1;
}

void pump_log_heading(struct ir_group *g, uint32_t index, const char *heading) {
    if (heading == NULL || g->workers[index].log_fd < 0) return;
    log_write(g, index, 0, heading, (uint32_t)strlen(heading));
}

/* ---- lines */

/* The size of the next piece to pass on, 0 if its end is not there yet. A \r that is the last byte
 * at hand waits for the next one, which may be the \n that belongs to it. */
static uint32_t next_piece(const struct stream *s) {
    const char *at = s->buffer + s->start;
    uint32_t size = s->end - s->start;
    if (size == 0) return 0;
    const char *newline = memchr(at, '\n', size);
    uint32_t searched = newline != NULL ? (uint32_t)(newline - at) : size;
    const char *cr = memchr(at, '\r', searched);
    if (cr != NULL) {
        uint32_t n = (uint32_t)(cr - at) + 1;
        if (n < size) return cr[1] == '\n' ? n + 1 : n;
        if (s->ended || s->due) return n;
        return size == STREAM_BUFFER ? n - 1 : 0;
    }
    if (newline != NULL) return searched + 1;
    return s->ended || s->due || size == STREAM_BUFFER ? size : 0;
}

/* The same of lines that nothing is put between: as many as there are. */
static uint32_t next_lines(const struct stream *s) {
    const char *at = s->buffer + s->start;
    uint32_t size = s->end - s->start;
    if (size == 0) return 0;
    uint32_t known = s->ended || s->due ? size : size - 1;
    const char *newline = memrchr(at, '\n', size);
    uint32_t whole = newline != NULL ? (uint32_t)(newline - at) + 1 : 0;
    const char *cr = whole < known ? memrchr(at + whole, '\r', known - whole) : NULL;
    if (cr != NULL) return (uint32_t)(cr - at) + 1;
    if (whole > 0) return whole;
    if (size == STREAM_BUFFER) return known;
    return s->ended || s->due ? size : 0;
}

/* Passes on what is whole. False: the console is full, and something remains. */
static bool stream_pass(struct ir_group *g, uint32_t index, int which) {
    struct stream *s = &g->workers[index].streams[which];
    struct sink *sink = (s->to & IR_TO_CONSOLE) ? sink_of(g, which) : NULL;
    bool logged = (s->to & IR_TO_LOG) && log_of(&g->workers[index], which) >= 0;
    bool marked = logged && which == 1 && shares_log(&g->workers[index]);
    struct gathered lines = {0};
    uint32_t from = s->start, size;
    bool all = true, plain = (s->plain || sink == NULL) && !marked;
    while ((size = plain ? next_lines(s) : next_piece(s)) > 0) {
        const char *bytes = s->buffer + s->start;
        if (sink != NULL && !lines_put(g, index, which, sink, bytes, size)) {
            all = false;
            break;
        }
        if (g->followed > 0) followers_put(g, index, which, bytes, size);
        if (marked) log_marked(g, index, &lines, bytes, size);
        s->more = !ends_line(bytes, size);
        s->last = s->start;
        s->last_size = size;
        s->start += size;
    }
    if (logged && !marked && s->start > from)
        log_plain(g, index, which, s->buffer + from, s->start - from);
    if (lines.size > 0) log_write(g, index, 1, g->log_buffer, lines.size);
    if (s->start > from) s->held_ns = 0;
    if (s->start == s->end) s->start = s->end = 0, s->due = false;
    else if (s->plain && sink != NULL && all) rest_note(g, s);
    return all;
}

/* ---- streams */

static void stream_watch(struct ir_group *g, uint32_t index, int which, uint32_t events) {
    const struct stream *s = &g->workers[index].streams[which];
    if (s->fd >= 0) fd_rewatch(g, s->fd, events, which == 0 ? WATCH_OUT : WATCH_ERR, index);
}

static void stream_end(struct ir_group *g, uint32_t index, int which) {
    struct stream *s = &g->workers[index].streams[which];
    s->fd = fd_release(g, s->fd);
    s->ended = true;
    s->paused = !stream_pass(g, index, which);
}

/* One read. Returns how many bytes came; 0 when there is nothing now, or no more at all. */
static uint32_t stream_read(struct ir_group *g, uint32_t index, int which) {
    struct worker *w = &g->workers[index];
    struct stream *s = &w->streams[which];
    if (s->fd < 0 || s->paused) return 0;
    if (s->start > 0) {
        memmove(s->buffer, s->buffer + s->start, s->end - s->start);
        s->end -= s->start;
        s->start = 0;
    }
    ssize_t n = read(s->fd, s->buffer + s->end, STREAM_BUFFER - s->end);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (n <= 0) {
        stream_end(g, index, which);
        return 0;
    }
    w->active_ns = clock_ns();
    w->wrote = which;
    s->bytes += (uint64_t)n;
    if (which == 1) tail_keep(w, s->buffer + s->end, (uint32_t)n);
    s->end += (uint32_t)n;
    if (!stream_pass(g, index, which)) {
        s->paused = true;
        stream_watch(g, index, which, 0);
    }
    return (uint32_t)n;
}

void pump_ready(struct ir_group *g, uint32_t index, int which) {
    (void)stream_read(g, index, which);
}

/* What a worker had written when it ended. */
void pump_drain(struct ir_group *g, uint32_t index) {
    for (int which = 0; which < 2; which++)
        for (int i = 0; i < DRAIN_READS; i++)
            if (stream_read(g, index, which) == 0) break;
}

/* It has waited long enough for the end of its line. */
void pump_pass_rest(struct ir_group *g, uint32_t index, int which) {
    struct stream *s = &g->workers[index].streams[which];
    s->held_ns = 0;
    s->due = s->end > s->start;
    if (s->paused || stream_pass(g, index, which)) return;
    s->paused = true;
    stream_watch(g, index, which, 0);
}

/* The console has room again. */
void pump_resume(struct ir_group *g) {
    lines_resume(g);
    for (uint32_t i = 0; i < g->started; i++)
        for (int which = 0; which < 2; which++) {
            struct stream *s = &g->workers[i].streams[which];
            if (!s->paused || !stream_pass(g, i, which)) continue;
            s->paused = false;
            stream_watch(g, i, which, EPOLLIN);
        }
}

/* Nothing of the launch lives any more: read what the pipes hold, and close them. Who still has
 * one open is a process that this user may not end. */
void pump_close(struct ir_group *g) {
    for (uint32_t i = 0; i < g->started; i++) pump_close_worker(g, i);
}

void pump_close_worker(struct ir_group *g, uint32_t index) {
    pump_drain(g, index);
    for (int which = 0; which < 2; which++) {
        struct stream *s = &g->workers[index].streams[which];
        if (s->fd < 0 || s->paused) continue;
        stream_end(g, index, which);
        struct ir_event *event = event_push(g, IR_OUTPUT_HELD, (int)index, g->workers[index].pid);
        event->code = which;
    }
}

bool pump_idle(const struct ir_group *g) {
    for (uint32_t i = 0; i < g->started; i++)
        if (!pump_is_idle(g, i)) return false;
    return true;
}

bool pump_is_idle(const struct ir_group *g, uint32_t index) {
    const struct stream *streams = g->workers[index].streams;
    for (int which = 0; which < 2; which++)
        if (streams[which].fd >= 0 || streams[which].paused) return false;
    return true;
}

/* Before its next run: nothing of the last one is left (pump_is_idle). An unended line of that is
 * no beginning of this one. */
void pump_renew(struct ir_group *g, uint32_t index) {
    struct worker *w = &g->workers[index];
    for (int which = 0; which < 2; which++) {
        struct stream *s = &w->streams[which];
        s->ended = s->more = s->due = false;
        s->held_ns = 0;
        s->start = s->end = s->last = s->last_size = 0;
        for (int i = 0; i < 2; i++)
            if (g->sinks[i].last == s) sink_begin(&g->sinks[i], NULL);
    }
    if (w->log_open >= 0) log_write(g, index, 0, "\n", 1);
    w->wrote = 0;
    w->tail_count = 0;
    w->log_open = -1;
    w->log_lost = false;
}
