/* pump.c: libFuzzer on the output pump: any bytes, in any chunks, on both streams of two workers, to a console that
 * is read now and then and to a log. The rule that is checked: labels taken off, what came out is what was written,
 * per stream and in order; lines never mix, without labels neither; a log of one stream is that stream, to the byte.
 *
 * The first byte of an input chooses consoles and logs, the rest are steps (take_step). */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>

#include "group/group.h"

enum { WORKERS = 2, STREAMS = 2, MOST = 1 << 20, STEPS = 100000 };
enum { ONE_CONSOLE = 1, FILE_CONSOLE = 2, LOG_OUT = 4, LOG_ERR = 8, SMALL_PIPE = 16, PLAIN = 32 };

struct bytes {
    size_t size, capacity;
    char *at;
};

static struct bytes written[WORKERS][STREAMS], shown[STREAMS];
static int ends[WORKERS][STREAMS], console[STREAMS], reader[STREAMS], logs[WORKERS];
static const char *const labels[WORKERS][STREAMS][2] = {
    {{"[0] ", "[0 +] "}, {"[0 err] ", "[0 err +] "}},
    {{"[1] ", "[1 +] "}, {"[1 err] ", "[1 err +] "}},
};
static int mode;

#define CHECK(what) ((what) ? (void)0 : fail(#what, __LINE__))

static void fail(const char *what, int line) {
    (void)fprintf(stderr, "tests/c/fuzz/pump.c:%d: not true: %s\n", line, what);
    abort();
}

static void bytes_add(struct bytes *bytes, const char *more, size_t size) {
    if (size == 0) return;
    if (bytes->size + size > bytes->capacity) {
        bytes->capacity = (bytes->size + size) * 2;
        bytes->at = realloc(bytes->at, bytes->capacity);
    }
    memcpy(bytes->at + bytes->size, more, size);
    bytes->size += size;
}

/* ---- the world around the pump */

static void open_consoles(void) {
    for (int k = 0; k < STREAMS; k++) {
        int fds[2];
        if (k == 1 && (mode & ONE_CONSOLE)) {
            console[1] = console[0];
            reader[1] = -1;
        } else if (mode & FILE_CONSOLE) {
            reader[k] = memfd_create("console", MFD_CLOEXEC);
            console[k] = dup(reader[k]);
        } else {
            CHECK(pipe2(fds, O_CLOEXEC | O_NONBLOCK) == 0);
            if (mode & SMALL_PIPE) (void)fcntl(fds[0], F_SETPIPE_SZ, 4096);
            reader[k] = fds[0];
            console[k] = fds[1];
        }
    }
}

static void read_console(int k, size_t most) {
    static char buffer[65536];
    while (reader[k] >= 0 && most > 0 && !(mode & FILE_CONSOLE)) {
        ssize_t n = read(reader[k], buffer, most < sizeof buffer ? most : sizeof buffer);
        if (n <= 0) return;
        bytes_add(&shown[k], buffer, (size_t)n);
        most -= (size_t)n;
    }
}

static void read_file_whole(int fd, struct bytes *bytes) {
    static char buffer[65536];
    (void)lseek(fd, 0, SEEK_SET);
    for (ssize_t n; (n = read(fd, buffer, sizeof buffer)) > 0;) bytes_add(bytes, buffer, (size_t)n);
}

