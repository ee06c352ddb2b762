/*
 * lines: makes numbered lines fast, and tells whether all of them came out at the other end.
 *
 *   lines write [-k RANK] [-b BLOCK] COUNT
 *       COUNT lines of 100 bytes to stdout, in blocks that cut lines anywhere
 *   lines check RANKS COUNT
 *       reads stdin; one line of JSON: what was lost, out of order, or changed
 *   lines sink
 *       reads stdin to the end; one line of JSON: how many bytes
 *
 * A line is "rank=0003 seq=0000001234 " and 74 letters that follow from both numbers.
 * A launcher may put anything before it, if it is the same for every line of a rank.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    LINE_SIZE = 100,
    RANK_AT = 5,
    RANK_DIGITS = 4,
    SEQ_AT = 14,
    SEQ_DIGITS = 10,
    FILL_AT = 25,
    FILL_SIZE = LINE_SIZE - FILL_AT - 1,
    PREFIX_MAX = 64,
    RANKS_MAX = 1024,
    BUFFER_SIZE = 1 << 20,
};

struct line_rank {
    uint64_t next;
    bool has_prefix;
    size_t prefix_size;
    char prefix[PREFIX_MAX];
};

struct tally {
    uint64_t bytes, lines, lost, disordered, broken;
    struct line_rank ranks[RANKS_MAX];
};

static char letters[FILL_SIZE + 26];
static char buffer[BUFFER_SIZE + PREFIX_MAX + LINE_SIZE];

static _Noreturn void die(const char *what) {
    (void)fprintf(stderr, "lines: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t parse_number(const char *text, uint64_t most) {
    char *end;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    if (errno || end == text || *end || *text == '-' || v > most) {
        (void)fprintf(stderr, "lines: not a number up to %llu: %s\n",
                      (unsigned long long)most, text);
        exit(2);
    }
    return v;
}

static void fill_letters(void) {
    for (size_t i = 0; i < sizeof letters; i++)
        letters[i] = (char)('a' + i % 26);
}

static const char *line_fill(uint64_t rank, uint64_t seq) {
    return letters + (rank + seq) % 26;
}

static void put_digits(char *at, int digits, uint64_t v) {
    for (int i = digits; i-- > 0; v /= 10)
        at[i] = (char)('0' + v % 10);
}

/* False if there is anything but a digit. */
static bool get_digits(const char *at, int digits, uint64_t *ret_v) {
    uint64_t v = 0;
    for (int i = 0; i < digits; i++) {
        if (at[i] < '0' || at[i] > '9')
            return false;
        v = v * 10 + (uint64_t)(at[i] - '0');
    }
    *ret_v = v;
    return true;
}

static void write_whole(const char *p, size_t size) {
    while (size > 0) {
        ssize_t n = write(STDOUT_FILENO, p, size);
        if (n < 0 && errno != EINTR)
            die("write");
        if (n > 0) {
            p += n;
            size -= (size_t)n;
        }
    }
}

static void count_up(char *seq) {
    for (int i = SEQ_DIGITS; i-- > 0;) {
        if (seq[i]++ != '9')
            return;
        seq[i] = '0';
    }
}

static void write_lines(uint64_t rank, uint64_t count, size_t block) {
    char head[FILL_AT + 1];
    size_t used = 0;
    memcpy(head, "rank=0000 seq=0000000000 ", sizeof head);
    put_digits(head + RANK_AT, RANK_DIGITS, rank);
    for (uint64_t seq = 0; seq < count; seq++) {
        char *line = buffer + used;
        memcpy(line, head, FILL_AT);
        memcpy(line + FILL_AT, line_fill(rank, seq), FILL_SIZE);
        line[LINE_SIZE - 1] = '\n';
        count_up(head + SEQ_AT);
        used += LINE_SIZE;
        if (used >= block) {
            write_whole(buffer, block);
            used -= block;
            memmove(buffer, buffer + block, used);
        }
    }
    write_whole(buffer, used);
}