/* A group whose workers are the fuzzer itself: the pump knows only their pipes. */
static struct ir_group *group_of_pipes(void) {
    struct ir_config config = {.mark = "M=1",
                               .stop_signal = SIGTERM,
                               .console_fd = {console[0], console[1]},
                               .stdin_fd = -1,
                               .message_fd = -1,
                               .suspend_write_fd = -1,
                               .suspend_read_fd = -1};
    struct ir_group *g;
    CHECK(ir_group_new(&config, WORKERS, &g) == 0);
    g->mark[0] = '\0'; /* there are no strays to be looked for */
    g->n = g->started = g->alive = WORKERS;
    g->state = RUNNING;
    g->buffers = malloc((size_t)WORKERS * (2 * STREAM_BUFFER + TAIL_BUFFER));
    char *at = g->buffers;
    for (uint32_t i = 0; i < WORKERS; i++) {
        g->workers[i].log_fd = logs[i] = memfd_create("log", MFD_CLOEXEC);
        g->workers[i].tail = at;
        at += TAIL_BUFFER;
        for (int k = 0; k < STREAMS; k++) {
            struct stream *s = &g->workers[i].streams[k];
            int fds[2];
            CHECK(fd_pipe(fds, 0) == 0);
            (void)fcntl(fds[1], F_SETFL, O_NONBLOCK);
            ends[i][k] = fds[1];
            s->fd = fds[0];
            s->plain = (mode & PLAIN) != 0;
            s->to = IR_TO_CONSOLE | ((mode & (k == 0 ? LOG_OUT : LOG_ERR)) ? IR_TO_LOG : 0);
            s->buffer = at;
            at += STREAM_BUFFER;
            s->label = labels[i][k][0];
            s->label_more = labels[i][k][1];
            s->label_size = (uint32_t)strlen(s->label);
            s->label_more_size = (uint32_t)strlen(s->label_more);
            CHECK(fd_watch(g, s->fd, EPOLLIN, k == 0 ? WATCH_OUT : WATCH_ERR, i) == 0);
        }
    }
    return g;
}

static bool step(struct ir_group *g) {
    struct ir_event events[64];
    int n = ir_group_run_once(g, events, 64);
    for (int i = 0; i < n; i++) {
        CHECK(events[i].kind != IR_OUTPUT_LOST && events[i].kind != IR_OUTPUT_HELD);
        if (events[i].kind == IR_ENDED) return true;
    }
    return false;
}

static bool is_line_end(char byte) {
    return byte == '\n' || byte == '\r';
}

/* Without labels a byte itself says whose it is. */
static const char *signed_by(int worker, int stream, const char *bytes, size_t size) {
    static char own[MOST + 2];
    for (size_t i = 0; i < size; i++)
        own[i] = is_line_end(bytes[i]) ? bytes[i]
                                       : (char)(64 + (worker * STREAMS + stream) * 32 + (bytes[i] & 31));
    return own;
}

static void put(struct ir_group *g, int worker, int stream, const char *bytes, size_t size) {
    if (ends[worker][stream] < 0 || written[worker][stream].size + size > MOST) return;
    if (mode & PLAIN) bytes = signed_by(worker, stream, bytes, size);
    bytes_add(&written[worker][stream], bytes, size);
    for (int i = 0; size > 0; i++) {
        CHECK(i < STEPS);
        ssize_t n = write(ends[worker][stream], bytes, size);
        if (n > 0) {
            bytes += n;
            size -= (size_t)n;
        } else {
            CHECK(n < 0 && errno == EAGAIN);
            (void)step(g);
            read_console(0, SIZE_MAX);
            read_console(1, SIZE_MAX);
        }
    }
}

/* ---- an input */

struct script {
    const uint8_t *at;
    size_t left;
};

static unsigned take(struct script *in) {
    if (in->left == 0) return 0;
    in->left--;
    return *in->at++;
}

static void put_run(struct ir_group *g, int worker, int stream, size_t size, unsigned how) {
    static char run[MOST + 2];
    static const char *const line_ends[] = {"", "\n", "\r", "\r\n"};
    const char *end = line_ends[how & 3];
    memset(run, 'a' + (int)(how >> 2) % 26, size);
    memcpy(run + size, end, strlen(end));
    put(g, worker, stream, run, size + strlen(end));
}

static void take_step(struct ir_group *g, struct script *in) {
    unsigned what = take(in);
    int worker = what >> 3 & 1, stream = what >> 4 & 1;
    switch (what & 7) {
    case 4: put_run(g, worker, stream, (take(in) | take(in) << 8) * 4ul, take(in)); break;
    case 5:
        if ((what & 32) && g->workers[worker].streams[stream].held_ns != 0)
            pump_pass_rest(g, (uint32_t)worker, stream); /* its 0.2 s are over */
        else (void)step(g);
        break;
    case 6: read_console(stream, take(in) * 64ul); break;
    case 7: put_run(g, worker, stream, STREAM_BUFFER + take(in) - 128ul, take(in)); break;
    default: {
        size_t size = take(in) & 63;
        if (size > in->left) size = in->left;
        put(g, worker, stream, (const char *)in->at, size);
        in->at += size;
        in->left -= size;
    }
    }
}