static uint64_t rank_from_env(void) {
    static const char *const names[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "PMI_RANK", "SLURM_PROCID"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (getenv(names[i]))
            return parse_number(getenv(names[i]), RANKS_MAX - 1);
    return 0;
}

static int main_write(int argc, char **argv) {
    uint64_t rank = rank_from_env();
    size_t block = 65536;
    for (int c; (c = getopt(argc, argv, "+k:b:")) != -1;) {
        switch (c) {
        case 'k': rank = parse_number(optarg, RANKS_MAX - 1); break;
        case 'b': block = (size_t)parse_number(optarg, BUFFER_SIZE); break;
        default: return 2;
        }
    }
    if (optind != argc - 1 || block < LINE_SIZE)
        return 2;
    write_lines(rank, parse_number(argv[optind], UINT32_MAX), block);
    return 0;
}

/* The same for every line of a rank, and no part of another line. */
static bool line_prefix_good(struct line_rank *lr, const char *prefix, size_t size) {
    if (memmem(prefix, size, "rank=", RANK_AT))
        return false;
    if (!lr->has_prefix) {
        lr->has_prefix = true;
        memcpy(lr->prefix, prefix, size);
        lr->prefix_size = size;
    }
    return lr->prefix_size == size && memcmp(lr->prefix, prefix, size) == 0;
}

static bool line_parse(const char *p, uint64_t *ret_rank, uint64_t *ret_seq) {
    return memcmp(p, "rank=", RANK_AT) == 0 &&
           get_digits(p + RANK_AT, RANK_DIGITS, ret_rank) && *ret_rank < RANKS_MAX &&
           memcmp(p + RANK_AT + RANK_DIGITS, " seq=", 5) == 0 &&
           get_digits(p + SEQ_AT, SEQ_DIGITS, ret_seq) && p[FILL_AT - 1] == ' ' &&
           memcmp(p + FILL_AT, line_fill(*ret_rank, *ret_seq), FILL_SIZE) == 0;
}

/* `size` is without the newline. */
static void tally_line(struct tally *t, const char *line, size_t size) {
    uint64_t rank, seq;
    size_t body = LINE_SIZE - 1;
    t->lines++;
    if (size < body || size - body > PREFIX_MAX ||
        !line_parse(line + size - body, &rank, &seq)) {
        t->broken++;
        return;
    }
    struct line_rank *lr = &t->ranks[rank];
    if (!line_prefix_good(lr, line, size - body))
        t->broken++;
    if (seq < lr->next) {
        t->disordered++;
        return;
    }
    t->lost += seq - lr->next;
    lr->next = seq + 1;
}

/* Returns how much of the buffer is the start of a line that goes on. */
static size_t tally_buffer(struct tally *t, size_t size) {
    const char *p = buffer, *end = buffer + size;
    for (const char *nl; (nl = memchr(p, '\n', (size_t)(end - p))); p = nl + 1)
        tally_line(t, p, (size_t)(nl - p));
    size_t rest = (size_t)(end - p);
    if (rest > PREFIX_MAX + LINE_SIZE) {
        t->broken++;
        rest = 0;
    }
    memmove(buffer, p, rest);
    return rest;
}

static ssize_t read_some(char *at, size_t size) {
    ssize_t n;
    do
        n = read(STDIN_FILENO, at, size);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        die("read");
    return n;
}

static void print_tally(const struct tally *t, size_t ranks) {
    printf("{\"bytes\": %llu, \"lines\": %llu, \"lost\": %llu, \"disordered\": %llu, "
           "\"broken\": %llu, \"prefixes\": [",
           (unsigned long long)t->bytes, (unsigned long long)t->lines,
           (unsigned long long)t->lost, (unsigned long long)t->disordered,
           (unsigned long long)t->broken);
    for (size_t i = 0; i < ranks; i++) {
        printf("%s\"", i ? ", " : "");
        for (size_t k = 0; k < t->ranks[i].prefix_size; k++)
            printf("\\u%04x", (unsigned char)t->ranks[i].prefix[k]);
        printf("\"");
    }
    printf("]}\n");
}

static int main_check(int argc, char **argv) {
    static struct tally t;
    if (argc != 3)
        return 2;
    size_t ranks = (size_t)parse_number(argv[1], RANKS_MAX);
    uint64_t count = parse_number(argv[2], UINT32_MAX);
    size_t rest = 0;
    for (ssize_t n; (n = read_some(buffer + rest, BUFFER_SIZE)) > 0;) {
        t.bytes += (uint64_t)n;
        rest = tally_buffer(&t, rest + (size_t)n);
    }
    if (rest > 0)
        t.broken++;
    for (size_t i = 0; i < ranks; i++)
        t.lost += count > t.ranks[i].next ? count - t.ranks[i].next : 0;
    print_tally(&t, ranks);
    return t.lost || t.disordered || t.broken || t.lines != count * ranks;
}

static int main_sink(void) {
    uint64_t bytes = 0;
    for (ssize_t n; (n = read_some(buffer, BUFFER_SIZE)) > 0;)
        bytes += (uint64_t)n;
    printf("{\"bytes\": %llu}\n", (unsigned long long)bytes);
    return 0;
}

int main(int argc, char **argv) {
    int r = 2;
    fill_letters();
    if (argc > 1 && strcmp(argv[1], "write") == 0)
        r = main_write(argc - 1, argv + 1);
    else if (argc > 1 && strcmp(argv[1], "check") == 0)
        r = main_check(argc - 1, argv + 1);
    else if (argc > 1 && strcmp(argv[1], "sink") == 0)
        r = main_sink();
    if (r == 2)
        (void)fprintf(stderr, "lines: write [-k RANK] [-b BLOCK] COUNT | "
                              "check RANKS COUNT | sink\n");
    return r;
}