/* ---- what must be true */

/* The size of the first line, with its end: \n, \r\n or a lone \r; all there is where it has none. */
static size_t line_size(const char *at, size_t size) {
    const char *newline = memchr(at, '\n', size);
    const char *cr = memchr(at, '\r', newline != NULL ? (size_t)(newline - at) : size);
    if (cr != NULL) return (size_t)(cr - at) + (cr + 1 == newline ? 2 : 1);
    return newline != NULL ? (size_t)(newline - at) + 1 : size;
}

static bool is_ended(const struct bytes *bytes) {
    char last = bytes->size > 0 ? bytes->at[bytes->size - 1] : '\n';
    return last == '\n' || last == '\r';
}

/* One piece goes by: what was written, and a newline if the line did not end there. */
static size_t check_piece(const struct bytes *want, size_t at, const char *piece, size_t size,
                          bool is_ended) {
    if (!is_ended) CHECK(size > 0 && piece[--size] == '\n');
    CHECK(at + size <= want->size && memcmp(piece, want->at + at, size) == 0);
    CHECK(is_ended == (piece[size - 1] == '\n' || piece[size - 1] == '\r'));
    return at + size;
}

/* Takes the pieces of one stream off a console, in order: a piece is known to be unended by the next
 * one, which goes on with its line, and the last one by what was written. */
static void check_stream(const struct bytes *all, int worker, int stream) {
    const struct bytes *want = &written[worker][stream];
    const char *piece = NULL;
    size_t at = 0, piece_size = 0, longest = 0;
    bool cut = false;
    for (size_t i = 0, size; i < all->size; i += size) {
        size = line_size(all->at + i, all->size - i);
        for (int more = 0; more < 2; more++) {
            size_t label = strlen(labels[worker][stream][more]);
            if (size < label || memcmp(all->at + i, labels[worker][stream][more], label) != 0)
                continue;
            CHECK(!more || piece != NULL);
            if (piece != NULL) at = check_piece(want, at, piece, piece_size, !more);
            cut |= more;
            piece = all->at + i + label;
            piece_size = size - label;
        }
    }
    if (piece != NULL) at = check_piece(want, at, piece, piece_size, is_ended(want));
    CHECK(at == want->size);
    for (size_t i = 0, size; i < want->size; i += size) {
        size = line_size(want->at + i, want->size - i);
        if (size > longest) longest = size;
    }
    CHECK(!cut || longest >= STREAM_BUFFER);
}

static void check_labels(const struct bytes *all) {
    for (size_t i = 0, size; i < all->size; i += size) {
        bool known = false;
        size = line_size(all->at + i, all->size - i);
        for (int n = 0; n < WORKERS * STREAMS * 2; n++) {
            const char *label = labels[n >> 2][n >> 1 & 1][n & 1];
            known |= size > strlen(label) && memcmp(all->at + i, label, strlen(label)) == 0;
        }
        CHECK(known);
    }
}

/* The next byte that ends no line; SIZE_MAX: there is none. */
static size_t next_of(const struct bytes *all, size_t at, int worker, int stream) {
    for (; at < all->size; at++)
        if (!is_line_end(all->at[at]) &&
            (unsigned char)all->at[at] / 32 == 2 + worker * STREAMS + stream)
            return at;
    return SIZE_MAX;
}

/* Every byte of a stream, in order, and as many line ends as all have written, at least. */
static void check_plain_stream(const struct bytes *all, int worker, int stream) {
    const struct bytes *want = &written[worker][stream];
    size_t at = 0;
    for (size_t i = 0; i < want->size; i++) {
        if (is_line_end(want->at[i])) continue;
        at = next_of(all, at, worker, stream);
        CHECK(at != SIZE_MAX && all->at[at] == want->at[i]);
        at++;
    }
    CHECK(next_of(all, at, worker, stream) == SIZE_MAX);
}

static void check_plain_lines(const struct bytes *all) {
    for (size_t i = 1; i < all->size; i++)
        CHECK(is_line_end(all->at[i]) || is_line_end(all->at[i - 1]) ||
              (unsigned char)all->at[i] / 32 == (unsigned char)all->at[i - 1] / 32);
}

static size_t count_line_ends(const struct bytes *bytes) {
    size_t n = 0;
    for (size_t i = 0; i < bytes->size; i++) n += is_line_end(bytes->at[i]);
    return n;
}

static void check_console(int k) {
    size_t ends_written = 0;
    if (!(mode & PLAIN)) {
        check_labels(&shown[k]);
        return;
    }
    check_plain_lines(&shown[k]);
    for (int i = 0; i < WORKERS; i++)
        for (int stream = 0; stream < STREAMS; stream++)
            if (k == (mode & ONE_CONSOLE ? 0 : stream))
                ends_written += count_line_ends(&written[i][stream]);
    CHECK(count_line_ends(&shown[k]) >= ends_written);
}

static void check_log(int worker) {
    struct bytes log = {0}, want = {0};
    int stream = mode & LOG_ERR ? 1 : 0;
    const struct bytes *from = &written[worker][stream];
    if ((mode & LOG_ERR) && (mode & LOG_OUT))
        return; /* their order is theirs: tests/launch/test_output.py */
    for (size_t i = 0, size; (mode & (LOG_ERR | LOG_OUT)) && i < from->size; i += size) {
        size = line_size(from->at + i, from->size - i);
        if (stream == 1) bytes_add(&want, "err: ", 5);
        bytes_add(&want, from->at + i, size);
    }
    read_file_whole(logs[worker], &log);
    CHECK(log.size == want.size && (log.size == 0 || memcmp(log.at, want.at, log.size) == 0));
    free(log.at);
    free(want.at);
}

static void check_tail(const struct ir_group *g, int worker) {
    char tail[TAIL_BUFFER];
    const struct bytes *want = &written[worker][1];
    size_t size = want->size < TAIL_BUFFER ? want->size : TAIL_BUFFER;
    CHECK(ir_group_tail(g, worker, tail, TAIL_BUFFER) == (int)size);
    CHECK(size == 0 || memcmp(tail, want->at + want->size - size, size) == 0);
}

/* The workers end: what they had written is drained (as worker_finish does), and the group ends. */
static void finish(struct ir_group *g) {
    for (uint32_t i = 0; i < WORKERS; i++) {
        for (int k = 0; k < STREAMS; k++) ends[i][k] = fd_close(ends[i][k]);
        pump_drain(g, i);
    }
    g->alive = 0;
    for (int i = 0; !step(g); i++) {
        CHECK(i < STEPS);
        read_console(0, SIZE_MAX);
        read_console(1, SIZE_MAX);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct script in = {.at = data, .left = size};
    mode = (int)take(&in);
    open_consoles();
    struct ir_group *g = group_of_pipes();
    while (in.left > 0) take_step(g, &in);
    finish(g);
    for (int k = 0; k < STREAMS; k++) {
        read_console(k, SIZE_MAX);
        if ((mode & FILE_CONSOLE) && reader[k] >= 0) read_file_whole(reader[k], &shown[k]);
        check_console(k);
    }
    for (int i = 0; i < WORKERS; i++) {
        for (int k = 0; k < STREAMS; k++)
            (mode & PLAIN ? check_plain_stream : check_stream)(&shown[mode & ONE_CONSOLE ? 0 : k], i, k);
        check_log(i);
        check_tail(g, i);
        (void)fd_close(logs[i]);
    }
    ir_group_free(&g);
    CHECK(g == NULL);
    for (int k = 0; k < STREAMS; k++) {
        if (k == 0 || !(mode & ONE_CONSOLE)) (void)fd_close(console[k]);
        (void)fd_close(reader[k]);
        for (int i = 0; i < WORKERS; i++) written[i][k].size = 0;
        shown[k].size = 0;
    }
    return 0;
}
